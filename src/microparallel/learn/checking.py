"""The runner's side of a check: start a referee, ask it about a learner's file, and end all it has started.

Whatever the learner's file does (loop for ever, exit, print without end, ask for all memory), the runner only reads the
referee's answers from a pipe and keeps a little of what was printed. When the time is up, or the runner closes, it ends
every process that the check has started, also those that hide.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from microparallel.errors import CommsError
from microparallel.learn.catalogue import Exercise
from microparallel.learn.verdict import Step, Verdict
from microparallel.observe.processes import descendants
from microparallel.topology import BEFORE_TORCH

_SECONDS = 60.0  # for one check
_TAG = "MICROPARALLEL_EXAM"  # every process of a check has it in its environment
_KEEP = 4000  # characters of what was printed, from its beginning and from its end


class Checker:
    """Checks files. The referee of one file is kept for the next, since importing torch takes seconds."""

    def __init__(self, timeout: float = _SECONDS) -> None:
        self._timeout = timeout
        self._referee: _Referee | None = None
        self._closed = False

    def check(self, exercise: Exercise, file: Path, on_step: Callable[[Step], None] = lambda _: None) -> Verdict:
        """Check a file; `on_step` is called with each step of the grader as it is done."""
        start = time.monotonic()
        verdict = self._ask(exercise, file, on_step, start + self._timeout)
        if verdict is None:  # a referee that was kept has been ended since, perhaps by the learner's code: ask another
            verdict = self._ask(exercise, file, on_step, start + self._timeout)
        if verdict is None:
            words = "the process that judges was disturbed or ended while your code ran: did your code do that?"
            verdict = Verdict(exercise.name, passed=False, message=words)
        verdict.seconds = time.monotonic() - start
        return verdict

    def _ask(self, exercise: Exercise, file: Path, on_step: Callable[[Step], None], deadline: float) -> Verdict | None:
        """One referee's verdict; None if it ended without one."""
        if self._closed:
            raise CommsError("this checker is closed")
        if self._referee is None or not self._referee.alive:
            self._end_referee()
            self._referee = _Referee()
        referee = self._referee
        verdict = referee.ask(exercise.name, file, on_step, deadline)
        if verdict is not None:
            verdict.printed = referee.printed()
            return verdict
        self._end_referee()
        if time.monotonic() < deadline:
            return None
        return Verdict(exercise.name, passed=False, message="the check did not come to an end and was stopped")

    def close(self) -> None:
        """End all processes that were started; nothing can be checked after this."""
        self._closed = True
        self._end_referee()

    def _end_referee(self) -> None:
        referee, self._referee = self._referee, None
        if referee is not None:
            referee.close()

    def __enter__(self) -> Checker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Referee:
    """The process that judges, as the runner sees it: a pipe for requests, one for answers, one that says we live."""

    def __init__(self) -> None:
        self._tag = secrets.token_hex(8)
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        lifeline, self._lifeline = os.pipe()
        theirs = (requests, answers, lifeline)
        self._process = subprocess.Popen(
            [sys.executable, "-um", "microparallel.learn.referee", *map(str, theirs)],
            pass_fds=theirs,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=BEFORE_TORCH | os.environ | {_TAG: self._tag, "PYTHONPATH": os.pathsep.join(_import_path())},
            start_new_session=True,
        )
        for fd in theirs:
            os.close(fd)
        self._unread = b""
        self._output = _Output(self._process.stdout)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, name: str, file: Path, on_step: Callable[[Step], None], deadline: float) -> Verdict | None:
        """The verdict; None if none has come by the deadline, or if what came was not the referee's."""
        self._output.forget()
        number = secrets.token_hex(8)
        request = json.dumps({"number": number, "exercise": name, "file": str(file.resolve())}) + "\n"
        with contextlib.suppress(BrokenPipeError):
            os.write(self._requests, request.encode())
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            while (line := self._next_line(deadline)) is not None:
                message = json.loads(line)
                if message["number"] != number:
                    return None
                if "verdict" in message:
                    return Verdict.from_dict(message["verdict"])
                on_step(Step(**message["step"]))
        return None

    def printed(self) -> str:
        return self._output.text()

    def _next_line(self, deadline: float) -> bytes | None:
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(self._answers, 65536) if ready else b""
            if not piece:
                return None
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def close(self) -> None:
        hidden = descendants(self._process.pid) if self.alive else []
        for fd in (self._requests, self._answers, self._lifeline):
            os.close(fd)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pid in hidden:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        _end_everything_tagged(self._tag)
        self._output.close()


class _Output:
    """What the learner's code prints: a thread reads all of it, and keeps a little."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()
        self._head = self._tail = b""
        self._size = 0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while piece := os.read(self._pipe.fileno(), 1 << 16):
            with self._lock:
                self._size += len(piece)
                self._head += piece[: _KEEP - len(self._head)]
                self._tail = (self._tail + piece)[-_KEEP:]

    def forget(self) -> None:
        with self._lock:
            self._head, self._tail, self._size = b"", b"", 0

    def text(self) -> str:
        with self._lock:
            rest = self._size - len(self._head)
            tail = self._tail[-rest:] if rest else b""
            cut = f"\n… {self._size:,} bytes were printed …\n" if rest > len(tail) else ""
            return self._head.decode(errors="replace") + cut + tail.decode(errors="replace")

    def close(self) -> None:
        self._thread.join(1.0)  # every process that could write is gone
        if not self._thread.is_alive():
            self._pipe.close()


def _import_path() -> list[str]:
    return [str(Path(folder).absolute()) for folder in sys.path]


def _end_everything_tagged(tag: str) -> None:
    """End all processes that have this tag in their environment, which children inherit."""
    mark = f"{_TAG}={tag}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
