"""A world's flight recorder: where its files are, when they go, and what it says when something takes too long."""

import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import microparallel as mp
from microparallel.observe import folders
from microparallel.observe.diagnosis import diagnose
from microparallel.observe.flight import Flight
from microparallel.observe.flight_file import read
from microparallel.observe.folders import gather


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    """A place of its own for the flight files of a test."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / f"microparallel-{os.getuid()}"


def worlds(runtime):
    return sorted(path for path in runtime.iterdir()) if runtime.exists() else []


# ── where, and for how long ─────────────────────────────────────────────────────────────────────────────────────────


def test_what_crashed_worlds_leave_is_bounded(runtime, monkeypatch):
    """30 worlds that ended without removing their files: the newest stay; one that runs stays, however old."""
    monkeypatch.setattr(folders, "is_running", lambda world: world.name == "world-03")
    for number in range(30):
        world = runtime / f"world-{number:02}"
        world.mkdir(parents=True)
        (world / "rank-0.flight").write_bytes(b"recorded")
        os.utime(world, (time.time() - 100 + number,) * 2)
    folders.remove_old(runtime)
    assert [path.name for path in worlds(runtime)] == ["world-03", *(f"world-{number}" for number in range(10, 30))]


def test_the_files_are_this_user_s_and_go_with_the_world(runtime):
    with mp.connect(transport="gloo") as comms:
        (world,) = worlds(runtime)
        assert [path.name for path in sorted(world.iterdir())] == ["rank-0.flight", "rank-0.stack"]
        assert stat.S_IMODE(runtime.stat().st_mode) == stat.S_IMODE(world.stat().st_mode) == 0o700
        comms.barrier()
        assert [record.text for record in read(world / "rank-0.flight").records] == ["barrier()"]
    assert worlds(runtime) == []


def test_a_run_has_them_in_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MICROPARALLEL_FLIGHT_DIR", str(tmp_path / "run" / "flight"))
    with mp.connect(transport="gloo"):
        assert (tmp_path / "run" / "flight" / "rank-0.flight").exists()
    assert not (tmp_path / "run" / "flight").exists()


def test_it_can_be_turned_off(runtime, monkeypatch):
    monkeypatch.setenv("MICROPARALLEL_FLIGHT", "0")
    with mp.connect(transport="shm") as comms:
        comms.all_reduce(torch.ones(2))
        comms.flight.at_step(1)
        assert comms.flight.why() == ""
    assert worlds(runtime) == []


def test_a_place_that_cannot_be_written_to_stops_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MICROPARALLEL_FLIGHT_DIR", str(tmp_path / "file" / "flight"))
    with mp.connect(transport="gloo") as comms:
        comms.barrier()


def test_a_folder_that_others_may_read_is_not_used(runtime):
    runtime.mkdir(mode=0o755)
    with mp.connect(transport="gloo") as comms:
        comms.barrier()
    assert worlds(runtime) == []


def files_seen(comms, runtime):
    comms.barrier()
    return [path.name for world in worlds(runtime) for path in sorted(world.glob("*.flight"))]


def test_launched_ranks_share_a_folder_that_is_gone_afterwards(quick_ranks, runtime):
    seen = mp.launch(files_seen, 3, runtime, transport="gloo", timeout=40)
    assert seen == [["rank-0.flight", "rank-1.flight", "rank-2.flight"]] * 3
    assert worlds(runtime) == []


def raises(comms):
    if comms.rank == 1:
        raise ValueError("the reason")
    comms.barrier()


def dies(comms):
    comms.flight.at_step(120)
    comms.barrier()
    if comms.rank == 1:
        os._exit(7)
    comms.barrier()


def test_only_a_death_leaves_them_behind(quick_ranks, runtime):
    with pytest.raises(mp.errors.RankFailed, match="the reason"):
        mp.launch(raises, 2, transport="gloo", timeout=40)
    assert worlds(runtime) == []
    with pytest.raises(
        mp.errors.RankFailed, match=r"death: rank 1 died \(exit code 7\) at step 120; its last call was barrier"
    ):
        mp.launch(dies, 2, transport="gloo", timeout=40)
    (world,) = worlds(runtime)
    assert next((finding.kind, finding.ranks) for finding in diagnose(gather(world))) == ("death", (1,))

    old = time.time() - 25 * 3600
    os.utime(world, (old, old))
    with mp.connect(transport="gloo"):
        assert len(worlds(runtime)) == 1
        assert world not in worlds(runtime)


def groups_of_all_kinds(comms):
    inside = comms.group([0, 1])
    torchs = dist.new_group([0, 1]) if comms.process_group.name() == "microparallel" else None
    if inside is not None:
        inside.all_reduce(torch.ones(1))
    if torchs is not None and comms.rank < 2:
        dist.all_reduce(torch.ones(1), group=torchs)
    pid = os.getpid()
    one = next(one for one in map(read, folders.folder_of_process(pid).glob("*.flight")) if one.pid == pid)
    comms.barrier()
    return [(record.text, record.group_name, str(record.place)) for record in one.records]


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_groups_write_into_their_world_s_file(pool, transport):
    first, _, last = pool.run(groups_of_all_kinds, 3, transport=transport, timeout=40)
    assert last == []
    expected = [("all_reduce(float32[1], op='sum')", "0-1#1")]
    if transport == "shm":
        expected.append(("all_reduce(float32[1], op=SUM)", "0-1#2"))
    assert [(text, group) for text, group, _ in first] == expected
    assert all(place.startswith("test_flight.py:") for *_, place in first)


# ── the signal ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_rank_shows_its_stack_and_goes_on(runtime):
    with mp.connect(transport="gloo"):
        (world,) = worlds(runtime)
        (one,) = gather(world)
        assert one.dumps_stack and one.user_place.function == "test_a_rank_shows_its_stack_and_goes_on"
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_a_signal_that_the_user_has_taken_is_not_sent(runtime):
    received = []
    with mp.connect(transport="gloo") as comms:
        (world,) = worlds(runtime)
        before = signal.signal(signal.SIGUSR1, lambda *_: received.append(1))
        try:
            for _ in range(32):
                comms.barrier()
            (one,) = gather(world)
            assert not one.dumps_stack and one.stack == ()
        finally:
            comms.close()
            os.kill(os.getpid(), signal.SIGUSR1)
            assert received == [1]  # and it is still the user's
            signal.signal(signal.SIGUSR1, before)


# ── when something takes too long ───────────────────────────────────────────────────────────────────────────────────


def gives_up(comms):
    if comms.rank == 1:
        time.sleep(1.5)
        return None
    try:
        comms.irecv((1,), 1).wait(timeout=0.3)
    except mp.errors.CommsTimeout as error:
        return str(error)


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_a_timeout_says_why(pool, transport):
    headline, why = pool.run(gives_up, 2, transport=transport, timeout=40)[0].splitlines()
    assert headline.startswith("rank 0 waited in vain in irecv(float32[1], src=1)")
    assert re.match(r"  straggler: rank 1 is in no call: it is in gives_up \(test_flight.py:\d+\)", why)


def leaves(comms):
    if comms.rank == 1:
        return None
    try:
        comms.barrier()
    except mp.errors.PeerLost as error:
        return str(error)


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_a_loss_says_why(pool, transport):
    headline, why = pool.run(leaves, 2, transport=transport, timeout=40)[0].splitlines()
    assert headline == "rank 1 went away during barrier() on rank 0"
    assert why.startswith("  missing rank: rank 1 has ")


def disagrees(comms):
    try:
        comms.all_reduce(torch.ones(2 + comms.rank))
    except mp.errors.Mismatch as error:
        return error.__notes__


def test_a_mismatch_has_the_places_in_a_note(pool):
    for (note,) in pool.run(disagrees, 2, transport="shm", timeout=40):
        assert note.startswith("mismatched shape: rank 1 entered all_reduce(float32[3], op='sum') (test_flight.py:")


HANGING = """
import sys, time, microparallel as mp
comms = mp.connect(transport=sys.argv[1])
comms.barrier()
if comms.rank == int(sys.argv[2]):
    time.sleep(2.5)
comms.barrier()
comms.close()
"""


@pytest.mark.parametrize(("guilty", "speaker"), [(1, 0), (0, 1)])
def test_a_world_that_hangs_says_so_once_by_itself(runtime, tmp_path, start, guilty, speaker):
    """The first rank that waits says it: nobody else, and not the one that they wait for."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "MICROPARALLEL_WHY_AFTER": 1}
    script = tmp_path / "script.py"
    script.write_text(HANGING)
    ranks = [start("python", script, "gloo", guilty, RANK=rank, LOCAL_RANK=rank, **shared) for rank in range(3)]
    for rank in ranks:
        rank.wait(50)
    said = [rank.errors for rank in ranks]
    headline, why = said.pop(speaker).splitlines()
    assert headline.startswith(f"microparallel: rank {speaker} has been waiting for 1.")
    assert why.startswith(
        f"  straggler: rank {guilty} is in no call: it is in script.py:6; its last call was barrier()"
    )
    assert said == ["", ""]
    assert worlds(runtime) == []


def test_nothing_is_left_running(runtime):
    before = set(threading.enumerate())
    flight = Flight.open(runtime / "world", 0, 2, 2)
    assert {thread.name for thread in set(threading.enumerate()) - before} == {"microparallel watchdog"}
    flight.close()
    flight.close()
    assert set(threading.enumerate()) == before


EXITING = """
import sys
from pathlib import Path
from microparallel.errors import PeerLost
from microparallel.observe.flight import Flight
flight = Flight.open(Path(sys.argv[1]), 0, 2, 2)
{}
"""


@pytest.mark.parametrize(
    ("line", "ending", "words"),
    [
        ("pass", "closed", ""),
        ("raise ValueError('no')", "raised", "ValueError: no"),
        ("raise PeerLost([1], 'barrier()', 'rank 1 went away')", "broke off", "PeerLost: rank 1 went away"),
        ("flight.finishes()", "closed", ""),
        ("import os; os._exit(3)", "running", ""),
        ("import os; pid = os.fork(); pid and os.wait() or sys.exit(); os._exit(0)", "running", ""),
    ],
)
def test_how_a_process_ends_is_written_down(tmp_path, line, ending, words):
    subprocess.run([sys.executable, "-c", EXITING.format(line), tmp_path], stderr=subprocess.DEVNULL, check=False)
    one = read(Path(tmp_path) / "rank-0.flight")
    assert (one.ending, one.end_reason) == (ending, words)
