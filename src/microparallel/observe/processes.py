"""What the system says about a process: whether it runs, is stopped or has ended, and which flight file it writes.

It is read from /proc rather than asked of psutil, which knows neither how a process ended that nobody has waited for,
nor which signals a process handles, nor, on macOS, which files it has mapped. Where there is no /proc, a process is
said to run as long as there is one of its number.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from microparallel.observe.place import Place, read_stack

_PROC = Path("/proc")
ENDED_STATUS = 1000  # no process ends with this one
ENDED_BY_PARENT = "ended by its parent"


def start_ticks(pid: int) -> int:
    """When a process began, in the system's own count: tells it from a later one of the same number. 0: unknown."""
    fields = _fields(pid)
    return int(fields[19]) if fields else 0


def state_of(pid: int, ticks: int = 0) -> tuple[str, str]:
    """How a process is (running, stopped, ended), and how it ended as far as the system still knows."""
    fields = _fields(pid)
    if fields is None:
        return ("running" if not _PROC.is_dir() and _exists(pid) else "ended"), ""
    if ticks and int(fields[19]) != ticks:
        return "ended", ""  # another process has its number now
    if fields[0] in "ZX":
        return "ended", exit_in_words(os.waitstatus_to_exitcode(int(fields[49]))) if int(fields[49]) else ""
    return ("stopped" if fields[0] in "Tt" else "running"), ""


def exit_in_words(status: int) -> str:
    """An exit status as `subprocess` gives it, or as a parent writes it down."""
    if status == ENDED_STATUS:
        return ENDED_BY_PARENT
    if status >= 0:
        return f"exit code {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal, which would otherwise end it."""
    try:
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (number - 1) & 1)


def flight_file_of(pid: int) -> Path | None:
    """The flight file that a process has mapped."""
    with contextlib.suppress(OSError, ValueError):
        for line in (_PROC / str(pid) / "maps").read_text().splitlines():
            if line.endswith(".flight"):
                return Path(line.split(maxsplit=5)[5])
    return None


def descendants(pid: int) -> list[int]:
    """The children of a process, then theirs, and so on."""
    children = _children()
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found[1:]


def mine() -> Iterator[int]:
    """All processes of this user."""
    for folder in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == os.getuid():
                yield int(folder.name)


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for folder in _PROC.glob("[0-9]*"):
        fields = _fields(int(folder.name))
        if fields:
            found.setdefault(int(fields[1]), []).append(int(folder.name))
    return found


def _fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name: 0 is the state, 1 the parent, 19 the start, 49 the exit status."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


# Ask a rank for its stack with a signal: it answers into a file of its own, even from inside C code.


SIGNAL = signal.SIGUSR1
_MOST = 2**20  # bytes of answers that are kept
_BOTTOMS = (b" in <module>", b" in _run_module_as_main", b"  ...")  # last lines of what faulthandler writes
_SILENCE = 15  # looks without anything new, after which an answer is complete


def stack_file(flight_file: Path) -> Path:
    """Where a rank leaves its answers."""
    return flight_file.with_suffix(".stack")


class Answers:
    """From now on this process answers; unless its user has other plans for the signal."""

    def __init__(self, flight_file: Path) -> None:
        self._file: IO[bytes] | None = None
        if signal.getsignal(SIGNAL) == signal.SIG_DFL:
            self._file = stack_file(flight_file).open("ab", buffering=0)
            faulthandler.register(SIGNAL, file=self._file, all_threads=False)

    @property
    def given(self) -> bool:
        """Whether it answers."""
        return self._file is not None and signal.getsignal(SIGNAL) == signal.SIG_DFL

    def close(self) -> None:
        """Answer no more."""
        if self._file is not None:
            if signal.getsignal(SIGNAL) == signal.SIG_DFL:
                faulthandler.unregister(SIGNAL)
            self._file.close()
            self._file = None


def ask(flight_file: Path, pid: int, patience: float) -> tuple[Place, ...]:
    """The stack of the main thread of a rank that answers, innermost first; empty if it gives none."""
    if not catches(pid, SIGNAL):
        return ()  # the signal would end it
    answers = stack_file(flight_file)
    with contextlib.suppress(OSError):
        start = answers.stat().st_size
        if start > _MOST:
            os.truncate(answers, 0)
            start = 0
        os.kill(pid, SIGNAL)
        return read_stack(_answer(answers, start, time.monotonic() + patience))
    return ()


def _answer(file: Path, start: int, deadline: float) -> str:
    """What comes until the stack has come to its bottom, or nothing more comes."""
    content, silence = b"", 0
    with file.open("rb") as answers:
        while time.monotonic() < deadline and silence < _SILENCE:
            answers.seek(start)
            more = answers.read()
            silence = silence + 1 if more == content != b"" else 0
            content = more
            if content.rstrip().endswith(_BOTTOMS):
                break
            time.sleep(0.003)
    return content.decode("utf-8", "replace")
