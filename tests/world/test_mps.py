"""Worlds under MPS, with a control program that does what NVIDIA's does, and ranks on the CPU; no GPU is needed."""

import ast
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from tests.world.fake_mps import CONTROL, install
from tests.world.test_launch import gone, pids

import microparallel as mp
from microparallel.errors import ConfigError, LaunchError, RankFailed, UsageError
from microparallel.world.mps import choice, daemon
from microparallel.world.mps.choice import LOGS, NOWHERE, PIPES, Daemon
from microparallel.world.rank_process import remove_shared_gpu_files

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="MPS is for Linux alone")


# ── which daemon a world is to have ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("mps", "world", "given", "can_start", "expected"),
    [
        ("auto", ("auto", "auto", 2, 1), False, True, Daemon.OWN),
        ("auto", ("cuda", "auto", 4, 1), False, True, Daemon.OWN),
        ("auto", ("gloo", "cuda", 3, 2), False, True, Daemon.OWN),
        ("auto", ("auto", "cuda", 3, 2), True, True, Daemon.GIVEN),
        ("auto", ("auto", "auto", 2, 1), False, False, Daemon.ANY),  # works without, in silence
        ("auto", ("auto", "auto", 1, 1), False, True, Daemon.ANY),  # these share no GPU …
        ("auto", ("nccl", "cuda", 2, 2), True, True, Daemon.ANY),
        ("auto", ("auto", "auto", 4, 2), False, True, Daemon.ANY),  # … and these compute on the CPU
        ("auto", ("gloo", "auto", 2, 1), False, True, Daemon.ANY),
        ("auto", ("shm", "auto", 2, 1), False, True, Daemon.ANY),
        ("auto", ("auto", "cpu", 2, 1), False, True, Daemon.ANY),
        ("auto", ("auto", "auto", 2, 0), False, True, Daemon.ANY),
        ("on", ("auto", "auto", 1, 1), False, True, Daemon.OWN),  # beside worlds of more ranks, in a measurement
        ("on", ("gloo", "cuda", 2, 1), True, False, Daemon.GIVEN),
        ("off", ("cuda", "auto", 2, 1), True, True, Daemon.NONE),
        ("off", ("auto", "auto", 2, 0), False, False, Daemon.NONE),
    ],
)
def test_which_daemon_a_world_is_to_have(mps, world, given, can_start, expected):
    assert choice.choose(mps, *world, given=given, can_start=can_start) is expected


@pytest.mark.parametrize(
    ("mps", "world", "can_start", "said"),
    [
        ("of", ("auto", "auto", 2, 1), True, "mps 'of': did you mean 'off'?"),
        ("on", ("auto", "auto", 2, 0), True, "torch sees no GPU; install"),
        ("on", ("gloo", "auto", 2, 1), True, "device 'auto', transport 'gloo' and 1 GPU 2 ranks compute on the CPU"),
        ("on", ("auto", "auto", 2, 1), False, "the program nvidia-cuda-mps-control is not on the PATH"),
    ],
)
def test_on_where_it_cannot_be_is_one_line_with_the_fix(mps, world, can_start, said):
    with pytest.raises(UsageError) as caught:
        choice.choose(mps, *world, given=False, can_start=can_start)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_launch_refuses_before_it_starts_ranks(monkeypatch):
    monkeypatch.setattr(choice, "gpus_here", lambda: 0)
    with pytest.raises(UsageError, match="mps 'on' cannot work here: torch sees no GPU"):
        mp.launch(int, 2, mps="on")
    with pytest.raises(UsageError, match="mps 'onn': did you mean 'on'"):
        mp.launch(int, 2, mps="onn")


# ── a daemon that runs already ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def program(tmp_path, monkeypatch):
    """The control program, first on the PATH; nothing is in the usual folder."""
    made = install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{made.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_MPS_LOG", str(tmp_path / "daemons"))
    monkeypatch.delenv(PIPES, raising=False)
    monkeypatch.setattr(choice, "_USUAL_PIPES", tmp_path / "usual")
    return made


def daemons(tmp_path):
    """What daemons have noted at their start: their number, their server's, their folder, open files, environment."""
    log = tmp_path / "daemons"
    return [ast.literal_eval(line) for line in log.read_text().splitlines()] if log.exists() else []


@pytest.fixture
def theirs(program, tmp_path, monkeypatch):
    """A daemon of the user's own."""
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setenv(PIPES, str(folder))
    subprocess.run([program, "-d"], check=True)
    yield folder
    daemon.guard.ask_to_quit(str(program), os.environ | {PIPES: str(folder)})
    pid, server, *_ = daemons(tmp_path)[0]
    assert gone(pid) and gone(server)


@ON_LINUX
def test_a_daemon_is_found_by_the_environment(theirs, monkeypatch):
    assert choice.given_daemon(os.environ) == theirs
    assert choice.given_daemon({PIPES: str(theirs / "elsewhere")}) is None
    assert choice.given_daemon({}) is None
    monkeypatch.setattr(choice, "_USUAL_PIPES", theirs)
    assert choice.given_daemon({}) == theirs


@ON_LINUX
def test_a_daemon_whose_number_means_nothing_here_is_asked(theirs, tmp_path):
    number = theirs / f"{CONTROL}.pid"
    assert comes_true(number.exists)
    number.write_text("999999999999")
    assert choice.given_daemon(os.environ) == theirs


def test_a_folder_that_a_daemon_has_left_behind_has_none(program, tmp_path):
    (tmp_path / "left").mkdir()
    (tmp_path / "left" / f"{CONTROL}.pid").write_text("999999999999")
    assert choice.given_daemon({PIPES: str(tmp_path / "left")}) is None


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files to another user")
def test_in_the_usual_folder_another_users_daemon_does_not_count(program, tmp_path):
    usual = tmp_path / "usual"
    usual.mkdir()
    number = usual / f"{CONTROL}.pid"
    number.write_text(str(os.getpid()))
    assert choice.given_daemon({}) == usual
    os.chown(number, 4711, 4711)
    assert choice.given_daemon({}) is None
    assert choice.given_daemon({PIPES: str(usual)}) == usual  # named: then the user wants it


@ON_LINUX
def test_where_no_ranks_are_started_only_a_daemon_that_runs_will_do(theirs, monkeypatch):
    for mps in ("auto", "on"):
        choice.require_as_given(mps)
    with pytest.raises(ConfigError, match=f"--mps off: .* set {PIPES}={NOWHERE} before"):
        choice.require_as_given("off")
    monkeypatch.delenv(PIPES)
    for mps in ("auto", "off"):
        choice.require_as_given(mps)
    with pytest.raises(ConfigError, match=f"--mps on: no MPS daemon runs here.* {CONTROL} -d"):
        choice.require_as_given("on")


def test_gpus_are_named_to_daemon_and_ranks(monkeypatch):
    """To the daemon, which numbers the GPUs that it sees anew, a number would be another GPU."""
    monkeypatch.setattr(daemon, "use_gpus", lambda changes, with_context: ["GPU-2", "GPU-0"])
    for visible, expected in {
        None: {},
        "2,0": {"CUDA_VISIBLE_DEVICES": "GPU-2,GPU-0"},
        "GPU-2,GPU-0": {},
        "MIG-17": {},
    }.items():
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert daemon._gpus_by_name() == expected


def test_a_gpu_that_cannot_be_used_is_an_error_with_the_drivers_word(monkeypatch, tmp_path):
    (tmp_path / "client.py").write_text("import sys; print('GPU-1'); sys.exit('CUDA_ERROR_MPS (805) in cuInit')")
    monkeypatch.setattr(daemon.client, "__file__", str(tmp_path / "client.py"))
    with pytest.raises(LaunchError, match=r"the GPU cannot be used: CUDA_ERROR_MPS \(805\) in cuInit"):
        daemon.use_gpus({}, with_context=True)


# ── worlds ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def one_gpu(program, monkeypatch):
    """The launcher takes this machine for one with a GPU, which ranks share; they find none, and use the CPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(choice, "gpus_here", lambda: 1)
    monkeypatch.setattr(daemon, "use_gpus", lambda changes, with_context: [])


def environment(comms):
    """What a rank sees of MPS, and which files it has open."""
    files = set()
    for path in Path("/proc/self/fd").iterdir():
        try:
            files.add(str(path.readlink()))
        except FileNotFoundError:  # that of the listing itself
            continue
    return os.getpid(), os.environ.get(PIPES), os.environ.get(LOGS), files


def all_gone(tmp_path, how_many):
    """Whether so many daemons were started, and nothing is left of them."""
    noted = daemons(tmp_path)
    assert len(noted) == how_many
    assert all(gone(pid, 0.2) and gone(server, 0.2) for pid, server, *_ in noted)
    assert not any(Path(folder).parent.exists() for _, _, folder, *_ in noted)
    return True


@ON_LINUX
def test_ranks_that_share_a_gpu_have_a_private_daemon_which_ends_with_them(one_gpu, quick_ranks, tmp_path):
    def look(comms):
        pipes = Path(os.environ[PIPES])
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (pipes, pipes.parent, Path(os.environ[LOGS]))]
        return str(pipes), modes

    (first, modes), (second, _) = mp.launch(look, 2)
    ((_, _, folder, files, variables),) = daemons(tmp_path)
    assert first == second == folder and modes == [0o700] * 3
    assert len(os.fsencode(folder)) < 80  # a socket's path has 107 bytes
    assert variables[LOGS] == str(Path(folder).with_name("log"))
    # It holds nothing of the launcher's: no pipe, and no socket but the one that it listens on.
    assert [link for link in files.values() if link.startswith("pipe:")] == []
    assert len([link for link in files.values() if link.startswith("socket:")]) == 1
    assert all_gone(tmp_path, 1)


@ON_LINUX
def test_ctrl_c_in_the_terminal_reaches_neither_daemon_nor_guard(one_gpu, quick_ranks, tmp_path):
    with mp.Pool() as pool:
        pool.run(environment, 2)
        pid, server, *_ = daemons(tmp_path)[0]
        guard = pool._mps._own._guard.pid
        assert os.getsid(guard) == guard != os.getsid(0)
        assert os.getsid(pid) == os.getsid(server) not in (os.getsid(0), guard)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # nor does the guard end before the launcher
            os.kill(guard, number)
        assert not gone(guard, patience=0.2) and not gone(pid, patience=0.1)
    assert all_gone(tmp_path, 1)


@ON_LINUX
def test_a_pool_keeps_its_daemon_until_its_ranks_end(one_gpu, quick_ranks, tmp_path):
    with mp.Pool() as pool:
        before = [pid for pid, *_ in pool.run(environment, 2, device="cpu")]  # these need no daemon
        first = pool.run(environment, 2)
        assert {pid for pid, *_ in first}.isdisjoint(before)
        again = pool.run(environment, 2)
        assert [rank[:3] for rank in again] == [rank[:3] for rank in first]
        assert [rank[:3] for rank in pool.run(environment, 2, device="cpu")] == [rank[:3] for rank in first]
        assert [rank[:3] for rank in pool.run(environment, 1)] == [first[0][:3]]
        stdin = str(Path(f"/proc/self/fd/{pool._mps._own._guard.stdin.fileno()}").readlink())
        assert all(stdin not in files for *_, files in first)  # by which the guard knows that the launcher has ended
        off = pool.run(environment, 2, mps="off")
        assert [rank[1:3] for rank in off] == [(None, None)] * 2
        assert all_gone(tmp_path, 1)
        pool.run(environment, 2, mps="on")
    assert all_gone(tmp_path, 2)


@ON_LINUX
def test_two_worlds_at_once_have_two_daemons(one_gpu, quick_ranks, tmp_path):
    with mp.Pool() as one, mp.Pool() as other:
        folders = {folder for pool in (one, other) for _, folder, *_ in pool.run(environment, 2)}
        assert len(folders) == 2
        one.close()
        assert not gone(daemons(tmp_path)[1][0], patience=0.1)
        other.run(environment, 2)
    assert all_gone(tmp_path, 2)


def dies_the_first_time(comms, marker):
    folder = os.environ[PIPES]
    comms.barrier()
    if comms.rank == 1 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    comms.barrier()
    return folder


@ON_LINUX
def test_a_rank_that_dies_ends_the_daemon_and_the_next_world_has_another(one_gpu, quick_ranks, tmp_path):
    with mp.Pool() as pool:
        with pytest.raises(RankFailed, match="rank 1 was killed by SIGKILL"):
            pool.run(dies_the_first_time, 2, tmp_path / "marker")
        assert all_gone(tmp_path, 1)
        pool.run(dies_the_first_time, 2, tmp_path / "marker")
    assert all_gone(tmp_path, 2)


@ON_LINUX
def test_ranks_that_are_started_again_have_a_new_daemon(one_gpu, quick_ranks, tmp_path):
    quiet = {"restarts": 1, "on_restart": lambda *_: None}
    folders = mp.launch(dies_the_first_time, 2, tmp_path / "marker", **quiet)
    first, second = (folder for _, _, folder, *_ in daemons(tmp_path))
    assert folders == [second, second] != [first, first]
    assert all_gone(tmp_path, 2)


@ON_LINUX
def test_a_daemon_that_does_not_start(one_gpu, quick_ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_MPS", "broken")
    assert [folder for _, folder, *_ in mp.launch(environment, 2)] == [None, None]
    with pytest.raises(UsageError) as caught:
        mp.launch(environment, 2, mps="on")
    assert "-d exited with code 1: An instance of this daemon is already running; choose 'auto'" in str(caught.value)
    assert all_gone(tmp_path, 0)


@ON_LINUX
def test_a_daemon_that_programs_cannot_use(one_gpu, quick_ranks, tmp_path, monkeypatch):
    """As in a container that does not let the server start: ranks would fail, so they go without."""

    def refuse(changes, with_context):
        if with_context:
            raise LaunchError("the GPU cannot be used: CUDA_ERROR_MPS_CONNECTION_FAILED (805) in cuInit")
        return []

    monkeypatch.setattr(daemon, "use_gpus", refuse)
    with mp.Pool() as pool:
        for _ in range(2):  # the second world does not try it again
            assert [folder for _, folder, *_ in pool.run(environment, 2)] == [None, None]
        assert all_gone(tmp_path, 1)
        with pytest.raises(UsageError, match="mps 'on' cannot work here: the GPU cannot be used: CUDA_ERROR_MPS"):
            pool.run(environment, 2, mps="on")
    assert all_gone(tmp_path, 2)


@ON_LINUX
def test_a_daemon_that_never_quits_is_killed_with_its_server(one_gpu, quick_ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_MPS", "stubborn")
    mp.launch(environment, 2)
    assert all_gone(tmp_path, 1)


@ON_LINUX
def test_if_the_guard_was_killed_the_launcher_ends_the_daemon(one_gpu, quick_ranks, tmp_path):
    with mp.Pool() as pool:
        pool.run(environment, 2)
        os.kill(pool._mps._own._guard.pid, signal.SIGKILL)
    assert all_gone(tmp_path, 1)


@ON_LINUX
def test_a_daemon_of_the_users_own_is_used_and_left_alone(theirs, one_gpu, quick_ranks, tmp_path, monkeypatch):
    monkeypatch.setenv(PIPES, str(theirs))
    with mp.Pool() as pool:
        for mps in ("auto", "on"):
            assert [folder for _, folder, *_ in pool.run(environment, 2, mps=mps)] == [str(theirs)] * 2
        assert [folder for _, folder, *_ in pool.run(environment, 2, mps="off")] == [NOWHERE] * 2
        assert [folder for _, folder, *_ in pool.run(environment, 2)] == [str(theirs)] * 2
    assert len(daemons(tmp_path)) == 1 and not gone(daemons(tmp_path)[0][0], patience=0.1)


SCRIPT = """
import os, pathlib, sys, time
import microparallel as mp
from microparallel.world.mps import choice, daemon

choice.gpus_here = lambda: 1
daemon.use_gpus = lambda changes, with_context: []

def work(comms, folder):
    pathlib.Path(f"/dev/shm/cuda.shm.0.{os.getpid():x}.1").touch()  # as CUDA does
    (folder / f"{comms.rank}.tmp").write_text(str(os.getpid()))
    (folder / f"{comms.rank}.tmp").rename(folder / f"{comms.rank}.pid")
    time.sleep(60)

mp.launch(work, 2, pathlib.Path(sys.argv[1]))
"""


@ON_LINUX
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_the_daemon_ends_with_the_launcher_however_that_ends(one_gpu, tmp_path, start, number):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    launcher = start("python", script, tmp_path)
    ranks = pids(tmp_path, 2)
    os.kill(launcher.pid, number)
    assert launcher.wait(20) != 0
    assert all(gone(rank) for rank in ranks)
    pid, server, folder, *_ = daemons(tmp_path)[0]
    assert gone(pid) and gone(server)
    assert comes_true(lambda: not Path(folder).parent.exists())
    assert not any(Path(f"/dev/shm/cuda.shm.0.{rank:x}.1").exists() for rank in ranks)


def comes_true(condition, patience=5.0):
    """Whether it does, within the patience."""
    deadline = time.monotonic() + patience
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


# ── files of CUDA ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_files_of_cuda_go_with_the_process_that_made_them(tmp_path):
    own = ["cuda.shm.0.1dc.1", "cuda.shm.0.1dc.a", "cuda.shm.3e8.1dc.2"]
    others = [
        "cuda.shm.0.1dc1.1",
        "cuda.shm.0.11dc.1",
        "cuda.shm.1dc.2.1",
        "cuda.shm.0.1dc",
        "cuda.shm.0.1dc.1.bak",
        "x",
    ]
    for name in own + others:
        (tmp_path / name).touch()
    remove_shared_gpu_files(0x1DC, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)
    remove_shared_gpu_files(0x1DC, tmp_path / "missing")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files to another user")
def test_files_of_other_users_stay(tmp_path):
    (tmp_path / "cuda.shm.0.1dc.1").touch()
    os.chown(tmp_path / "cuda.shm.0.1dc.1", 4711, 4711)
    remove_shared_gpu_files(0x1DC, tmp_path)
    assert (tmp_path / "cuda.shm.0.1dc.1").exists()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")
def test_the_launcher_removes_those_of_a_rank_that_was_killed(quick_ranks):
    def share_and_die(comms):
        path = Path(f"/dev/shm/cuda.shm.0.{os.getpid():x}.1")
        path.touch()
        comms.barrier()
        if comms.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comms.barrier()

    before = set(Path("/dev/shm").glob("cuda.shm.*"))
    with pytest.raises(RankFailed):
        mp.launch(share_and_die, 2, device="cpu")
    assert set(Path("/dev/shm").glob("cuda.shm.*")) <= before
