"""What ranks that share memory do when one of them dies, stops or disagrees."""

import gc
import os
import socket
import tempfile
import time
from pathlib import Path

import pytest
import torch

import microparallel as mp

# Rank 1 comes to its bad end in the middle of the all-reduce: it has begun, and sent its first part.
SCRIPT = """
import os, signal, sys, time, torch, microparallel as mp
from microparallel.comms.interpreter import COMBINE
comms = mp.connect(transport="shm", timeout=float(sys.argv[2]))
comms.barrier()
if comms.rank == 1:
    add = COMBINE["sum"]
    def end_badly(mine, theirs):
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
        add(mine, theirs)
    COMBINE["sum"] = end_badly
start = time.monotonic()
try:
    comms.all_reduce(torch.ones(10_000_000))
except mp.errors.CommsError as error:
    headline = str(error).partition("\\n")[0]  # beneath it, the flight recorders say more
    soon = time.monotonic() - start < 5
    print(type(error).__name__, getattr(error, "ranks", ()), headline, soon, sep="|", flush=True)
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def start_ranks(start, tmp_path):
    def start_ranks(ranks, *arguments):
        shared = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        script = tmp_path / "script.py"
        script.write_text(SCRIPT)
        return [start("python", script, *arguments, RANK=rank, LOCAL_RANK=rank, **shared) for rank in range(ranks)]

    return start_ranks


def files():
    """What ranks may leave on this machine, but for the flight files of those that died, which are meant to stay."""
    folders = Path(tempfile.gettempdir()).glob("microparallel-*")
    kept = (f"microparallel-{os.getuid()}", "microparallel-tests-")
    ours = {path for path in folders if not path.name.startswith(kept) and not of_a_rank_that_runs(path)}
    return ours | {*Path("/dev/shm").glob("*microparallel*")}


def of_a_rank_that_runs(path):
    """Whether a folder belongs to a rank of another test, which has not ended."""
    name, _, pid = path.name.rpartition("-")
    return name == "microparallel-rank" and Path("/proc", pid).exists()


def left_behind(before):
    """What stays; worlds of other processes come and go."""
    deadline = time.monotonic() + 10
    left = files() - before
    while left and time.monotonic() < deadline:
        time.sleep(0.01)
        left &= files()
    return left


def test_a_killed_rank_is_named_within_seconds_and_leaves_nothing(start_ranks):
    before = files()
    ranks = start_ranks(3, "SIGKILL", "30")
    for rank in ranks:
        rank.wait(50)
    words = "rank 1 went away during all_reduce(float32[10000000], op='sum') on rank"
    assert [rank.output.strip() for rank in ranks] == [
        f"PeerLost|(1,)|{words} 0|True",
        "",
        f"PeerLost|(1,)|{words} 2|True",
    ]
    assert not left_behind(before)


def test_a_stopped_rank_is_named_when_the_time_is_up(start_ranks):
    first, _ = start_ranks(2, "SIGSTOP", "1")
    first.wait(50)
    row = first.output.strip()
    kind, _, text, soon = row.split("|")
    assert (kind, soon) == ("CommsTimeout", "True")
    assert "all_reduce(float32[10000000], op='sum')" in text and "timed out waiting for rank 1" in text


def make_different_calls(comms, kind):
    calls = {
        "shape": lambda rank: comms.all_reduce(torch.zeros(4 + (rank == 1))),
        "dtype": lambda rank: comms.all_reduce(torch.zeros(4, dtype=torch.int32 if rank == 1 else torch.float32)),
        "op": lambda rank: comms.all_reduce(torch.zeros(4), op="max" if rank == 1 else "sum"),
        "call": lambda rank: comms.broadcast(torch.zeros(4)) if rank == 1 else comms.all_reduce(torch.zeros(4)),
    }
    try:
        calls[kind](comms.rank)
    except mp.errors.Mismatch as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("kind", "others", "odd"),
    [
        ("shape", "all_reduce(float32[4], op='sum')", "all_reduce(float32[5], op='sum')"),
        ("dtype", "all_reduce(float32[4], op='sum')", "all_reduce(int32[4], op='sum')"),
        ("op", "all_reduce(float32[4], op='sum')", "all_reduce(float32[4], op='max')"),
        ("call", "all_reduce(float32[4], op='sum')", "broadcast(float32[4], src=0)"),
    ],
)
def test_different_calls_are_always_caught(pool, kind, others, odd):
    """Without checked mode: every message says which call it belongs to."""
    found = pool.run(make_different_calls, 3, kind, transport="shm", timeout=30)
    text = f"the calls of these ranks do not belong together\n  ranks 0, 2: {others}\n  rank 1: {odd}"
    assert found == [text] * 3


def name_different_roots(comms):
    try:
        comms.broadcast(torch.zeros(4), src=int(comms.rank == 1))  # neither rank waits here,
        comms.barrier()  # but here they do
    except mp.errors.Mismatch as error:
        return str(error)
    return None


def test_different_roots_are_caught_by_the_next_call(pool):
    found = pool.run(name_different_roots, 2, transport="shm", timeout=30)
    text = "the calls of these ranks do not belong together\n  rank 0: broadcast(float32[4], src=0)\n"
    assert found == [text + "  rank 1: broadcast(float32[4], src=1)"] * 2


def join_and_leave(comms, times):
    """Groups that come and go; returns by how much open files, mappings and memory have grown since the first few."""

    def measure():
        gc.collect()
        status = Path("/proc/self/status").read_text().splitlines()
        memory = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
        maps = Path("/proc/self/maps").read_text().count("microparallel")
        return len(list(Path("/proc/self/fd").iterdir())), maps, memory

    for number in range(times):
        with comms.group(range(comms.world_size)) as group:
            group.all_reduce(torch.ones(1000))
        if number == 9:
            before = measure()
    return [after - first for first, after in zip(before, measure(), strict=True)]


@pytest.mark.parametrize("times", [60, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
def test_joining_and_leaving_leaks_nothing(pool, times):
    for files, mappings, kilobytes in pool.run(join_and_leave, 2, times, transport="shm", timeout=250):
        assert (files, mappings) == (0, 0)
        assert kilobytes < 4000


def call_from_several_threads(comms):
    """Messages from many threads, while collectives go on."""
    import threading

    wrong = []

    def talk(tag):
        for number in range(50):
            peer = 1 - comms.rank
            mine = torch.full((100,), float(tag * 1000 + number))
            sent = comms._group.isend(mine, peer, tag)
            into = torch.empty(100)
            comms._group.irecv(into, peer, tag).wait()
            sent.wait()
            if not torch.equal(into, mine):
                wrong.append((tag, number))

    threads = [threading.Thread(target=talk, args=(tag,)) for tag in range(10, 14)]
    for thread in threads:
        thread.start()
    for number in range(50):
        total = comms.all_reduce(torch.full((1000,), float(number)))
        if not torch.equal(total, torch.full((1000,), 2.0 * number)):
            wrong.append(("all_reduce", number))
    for thread in threads:
        thread.join()
    return wrong


def test_several_threads_call_at_once(pool):
    assert pool.run(call_from_several_threads, 2, transport="shm", timeout=40) == [[], []]
