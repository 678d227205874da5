"""Ask a rank for its stack with a signal: it answers into a file of its own, even from inside C code."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from pathlib import Path
from typing import IO

from microparallel.flight.place import Place, read_stack
from microparallel.flight.processes import catches

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
