"""Reading torchrun's and Slurm's variables."""

import pytest

import microparallel as mp
from microparallel.topology.placement import ALONE, find_placement, first_host


def test_nothing_set_is_a_world_of_one():
    assert find_placement({"PATH": "/bin"}) == ALONE


def test_torchrun_wins_over_slurm():
    placement = find_placement(
        {
            "RANK": "5",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "4",
            "MASTER_ADDR": "node7",
            "MASTER_PORT": "1234",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "SLURM_PROCID": "0",
            "SLURM_NTASKS": "1",
        }
    )
    assert (placement.rank, placement.world_size, placement.local_rank, placement.local_world_size) == (5, 8, 1, 4)
    assert (placement.address, placement.port) == ("node7", 1234)
    assert placement.shared_store and not placement.hosts_store


def test_slurm():
    placement = find_placement(
        {
            "SLURM_PROCID": "6",
            "SLURM_NTASKS": "11",
            "SLURM_LOCALID": "2",
            "SLURM_NODEID": "1",
            "SLURM_TASKS_PER_NODE": "4(x2),3",
            "SLURM_JOB_ID": "123456",
            "SLURM_JOB_NODELIST": "gpu[003-005,9].cluster,login",
        }
    )
    assert (placement.rank, placement.world_size, placement.local_rank, placement.local_world_size) == (6, 11, 2, 4)
    assert (placement.address, placement.port) == ("gpu003.cluster", 23456)


def test_the_batch_script_itself_is_no_task():
    script = {"ENVIRONMENT": "BATCH", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    assert find_placement(script) == ALONE
    assert find_placement(script | {"SLURM_STEP_ID": "0"}).world_size == 4


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("alpha", "alpha"), ("alpha,beta", "alpha"), ("n[1-4]", "n1"), ("n[07,09]", "n07"), ("a-b[10-12]-x,c", "a-b10-x")],
)
def test_first_host(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "1"}, "WORLD_SIZE is not set"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 of a world of 2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "["}, "names no machine"),
    ],
)
def test_nonsense_is_named(environment, words):
    with pytest.raises(mp.errors.UsageError, match=words.replace("[", r"\[")):
        find_placement(environment)
