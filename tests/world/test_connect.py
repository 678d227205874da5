"""Joining a world whose ranks another program has started."""

import os
import re
import socket
import threading

import pytest
import torch
import torch.distributed as dist

import microparallel as mp
from microparallel.topology.placement import Placement
from microparallel.world.meeting import report_missing_ranks, show_missing_ranks

SCRIPT = """
import torch, microparallel as mp
with mp.connect(transport="gloo", timeout=30) as comms:
    total = comms.all_reduce(torch.tensor([comms.rank + 1]))
    print(comms.rank, comms.world_size, comms.local_rank, total.item(), flush=True)
"""


LOSING_ONE = """
import os, signal, torch, microparallel as mp
comms = mp.connect(transport="TRANSPORT", timeout=30)
comms.barrier()
if comms.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    for _ in range(1000):
        comms.all_reduce(torch.ones(1000))
except mp.errors.PeerLost as error:
    print(error.ranks, error, sep="|", flush=True)
"""


@pytest.fixture
def run_ranks(start, tmp_path, monkeypatch):
    """Run a script in a process for each environment; returns what each printed."""
    for name in os.environ:
        if name.startswith(("SLURM", "MASTER")):
            monkeypatch.delenv(name)

    def run(environments, text=SCRIPT, waited_for_last=-1):
        script = tmp_path / "script.py"
        script.write_text(text)
        ranks = [start("python", script, **environment) for environment in environments]
        for rank in sorted(ranks, key=lambda rank: rank is ranks[waited_for_last]):
            rank.wait(50)
        return [rank.output.strip() for rank in ranks]

    return run


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_world_of_one():
    with mp.connect(transport="gloo") as comms:
        assert (comms.rank, comms.world_size, comms.prev_rank, comms.next_rank) == (0, 1, None, None)
        assert comms.all_reduce(torch.ones(2), op="mean").tolist() == [1.0, 1.0]
        assert comms.scatter([torch.ones(2)]).tolist() == [1.0, 1.0]
        comms.barrier()
        assert dist.is_initialized()  # torch's own wrappers may be used beside ours
    assert not dist.is_initialized()


def test_a_group_that_exists_already_is_used_and_left_alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with mp.connect() as comms:
            assert comms.all_gather(torch.ones(1)) == [torch.ones(1)]
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_torchrun_variables(run_ranks):
    port = str(free_port())
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    rows = run_ranks([{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(2)])
    assert rows == ["0 2 0 3", "1 2 1 3"]


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_survivors_learn_which_rank_was_killed_in_which_call(run_ranks, transport):
    """There is no parent here: the ranks find out by themselves, and agree on which was lost first."""
    shared = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    script = LOSING_ONE.replace("TRANSPORT", transport)
    environments = [{"RANK": str(rank), **shared} for rank in range(3)]
    # How a process ended is known to others until its parent has waited for it.
    first, killed, last = run_ranks(environments, script, waited_for_last=1)
    assert killed == ""
    for rank, text in ((0, first), (2, last)):
        headline, why = text.splitlines()
        assert headline == f"(1,)|rank 1 went away during all_reduce(float32[1000], op='sum') on rank {rank}"
        assert why.startswith("  death: rank 1 died (SIGKILL); its last call was barrier() (script.py:4)")


def test_slurm_variables(run_ranks):
    shared = {"SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "127.0.0.1", "MASTER_PORT": str(free_port())}
    rows = run_ranks([{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), **shared} for rank in range(2)])
    assert rows == ["0 2 0 3", "1 2 1 3"]


def test_a_port_in_use_is_named(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(mp.errors.UsageError, match=f"port {port} on 127.0.0.1 is in use"):
            mp.connect()


def test_ranks_that_do_not_come_are_missed(monkeypatch):
    variables = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(mp.errors.CommsTimeout, match=r"waited 0.5 s at 127.0.0.1:\d+ for the other 1 rank"):
        mp.connect(timeout=0.5)


@pytest.fixture
def meeting():
    """Where four ranks meet; returns a function that lets some of them come, and gives the place of one."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def placement(rank, *present):
        for other in present:
            store.set(f"microparallel/can/{other}", "")
        return Placement(rank, 4, rank, 4, "127.0.0.1", store.port)

    return placement


def test_missing_ranks(meeting):
    place = r"127.0.0.1:\d+"
    assert re.fullmatch(rf"ranks 1-3 of 4 ranks did not come to {place} yet", show_missing_ranks(meeting(0, 0)))
    assert re.fullmatch(rf"ranks 1,3 of 4 ranks did not come to {place} yet", show_missing_ranks(meeting(0, 2)))
    assert show_missing_ranks(meeting(2)) == ""  # rank 0 says so
    assert re.fullmatch(rf"rank 3 of 4 ranks did not come to {place} yet", show_missing_ranks(meeting(0, 1)))
    assert show_missing_ranks(meeting(0, 3)) == ""


def test_no_process_listens_where_rank_0_should():
    found = show_missing_ranks(Placement(1, 2, 0, 1, "127.0.0.1", free_port()))
    own_name = socket.gethostname()
    said = rf"no process answers at 127.0.0.1:\d+, where rank 0 listens; 127.0.0.1 is {own_name} itself"
    assert re.fullmatch(said, found)


def test_a_rank_that_waits_long_says_for_whom_and_is_silent_when_they_have_come(meeting, capfd):
    with report_missing_ranks(meeting(0, 0), after=0.01):
        said = ""
        while "ranks 1-3" not in said:  # the test's own timeout ends this
            said += capfd.readouterr().err
    assert re.match(r"microparallel: rank 0 has been waiting for \d+ s: ranks 1-3 of 4 ranks did not come to ", said)
    with report_missing_ranks(meeting(0, 0, 1, 2, 3), after=0.01):
        pass
    for thread in threading.enumerate():
        if thread.name == "microparallel missing ranks":
            thread.join()  # it may have a name server to wait for; else the timeout of the test says so


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"transport": "carrier-pigeon"}, "carrier-pigeon"), ({"device": "tpu"}, "tpu")],
)
def test_unknown_names(arguments, words):
    with pytest.raises(mp.errors.UsageError, match=words):
        mp.connect(**arguments)
    assert not dist.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_nccl_without_a_gpu_is_refused_with_the_reason():
    with pytest.raises(mp.errors.UsageError, match="torch sees no GPU; choose 'gloo'"):
        mp.connect(transport="nccl")


THREADS = """
import os, time, torch, microparallel as mp
from microparallel.train.batch import Batch, ModelWithLoss
from microparallel.train.strategies import torch_ddp
threads = lambda: len(os.listdir("/proc/self/task"))
before = threads()
with mp.connect(transport="gloo", timeout=30) as comms:
    model = mp.models.FullMLP(4, 2)
    step = torch_ddp(ModelWithLoss(model, torch.nn.functional.cross_entropy), comms)
    optimizer = torch.optim.AdamW(model.parameters())
    step([Batch((torch.ones(2, 4),), {}, torch.tensor([0, 1]), 2)], 4)
    comms.group([0, 1]).barrier()
    during = threads()
    del step
# The system lists a thread for a moment longer than `join` waits for it.
deadline = time.monotonic() + 5
while threads() > before and time.monotonic() < deadline:
    time.sleep(0.001)
print(before, during > before, threads())
"""


def test_closing_ends_the_threads_of_the_world(run_ranks):
    """Threads that are left when Python ends may crash the process after its work is done."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    rows = run_ranks([{"RANK": str(rank), **shared} for rank in range(2)], THREADS)
    assert rows == ["1 True 1", "1 True 1"]


def test_a_port_that_is_not_ours_to_use_is_named(monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "create_server", refuse)
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 80}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(
        mp.errors.UsageError, match=r"rank 0 cannot listen at 127.0.0.1:80 \(.*denied\); choose another"
    ):
        mp.connect()
