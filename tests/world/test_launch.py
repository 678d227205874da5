"""Ranks start and end cleanly, also when one raises, exits or is killed."""

import contextlib
import importlib
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

import microparallel as mp
from microparallel.world import fork_server as forking


def gone(pid, patience=5.0):
    """Whether a process has ended (or ends within the patience); a zombie counts as ended."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] in "ZX":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def announce(folder, comms):
    (folder / f"{comms.rank}.tmp").write_text(str(os.getpid()))
    (folder / f"{comms.rank}.tmp").rename(folder / f"{comms.rank}.pid")


def pids(folder, ranks, patience=40.0):
    """The ranks' process ids, once they have all announced themselves."""
    deadline = time.monotonic() + patience
    while len(list(folder.glob("*.pid"))) < ranks:
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.02)
    return [int((folder / f"{rank}.pid").read_text()) for rank in range(ranks)]


def report(comms, *arguments, **named_arguments):
    return comms.rank, torch.get_num_threads(), arguments, named_arguments, os.environ["RANK"]


def test_results_come_in_rank_order_with_a_fair_share_of_cores():
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    results = mp.launch(report, 2, "a", b=torch.ones(1).item())
    assert results == [(rank, threads, ("a",), {"b": 1.0}, str(rank)) for rank in range(2)]


def test_a_function_defined_anywhere_will_do(pool):
    offset = 10

    class Box:
        def __init__(self, content):
            self.content = content

    results = pool.run(lambda comms, box: Box(box.content + comms.rank + offset), 2, Box(1), timeout=30)
    assert [result.content for result in results] == [11, 12]
    assert isinstance(results[0], Box)


def fail(comms, folder, how):
    announce(folder, comms)
    if comms.rank == 1:
        comms.barrier()
        how()
    comms.barrier()
    comms.recv_tensor((1,), 1)  # never comes


def raise_error():
    raise ValueError("the reason")


def exit_early():
    sys.exit(3)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (raise_error, "rank 1 raised ValueError: the reason"),
        (exit_early, "rank 1 exited with code 3 before its function had returned"),
        (die, "rank 1 was killed by SIGKILL"),
    ],
)
def test_one_rank_failing_ends_the_others(pool, tmp_path, how, words):
    with pytest.raises(mp.errors.RankFailed) as caught:
        pool.run(fail, 3, tmp_path, how, timeout=30)
    ended = time.monotonic()
    assert caught.value.rank == 1
    assert words in str(caught.value)
    if how is raise_error:
        assert 'raise ValueError("the reason")' in str(caught.value)
    assert all(gone(pid) for pid in pids(tmp_path, 3))
    assert time.monotonic() - ended < 5


def notice_loss_by_itself(comms):
    if comms.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    comms.all_reduce(torch.ones(1000))


def test_the_first_cause_is_reported_not_its_consequences(pool):
    for _ in range(3):
        with pytest.raises(mp.errors.RankFailed) as caught:
            pool.run(notice_loss_by_itself, 4, timeout=30)
        assert caught.value.rank == 2


def give_up(comms):
    comms.irecv((1,), 1 - comms.rank).wait(0.2 if comms.rank == 1 else None)


def test_a_rank_that_gave_up_is_named_before_those_that_waited_for_it(pool, monkeypatch):
    """Both have failed when the launcher looks: it may have waited for a core meanwhile."""
    wait, launching = multiprocessing.connection.wait, importlib.import_module("microparallel.world.launch")
    monkeypatch.setattr(launching, "wait", lambda connections, _: [one for one in connections if wait([one], 20)])
    with pytest.raises(mp.errors.RankFailed) as caught:
        pool.run(give_up, 2, transport="gloo", timeout=30)
    assert caught.value.rank == 1, caught.value


def return_early(comms):
    if comms.rank == 1:
        comms.recv_tensor((1,), 0)


def test_waiting_for_a_rank_that_has_returned_is_an_error_not_a_hang(pool):
    with pytest.raises(
        mp.errors.RankFailed, match=r"PeerLost: rank 0 went away during recv_tensor\(float32\[1\], src=0\)"
    ) as caught:
        pool.run(return_early, 2, timeout=30)
    assert "rank 0's function had already returned" in str(caught.value)


def wait_for_each_other(comms):
    if comms.rank == 0:
        return
    comms.recv_tensor((1,), src=3 - comms.rank)


def test_a_timeout_says_where_each_rank_stood(pool):
    pool.run(report, 3)  # warm, so that the time is spent waiting
    with pytest.raises(mp.errors.RanksTimedOut) as caught:
        pool.run(wait_for_each_other, 3, timeout=0.5)
    text = str(caught.value)
    assert caught.value.ranks == (1, 2)
    assert "2 of 3 ranks had not finished after 0.5 s" in text
    assert "rank 0: finished" in text
    assert "rank 1: in recv_tensor, called by wait_for_each_other at " in text and "test_launch.py" in text
    assert isinstance(caught.value, TimeoutError)


@pytest.mark.parametrize("ranks", [0, -1, 1.5, True, 10**6])
def test_a_senseless_number_of_ranks(ranks):
    with pytest.raises(mp.errors.UsageError, match="ranks="):
        mp.launch(report, ranks)


def test_a_senseless_timeout():
    with pytest.raises(mp.errors.UsageError, match="timeout='5'"):
        mp.launch(report, 1, timeout="5")


def test_what_cannot_be_sent():
    with pytest.raises(mp.errors.UsageError, match=r"report or its arguments cannot be sent"):
        mp.launch(report, 1, threading.Lock())
    with pytest.raises(mp.errors.UsageError, match="must be a function"):
        mp.launch("report", 1)


def test_a_result_that_cannot_be_sent(pool):
    with pytest.raises(mp.errors.RankFailed, match="the result, a generator, cannot be sent to the parent"):
        pool.run(lambda comms: (number for number in range(3)), 1, timeout=30)


def makes_a_socket(comms, folder):
    """Open one as a data worker does, and be killed with it."""
    name = multiprocessing.connection.arbitrary_address("AF_UNIX")
    listener = multiprocessing.connection.Listener(name)
    (folder / f"{comms.rank}").write_text(f"{listener.address}")
    comms.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def test_sockets_of_a_rank_that_was_killed_are_removed(pool, tmp_path):
    with pytest.raises(mp.errors.RankFailed, match="was killed by SIGKILL"):
        pool.run(makes_a_socket, 2, tmp_path, timeout=30)
    folders = [Path((tmp_path / f"{rank}").read_text()).parent for rank in range(2)]
    assert len({*folders}) == 2 and not any(folder.exists() for folder in folders)


SCRIPT = """
import os, pathlib, sys, time
import microparallel as mp

def work(comms, folder):
    (folder / f"{comms.rank}.tmp").write_text(str(os.getpid()))
    (folder / f"{comms.rank}.tmp").rename(folder / f"{comms.rank}.pid")
    time.sleep(60)

mp.launch(work, 2, pathlib.Path(sys.argv[1]))  # no main guard needed
"""


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_was_stopped_ends_with_its_parent_too(tmp_path, start, stopped):
    """It cannot notice by itself that its parent was killed."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    parent = start("python", script, tmp_path)
    ranks = pids(tmp_path, 2)
    os.kill(ranks[stopped], signal.SIGSTOP)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(20)
    try:
        assert all(gone(pid) for pid in ranks)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[stopped], signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone says which process takes orphans, and wakes them")
def test_ranks_that_were_all_stopped_end_with_their_parent_too(tmp_path, start):
    """None of them can end the others, so the system must wake them.

    This process takes them as orphans, as the first process of a container does. If that were in another session, the
    system would wake them by itself.
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    forking.take_orphans(True)
    try:
        parent = start("python", script, tmp_path)
        ranks = pids(tmp_path, 2)
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(20)
        assert all(gone(pid) for pid in ranks)
    finally:
        forking.take_orphans(False)
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(rank, 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_ending_the_parent_ends_the_ranks(tmp_path, start, number):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    parent = start("python", script, tmp_path)
    ranks = pids(tmp_path, 2)
    os.kill(parent.pid, number)
    assert parent.wait(20) != 0
    assert all(gone(pid) for pid in ranks)
    assert not any(Path(tempfile.gettempdir(), f"microparallel-rank-{pid}").exists() for pid in ranks)
    if number == signal.SIGINT:
        assert parent.errors.count("Traceback") == 1, parent.errors  # the parent's own, none from the ranks
