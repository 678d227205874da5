"""`breakpoint()` in a rank: the rank that stops gets the terminal, and the others wait.

    rank 1    pdb is about to ask for a command ── WantsTerminal ──▶ parent
              reads commands from the terminal  ◀── HasTerminal ──── parent gives it to one rank at a time
              goes on (n, s, c)                 ── LeavesTerminal ─▶ parent takes it back

A rank leaves the terminal with every command that lets it go on: a step may wait for another rank, which may itself
stand at a breakpoint. The parent keeps the terminal for a rank that steps for a moment (`_PATIENCE`), so that quick
steps stay with one rank.

"Gives" means to make the rank's process group the terminal's foreground group, as a shell does with its jobs. So line
editing works, and Ctrl-C reaches the rank that is being debugged and no other.
"""

from __future__ import annotations

import contextlib
import io
import os
import pdb  # noqa: T100
import pickle
import signal
import stat
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from microparallel.errors import UsageError
from microparallel.world.output import RankOutput

# For calls between ranks, in place of their timeout: 20 days. Sockets count milliseconds in 32 bits.
WAIT_FOR_PEOPLE = 20 * 24 * 3600.0
_PATIENCE = 0.5  # seconds for which the terminal is kept for the rank that had it
_interaction = pdb.Pdb.interaction


@dataclass(frozen=True, slots=True)
class WantsTerminal:
    """A rank's message: its debugger is about to ask for a command."""


@dataclass(frozen=True, slots=True)
class HasTerminal:
    """The parent's answer: now the rank may read from the terminal."""


@dataclass(frozen=True, slots=True)
class LeavesTerminal:
    """A rank's message: it goes on."""


# ── in a rank ───────────────────────────────────────────────────────────────────────────────────────────────────────


class RankDebugger:
    """What `breakpoint()`, `pdb.set_trace()` and every other debugger on top of `pdb` do in a rank."""

    def __init__(self, parent: Connection, output: RankOutput) -> None:
        self._parent = parent
        self._output = output
        self._pid = os.getpid()
        self._one_thread = threading.RLock()  # held by the thread whose debugger has the terminal, or waits for it
        self._depth = 0  # pdb's command `debug` starts a debugger within the debugger
        self._rank = 0
        self._debug = False

    def begin(self, rank: int, debug: bool) -> None:
        """Prepare for a job: `breakpoint()` stops the rank, or says how that is allowed. Called by the main thread."""
        self._rank, self._debug = rank, debug
        debugger = self

        def interaction(asking: Any, *arguments: Any, **named: Any) -> Any:
            with debugger.terminal():
                asking.prompt = f"(Pdb rank {debugger._rank}) "
                return _interaction(asking, *arguments, **named)

        pdb.Pdb.interaction = interaction  # type: ignore[assignment, method-assign]
        sys.breakpointhook = sys.__breakpointhook__ if debug else self._refuse
        if debug:
            sys.stdin = io.TextIOWrapper(_ByteByByte(0, closefd=False))
        # A rank that reads from the terminal while another one has it gets an error. By default it would be stopped.
        signal.signal(signal.SIGTTIN, signal.SIG_IGN if debug else signal.SIG_DFL)

    def _refuse(self, *_: Any, **__: Any) -> None:
        if os.environ.get("PYTHONBREAKPOINT") != "0":
            self._require_debug()

    def _require_debug(self) -> None:
        if not self._debug:
            raise UsageError(
                f"breakpoint() in rank {self._rank}, which has no terminal; call mp.launch(..., debug=True)"
            )
        if os.getpid() != self._pid:
            raise UsageError(
                f"breakpoint() in a process that rank {self._rank} has started (a DataLoader's worker?), "
                "which has no terminal; debug it in the rank itself (num_workers=0)"
            )

    @contextlib.contextmanager
    def terminal(self) -> Iterator[None]:
        """Within this block this rank may read from the terminal, and no other."""
        self._require_debug()
        with self._one_thread:
            self._depth += 1
            try:
                with self._from_parent() if self._depth == 1 else contextlib.nullcontext():
                    yield
            finally:
                self._depth -= 1

    @contextlib.contextmanager
    def _from_parent(self) -> Iterator[None]:
        self._parent.send_bytes(pickle.dumps(WantsTerminal()))
        while not isinstance(pickle.loads(self._parent.recv_bytes()), HasTerminal):
            pass
        try:
            # Ctrl-Z would stop this rank, and not the program that the shell knows.
            with self._output.prompting(), _ignoring(signal.SIGTSTP):
                yield
        finally:
            self._parent.send_bytes(pickle.dumps(LeavesTerminal()))


class _ByteByByte(io.FileIO):
    """A rank's standard input, out of which it takes its own line and no more: the next may be another rank's."""

    def read(self, size: int | None = -1) -> bytes:
        """Read what there is, at most one byte; all of it only if no size is given."""
        return super().read(size if size is None or size < 0 else min(size, 1))


@contextlib.contextmanager
def _ignoring(number: signal.Signals) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)


# ── in the parent ───────────────────────────────────────────────────────────────────────────────────────────────────


def require_stdin() -> None:
    """Raise a `UsageError` where there is nothing that a debugger could read commands from."""
    try:
        found = os.fstat(0)
    except OSError:
        found = None
    if found is None or (stat.S_ISCHR(found.st_mode) and found.st_rdev == Path(os.devnull).stat().st_rdev):
        raise UsageError(
            "debug=True: this process has no standard input to debug with (a notebook has none); "
            "start the script in a terminal"
        )


class Terminal:
    """The parent's terminal, which it gives to one rank at a time. Without a terminal, ranks take turns with stdin."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self._tell = tell  # a rank that it has the terminal
        self._waiting: list[tuple[int, int]] = []  # ranks, with the numbers of their processes
        self._holder: int | None = None
        self._last: int | None = None
        self._left_at = 0.0
        self._modes: list[Any] | None = None
        with contextlib.suppress(termios.error, OSError):
            if os.tcgetpgrp(0) == os.getpgrp():  # this program is in the foreground, and may say who is
                self._modes = termios.tcgetattr(0)

    def wants(self, rank: int, pid: int) -> None:
        """A rank's debugger asks for a command."""
        self._waiting.append((rank, pid))
        self.give()

    def leaves(self) -> None:
        """The rank that has the terminal goes on."""
        self._take_back()
        self._left_at = time.monotonic()

    def give(self) -> None:
        """Give the terminal to a rank that waits for it, if no other has it: the one that had it, or the first."""
        if self._holder is not None or not self._waiting:
            return
        same = [entry for entry in self._waiting if entry[0] == self._last]
        if not same and self._last is not None and time.monotonic() - self._left_at < _PATIENCE:
            return
        chosen = (same or self._waiting)[0]
        self._waiting.remove(chosen)
        self._holder, pid = chosen
        self._last = self._holder
        self._make_foreground(pid)
        self._tell(self._holder)

    def close(self) -> None:
        """Take the terminal back, in the state in which it was."""
        if self._holder is not None:
            self._take_back()
            if self._modes is not None:  # a rank may have died while it edited a line
                with contextlib.suppress(termios.error), _blocking(signal.SIGTTOU):
                    termios.tcsetattr(0, termios.TCSADRAIN, self._modes)

    def _take_back(self) -> None:
        self._holder = None
        self._make_foreground(os.getpgrp())

    def _make_foreground(self, group: int) -> None:
        if self._modes is not None:
            with contextlib.suppress(OSError), _blocking(signal.SIGTTOU):
                os.tcsetpgrp(0, group)


@contextlib.contextmanager
def _blocking(number: signal.Signals) -> Iterator[None]:
    """Within this block a signal does not arrive: the terminal stops programs in the background that change it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
