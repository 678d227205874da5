"""`breakpoint()` in a rank: with debug=True it stops there, and the terminal is that rank's."""

import contextlib
import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest
from commands import program_of

import microparallel as mp
from microparallel.world import debugging

SCRIPT = """
import torch
import microparallel as mp

def work(comms):
    mine = torch.tensor([comms.rank + 1.0])
    if comms.rank == 0:
        breakpoint()
    comms.barrier()
    import pdb; pdb.set_trace()
    total = comms.all_reduce(mine)
    return total.item()

print(mp.launch(work, 2, device="cpu", debug=True, timeout=0.1))
print("after", input())
"""

# In a process of its own: a session whose terminal is the one that the test holds the other end of.
BECOME_SESSION = """
import os
child = os.fork()
if child:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
os.setsid()
os.dup2(os.open({terminal!r}, os.O_RDWR), 0)
"""
FRESH = "import os, runpy, sys; os.open(os.ttyname(0), os.O_RDWR); runpy.run_path(sys.argv[1], run_name='__main__')"


class Typist:
    """Sits at a terminal: reads what appears, and types."""

    def __init__(self, terminal):
        self._terminal = terminal
        self._unread = ""
        self.read = ""

    def until(self, pattern, repeat=""):
        """Read until this has appeared; while nothing happens, type `repeat`."""
        deadline = time.monotonic() + 40
        self.type(repeat)
        while not (found := re.search(pattern, self._unread)):
            assert time.monotonic() < deadline, f"{pattern!r} did not appear after:\n{self.read}{self._unread}"
            if select.select([self._terminal], [], [], 0.3)[0]:
                self._unread += os.read(self._terminal, 4096).decode().replace("\r\n", "\n")
            else:
                self.type(repeat)
        self.read += self._unread[: found.end()]
        self._unread = self._unread[found.end() :]
        return found

    def type(self, text):
        os.write(self._terminal, text.encode())


@pytest.fixture
def at_terminal(fork_server, tmp_path):
    """Starts a script in a terminal of its own; returns who sits there, and the process."""
    ours, theirs = pty.openpty()
    started = []

    def start(script):
        file = tmp_path / "script.py"
        file.write_text(script)
        if hasattr(fork_server, "fork"):
            terminal = os.ttyname(theirs)
            program = BECOME_SESSION.format(terminal=terminal) + program_of(["python", str(file)], terminal)
            process = fork_server.fork([program], pass_fds=[], env=dict(os.environ))
        else:
            streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
            process = subprocess.Popen([sys.executable, "-c", FRESH, str(file)], start_new_session=True, **streams)
        started.append(process)
        return Typist(ours), process

    yield start
    os.close(theirs)
    os.close(ours)  # which ends what is left there
    for process in started:
        process.wait(20)


def test_the_rank_that_stops_has_the_terminal_and_the_others_wait(at_terminal):
    typist, process = at_terminal(SCRIPT)
    typist.until(r"\(Pdb rank 0\) $")
    typist.type("p mine\n")
    typist.until(r"tensor\(\[1\.\]\)\n\(Pdb rank 0\) $")
    # Ctrl-C reaches this rank's debugger, and ends nothing. Python does not notice it while the prompt still appears.
    typist.until(r"--KeyboardInterrupt--\n\(Pdb rank 0\) $", repeat="\x03")
    typist.type("mine.add_(10)\n")
    typist.until(r"tensor\(\[11\.\]\)\n\(Pdb rank 0\) $")
    typist.type("c\n")
    # Both stop at the other breakpoint, one after the other. A step that waits for the other rank gives it its turn.
    first = int(typist.until(r"-> total = comms.all_reduce\(mine\)\n\(Pdb rank (\d)\) $")[1])
    typist.type("p 'rank', comms.rank\n")
    typist.until(rf"\('rank', {first}\)\n\(Pdb rank {first}\) $")
    typist.type("n\n")
    typist.until(rf"\(Pdb rank {1 - first}\) $")
    typist.type("n\n")
    for _ in range(2):
        typist.until(r"-> return total.item\(\)\n\(Pdb rank \d\) $")
        typist.type("c\n")
    typist.until(r"\[13\.0, 13\.0\]\n")
    typist.type("the terminal is the script's again\n")
    typist.until("after the terminal is the script's again")
    assert process.wait(20) == 0


QUIT = """
import microparallel as mp

def work(comms):
    if comms.rank == 1:
        breakpoint()
        print("not here")
    comms.barrier()

try:
    mp.launch(work, 2, device="cpu", debug=True)
except mp.errors.RankFailed as error:
    print(error)
print("echo is on", input())
"""


def test_quitting_the_debugger_ends_the_ranks(at_terminal):
    typist, process = at_terminal(QUIT)
    typist.until(r"\(Pdb rank 1\) $")
    typist.type("q\n")
    typist.until("rank 1 was ended in its debugger\n")
    typist.type("again\n")
    typist.until("again\necho is on again\n")
    assert process.wait(20) == 0


def stop(comms):
    value = comms.rank * 10
    breakpoint()  # noqa: T100
    return value


@contextlib.contextmanager
def typed(commands):
    """Within this block, this process's standard input is a pipe with these commands."""
    ours, theirs = os.pipe()
    os.write(theirs, commands.encode())
    os.close(theirs)
    before = os.dup(0)
    os.dup2(ours, 0)
    try:
        yield
    finally:
        os.dup2(before, 0)
        for file in (before, ours):
            os.close(file)


def test_commands_may_come_through_a_pipe(quick_ranks, capfd):
    with typed("value += 1\nc\nvalue += 1\nc\n"):
        assert mp.launch(stop, 2, device="cpu", debug=True) == [1, 11]
    assert {"(Pdb rank 0) ", "(Pdb rank 1) "} <= set(re.findall(r"\(Pdb rank \d\) ", capfd.readouterr().out))


def stop_while_others_wait(comms):
    if comms.rank == 0:
        breakpoint()  # noqa: T100
    comms.barrier()
    return os.environ["MICROPARALLEL_WHY_AFTER"]


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_ranks_that_wait_for_a_debugger_do_not_time_out(quick_ranks, transport, monkeypatch):
    monkeypatch.setattr(sys.modules["microparallel.world.launch"], "DEFAULT_TIMEOUT", 0.3)
    with typed("import time; time.sleep(0.6)\nc\n"):
        named = {"transport": transport, "device": "cpu", "timeout": 0.3}
        assert mp.launch(stop_while_others_wait, 2, debug=True, **named) == ["0", "0"]  # nor do they say why they wait


def set_trace(comms):
    import pdb  # noqa: T100

    pdb.set_trace()  # noqa: T100
    return comms.rank


@pytest.mark.parametrize("function", [stop, set_trace])
def test_without_debug_a_line_says_what_to_do(pool, function):
    words = r"raised UsageError: breakpoint\(\) in rank 0, which has no terminal; call mp.launch\(..., debug=True\)"
    with pytest.raises(mp.errors.RankFailed, match=words):
        pool.run(function, 1)


def test_breakpoints_can_be_turned_off(pool):
    def turned_off(comms):
        os.environ["PYTHONBREAKPOINT"] = "0"
        try:
            return stop(comms)
        finally:
            del os.environ["PYTHONBREAKPOINT"]

    assert pool.run(turned_off, 1) == [0]


def test_there_must_be_something_to_read_commands_from():
    with open(os.devnull) as nothing:
        before = os.dup(0)
        os.dup2(nothing.fileno(), 0)
        try:
            with pytest.raises(mp.errors.UsageError, match="debug=True: this process has no standard input"):
                mp.launch(stop, 1, debug=True)
        finally:
            os.dup2(before, 0)
            os.close(before)


def test_a_rank_that_steps_keeps_the_terminal_for_a_moment(monkeypatch):
    told = []
    terminal = debugging.Terminal(told.append)
    terminal.wants(0, 100)
    terminal.wants(1, 101)
    terminal.leaves()
    terminal.give()
    assert told == [0]  # rank 0 may come back in a moment
    terminal.wants(0, 100)
    assert told == [0, 0]
    terminal.leaves()
    monkeypatch.setattr(debugging, "_PATIENCE", 0.0)
    terminal.give()
    assert told == [0, 0, 1]
