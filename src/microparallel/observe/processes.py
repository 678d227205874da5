"""What the system knows of a process: whether it runs, its children, its flight file; and its stack, on a signal.

This reads /proc rather than use psutil, which knows neither how a process ended that its parent has not waited for, nor
which signals a process handles, nor, on macOS, which files it has mapped. Where there is no /proc, a process counts as
running as long as there is one of its number.
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

from microparallel.observe.own_file import append_to_own, open_own
from microparallel.observe.place import Place, read_stack

_PROC = Path("/proc")
ENDED_STATUS = 1000  # stands for "ended by its parent" in a flight file; no process ends with this status
ENDED_BY_PARENT = "ended by its parent"


def start_ticks(pid: int) -> int:
    """When a process began, in clock ticks: tells it from a later process of the same number. 0: unknown."""
    fields = _fields(pid)
    return int(fields[19]) if fields else 0


def state_of(pid: int, ticks: int = 0) -> tuple[str, str]:
    """The state of a process (running, stopped, ended), and how it ended where the system still knows."""
    fields = _fields(pid)
    if fields is None:
        return ("running" if not _PROC.is_dir() and _exists(pid) else "ended"), ""
    if ticks and int(fields[19]) != ticks:
        return "ended", ""  # another process has its number now
    if fields[0] in "ZX":
        return "ended", show_exit(os.waitstatus_to_exitcode(int(fields[49]))) if int(fields[49]) else ""
    return ("stopped" if fields[0] in "Tt" else "running"), ""


def show_exit(status: int) -> str:
    """An exit status, as `subprocess` gives it or a flight file holds it: `exit code 1`, `SIGKILL`."""
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


def children(pid: int) -> list[int]:
    """The processes whose parent is this one."""
    return _children_of_all().get(pid, [])


def descendants(pid: int) -> list[int]:
    """The children of a process, then theirs, and so on; processes whose parent has ended are not found."""
    children_of = _children_of_all()
    found = [pid]
    for one in found:
        found += children_of.get(one, [])
    return found[1:]


def of_this_user() -> Iterator[int]:
    """The numbers of all processes of this user."""
    for folder in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == os.getuid():
                yield int(folder.name)


def _children_of_all() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for folder in _PROC.glob("[0-9]*"):
        fields = _fields(int(folder.name))
        if fields:
            found.setdefault(int(fields[1]), []).append(int(folder.name))
    return found


def _fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name: 0 is the state, 1 the parent, 19 the start, 49 the exit status."""
    try:
        # A process may choose its name, also one that is not UTF-8.
        return (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


# ── the stack of another process ────────────────────────────────────────────────────────────────────────────────────

SIGNAL = signal.SIGUSR1  # on which a rank dumps its stack into a file, even from inside C code
_MOST = 2**20  # bytes of dumps that a rank keeps
_BOTTOMS = (b" in <module>", b" in _run_module_as_main", b"  ...")  # last lines of what faulthandler writes
_QUIET_LOOKS = 15  # looks at a file without anything new, after which a dump is complete


def stack_file(flight_file: Path) -> Path:
    """The file into which a rank dumps its stack."""
    return flight_file.with_suffix(".stack")


class StackDumper:
    """From now on this process dumps its stack on the signal, unless the user's program handles the signal itself."""

    def __init__(self, flight_file: Path) -> None:
        self._file: IO[bytes] | None = None
        if signal.getsignal(SIGNAL) == signal.SIG_DFL:
            self._file = append_to_own(stack_file(flight_file))
            faulthandler.register(SIGNAL, file=self._file, all_threads=False)

    @property
    def active(self) -> bool:
        """Whether this process dumps its stack: the user's program may have taken the signal since."""
        return self._file is not None and signal.getsignal(SIGNAL) == signal.SIG_DFL

    def keep_small(self) -> None:
        """Empty the file if many dumps are in it."""
        if self._file is not None and os.fstat(self._file.fileno()).st_size > _MOST:
            os.ftruncate(self._file.fileno(), 0)

    def close(self) -> None:
        """Stop dumping, and close the file."""
        if self._file is not None:
            if signal.getsignal(SIGNAL) == signal.SIG_DFL:
                faulthandler.unregister(SIGNAL)
            self._file.close()
            self._file = None


def ask_for_stack(flight_file: Path, pid: int, timeout: float) -> tuple[Place, ...]:
    """The stack of a rank's main thread, innermost first; empty if the rank does not dump it.

    The flight file says which process that is. It may be wrong, or written to deceive: so no process is sent the signal
    that does not write this very file, or that the signal would end.
    """
    with contextlib.suppress(OSError):
        if _writes(pid, flight_file) and catches(pid, SIGNAL):
            with open_own(stack_file(flight_file)) as file:
                return dumped_stack(pid, SIGNAL, file, timeout)
    return ()


def _writes(pid: int, flight_file: Path) -> bool:
    """Whether a process has mapped this flight file; where there is no /proc, that is not known, and believed."""
    if not _PROC.is_dir():
        return True
    mapped = flight_file_of(pid)
    return mapped is not None and mapped.resolve() == flight_file.resolve()


def dumped_stack(pid: int, number: signal.Signals, file: IO[bytes], timeout: float) -> tuple[Place, ...]:
    """Send a process the signal on which it dumps its stack into this file, and read the dump, innermost line first."""
    start = os.fstat(file.fileno()).st_size
    os.kill(pid, number)
    deadline = time.monotonic() + timeout
    dump, quiet_looks = b"", 0
    while time.monotonic() < deadline and quiet_looks < _QUIET_LOOKS and not dump.rstrip().endswith(_BOTTOMS):
        time.sleep(0.003)
        more = os.pread(file.fileno(), _MOST, start)
        quiet_looks = quiet_looks + 1 if more == dump != b"" else 0
        dump = more
    return read_stack(dump.decode("utf-8", "replace"))
