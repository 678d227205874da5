"""Ranks of several hosts become a world; where they cannot, every host is told who cannot reach whom."""

import re

import pytest

SUM = """
import os, torch, microparallel as mp
with mp.connect(timeout=30) as comms:
    total = comms.all_reduce(torch.tensor([comms.rank + 1]))
    print(comms.rank, torch.distributed.get_backend(), total.item(), os.environ["GLOO_SOCKET_IFNAME"], flush=True)
"""
JOIN = """
import sys, time, microparallel as mp
begun = time.monotonic()
try:
    mp.connect(timeout=float(sys.argv[1])).close()
except mp.errors.MicroparallelError as error:
    print(f"{type(error).__name__} after {time.monotonic() - begun:.1f} s: {error}", flush=True)
"""


@pytest.fixture
def script(tmp_path):
    def write(text):
        """It is put there whole: a rank that has begun already may be about to read it."""
        (tmp_path / "written.py").write_text(text)
        (tmp_path / "written.py").replace(tmp_path / "script.py")
        return "script.py"

    return write


def ended(ranks, seconds=40):
    """What each rank printed; all have ended well."""
    for rank in ranks:
        assert rank.wait(seconds) == 0, rank.errors
    return [rank.output.strip() for rank in ranks]


@pytest.mark.parametrize("address", [pytest.param("10.77.0.1", marks=pytest.mark.slow), "alpha"])
def test_the_way_to_the_others_decides_the_interface(hosts, script, address):
    """Each host's own name stands for 127.0.1.1 there, and so does MASTER_ADDR on the host that has it."""
    ranks = hosts(2).ranks("python", script(SUM), on_each=2, address=address)
    assert ended(ranks) == [f"{rank} microparallel 10 eth0" for rank in range(4)]  # with gloo between the hosts


def test_ranks_of_one_host_share_memory_and_use_its_loopback_interface(hosts, script):
    """Two hosts on one kernel are one machine only if they can share memory: the ranks try it out."""
    ranks = hosts(1).ranks("python", script(SUM), on_each=2, address="alpha")
    assert ended(ranks) == [f"{rank} microparallel 3 lo" for rank in range(2)]


def test_the_user_s_choice_of_an_interface_counts_and_every_host_is_told_where_it_leads(hosts, script):
    ranks = hosts(2).ranks("python", script(JOIN), "30", GLOO_SOCKET_IFNAME="lo")
    for said in ended(ranks):
        assert said.startswith("CommsError after ")
        for one, other in (("0 on alpha", "1 on beta"), ("1 on beta", "0 on alpha")):
            assert f"rank {one} (127.0.0.1) cannot reach rank {other} at 127.0.0.1: connection refused" in said
        assert "GLOO_SOCKET_IFNAME=NAME chooses" in said


def test_an_interface_that_is_not_there(hosts, script):
    bed = hosts(2)
    rank = bed[1].run("python", script(JOIN), "2", GLOO_SOCKET_IFNAME="eth7", **bed.variables(0, 0, 1, bed[1].address))
    other = bed[0].run("python", script(JOIN), "2", **bed.variables(1, 0, 1, bed[1].address))
    said = "UsageError after .*: GLOO_SOCKET_IFNAME=eth7: beta has no interface of that name with an address; it has lo"
    assert re.match(said, ended([rank, other])[0])


def test_a_host_that_never_comes(hosts, script):
    bed = hosts(2)
    alone = bed[0].run("python", script(JOIN), "1", **bed.variables(0, 0, 1))
    said = r"CommsTimeout after [123]\.\d s: rank 0 waited 1 s at 10.77.0.1:29400 for the other 1 rank; "
    assert re.match(said + "rank 1 of 2 ranks did not come to 10.77.0.1:29400 yet", ended([alone])[0])


def test_a_wrong_address(hosts, script):
    """A name that no host has is told at once; an address where nothing answers, when the time is up."""
    bed = hosts(2)
    nobody, itself, nowhere = (
        bed[1].run("python", script(JOIN), "1", **bed.variables(1, 0, 1, address))
        for address in ("delta", "beta", "10.77.0.9")
    )
    closed = bed[1].run("python", script(JOIN), "1", **bed.variables(1, 0, 1) | {"MASTER_PORT": 9})
    ended([nobody, itself, nowhere, closed])
    assert "rank 1: beta knows no host 'delta' (MASTER_ADDR); still trying" in nobody.errors
    for rank in (nobody, itself, nowhere, closed):
        assert re.match(r"CommsTimeout after [12]\.\d s: rank 1 waited 1 s at ", rank.output)
        assert "frame #" not in rank.errors  # where torch gave up in its own code
    assert "beta knows no host 'delta'" in nobody.output
    assert (
        "no process answers at beta:29400 (127.0.1.1), where rank 0 listens; 127.0.1.1 is beta itself" in itself.output
    )
    assert "no process answers at 10.77.0.9:29400, where rank 0 listens (" in nowhere.output
    assert "no process answers at 10.77.0.1:9, where rank 0 listens\n" in closed.output


@pytest.mark.slow
def test_a_firewall_that_drops_what_comes_in_is_told_on_both_sides(hosts, script):
    bed = hosts(2)
    bed[1].drop("-p", "tcp", "--syn")
    for said in ended(bed.ranks("python", script(JOIN), "30")):
        assert "rank 0 on alpha (10.77.0.1) cannot reach rank 1 on beta at 10.77.0.2: no answer within 10 s" in said


@pytest.mark.slow
def test_a_command_says_nothing_where_no_name_server_answers(hosts, monkeypatch):
    """torch asks who ::ffff:127.0.0.1 is whenever ranks meet, and prints a warning that no user can act on."""
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
    bench = ["microparallel", "bench", "allreduce", "--ranks", "2", "--sizes", "4", "--transport", "shm"]
    run = hosts(1)[0].run(*bench, module=["-u"])
    ended([run])
    assert "shm" in run.output and "socket" not in run.errors
