"""Ranks that are forked from a process which has imported torch already."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import microparallel as mp
from microparallel.world.fork_server import ForkServer, can_fork

pytestmark = pytest.mark.skipif(not can_fork(), reason="ranks cannot be forked here")


@pytest.fixture(scope="module")
def fork_server():
    with ForkServer(["microparallel.world.connect"]) as fork_server:
        yield fork_server


def process_of(comms):
    return comms.rank, os.getpid(), os.getppid()


def test_ranks_are_children_that_stay_and_can_be_replaced(fork_server):
    with mp.Pool(fork_server) as pool:
        first = pool.run(process_of, 2, device="cpu")
        assert [rank for rank, _, _ in first] == [0, 1]
        assert {parent for _, _, parent in first} == {os.getpid()}
        assert pool.run(process_of, 2, device="cpu") == first
        pool.replace_ranks()
        second = pool.run(process_of, 2, device="cpu")
    assert not {pid for _, pid, _ in first} & {pid for _, pid, _ in second}


def test_a_fork_server_that_was_killed_is_done_without():
    """It costs the ranks that are started later some time, and nothing else."""
    with ForkServer(["microparallel.world.connect"]) as own, mp.Pool(own) as pool:
        pool.run(process_of, 1, device="cpu")
        os.kill(own.pid, signal.SIGKILL)
        pool.replace_ranks()
        assert pool.run(process_of, 1, device="cpu", timeout=50)[0][0] == 0


def test_several_threads_may_start_ranks_at_once(fork_server):
    def run(_):
        with mp.Pool(fork_server) as pool:
            return [rank for rank, _, _ in pool.run(process_of, 2, device="cpu")]

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(run, range(4))) == [[0, 1]] * 4


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_that_was_killed_is_named_with_its_signal(fork_server, number):
    def die(comms):
        if comms.rank == 1:
            os.kill(os.getpid(), number)
        comms.barrier()

    with mp.Pool(fork_server) as pool, pytest.raises(mp.errors.RankFailed, match=f"rank 1 was killed by {number.name}"):
        pool.run(die, 2, device="cpu")


@pytest.mark.parametrize(
    ("program", "code", "printed"),
    [
        ("print('done')", 0, "done\n"),
        ("import sys; print('half', end=''); sys.exit(3)", 3, "half"),
        ("import sys; sys.exit('in words')", 1, "in words\n"),
        ("import sys; sys.exit()", 0, ""),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import atexit; atexit.register(print, 'last words')", 0, "last words\n"),
        (
            "import threading\nbegun = threading.Event()\n"
            "threading.Thread(target=lambda: (begun.wait(), print('waited for'))).start(); begun.set()",
            0,
            "waited for\n",
        ),
    ],
)
def test_a_fork_ends_as_any_interpreter_does(fork_server, tmp_path, program, code, printed):
    file = tmp_path / "printed"
    into_file = f"import os; [os.dup2(os.open({str(file)!r}, os.O_CREAT | os.O_WRONLY), place) for place in (1, 2)]\n"
    assert fork_server.fork([into_file + program], pass_fds=[], env=dict(os.environ)).wait(20) == code
    assert file.read_text().endswith(printed)
    assert printed or not file.read_text()


def test_a_fork_server_that_has_ended_says_so():
    fork_server = ForkServer([])
    fork_server.close()
    with mp.Pool(fork_server) as pool, pytest.raises(mp.errors.LaunchError, match="has ended"):
        pool.run(process_of, 1, device="cpu")


def test_a_fork_finalizes_what_it_has_made_and_not_what_its_parent_has(tmp_path, monkeypatch, capfd):
    """torch's finalizers take its kernels out of its tables: 10,000 pages that a fork would copy when it ends."""
    making = "import weakref\nclass Made: pass\n{0} = Made()\nweakref.finalize({0}, print, '{0}')\n"
    (tmp_path / "made_before.py").write_text(making.format("before"))
    monkeypatch.syspath_prepend(tmp_path)
    with ForkServer(["made_before"]) as own:
        fork = own.fork([making.format("after")], pass_fds=[], env=dict(os.environ))
        assert fork.wait(50) == 0
        assert capfd.readouterr().out == "after\n"


def test_a_call_that_was_interrupted_does_not_give_its_rank_to_the_next(tmp_path, monkeypatch):
    """The answer to the first comes when nobody waits for it any more."""
    (tmp_path / "waits_for_a_file.py").write_text(
        f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path / 'go')!r}).exists():\n    time.sleep(0.01)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR2, interrupt)
    try:
        with ForkServer(["waits_for_a_file"]) as own:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR2)).start()
            with pytest.raises(KeyboardInterrupt):
                own.fork(["print('first')"], pass_fds=[], env=dict(os.environ))
            (tmp_path / "go").touch()
            program = f"import pathlib, os; pathlib.Path({str(tmp_path / 'second')!r}).write_text(str(os.getpid()))"
            second = own.fork([program], pass_fds=[], env=dict(os.environ))
            assert second.wait(50) == 0
            assert (tmp_path / "second").read_text() == str(second.pid)
    finally:
        signal.signal(signal.SIGUSR2, before)
