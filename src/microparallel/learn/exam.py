"""An exam: what a grader may do with a learner's file, and how what goes wrong there is put into words."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
import threading
import tokenize
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from microparallel.errors import LaunchError, RankFailed, RanksTimedOut
from microparallel.learn.board import Board, State, Waiting
from microparallel.learn.exam_comms import POINT_TO_POINT
from microparallel.learn.sitting import sit
from microparallel.learn.verdict import Step, Wrong
from microparallel.world import Pool

_LOOKS = 0.05  # seconds between two looks at the board
_PATIENCE = 12.0
_NOT_PYTHON = ("SyntaxError", "IndentationError", "TabError")
_IN_FUNCTION = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


class Exam:
    """One learner's file, and the ranks to try it on."""

    def __init__(
        self, file: Path, pool: Pool, tell: Callable[[Step], None] = lambda _: None, on_deadlocks: str = ""
    ) -> None:
        self.file = file
        self._on_deadlocks = f"; see the deadlock in {on_deadlocks}" if on_deadlocks else ""
        self.source = _read(file)
        self._pool = pool
        self._tell = tell

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[list[str]]:
        """One thing to look at; what is put into the list is shown beside it."""
        notes: list[str] = []
        passed = False
        try:
            yield notes
            passed = True
        finally:
            self._tell(Step(title, passed, "; ".join(notes)))

    def run(
        self,
        body: Callable[..., Any],
        ranks: int,
        *arguments: Any,
        allowed: Sequence[str] = POINT_TO_POINT,
        timeout: float = _PATIENCE,
    ) -> list[Any]:
        """Run `body(learner, comms, *arguments)` on that many ranks; returns what each returned.

        Args:
            body: a function of the grader's module.
            ranks: how many.
            arguments: handed to it.
            allowed: the calls of `comms` that the learner may make.
            timeout: seconds.

        Raises:
            Wrong: the learner's code raised, waits for ever, has ended its process, or called what it may not.
        """
        with tempfile.TemporaryDirectory() as folder:
            board = Board.make(Path(folder) / "board", ranks)
            with _DeadlockWatch(board, self._pool) as watch:
                try:
                    return self._pool.run(
                        sit,
                        ranks,
                        body,
                        str(self.file),
                        str(Path(folder) / "board"),
                        allowed,
                        *arguments,
                        device="cpu",
                        timeout=timeout,
                        check=True,
                    )
                except RankFailed as failure:
                    if watch.found:
                        raise Wrong(self._deadlock(watch.found, watch.finished)) from None
                    raise self._failed(failure) from None
                except RanksTimedOut as late:
                    raise Wrong(self._late(late, timeout)) from None

    # ── words ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _failed(self, failure: RankFailed) -> LaunchError | Wrong:
        if failure.traceback:
            return self._raised(failure)
        return Wrong(
            f"the process of rank {failure.rank} {failure.reason.splitlines()[0]}: "
            "let your function return, and do not end the process"
        )

    def _raised(self, failure: RankFailed) -> LaunchError | Wrong:
        line = self._last_line(failure.traceback)
        what = failure.reason.removeprefix("raised ")
        kind, _, text = what.partition(": ")
        if kind in ("Wrong", "NotAllowed"):
            return Wrong(text)
        if kind in _NOT_PYTHON:
            return Wrong(f"this is not Python yet: {text.strip()}")
        if line is None:
            return failure  # the grader's own fault
        if kind == "NotImplementedError":
            return Wrong(f"line {line} is still to be written: {text}")
        lines = self.source.splitlines()
        shown = lines[line - 1].strip() if line <= len(lines) else ""
        if kind == "Mismatch":
            text += _unlike(text)
        code = f"\n  {shown}" if shown else ""
        return Wrong(f"rank {failure.rank} stopped in line {line} with {kind}: {text.strip()}{code}")

    def _last_line(self, traceback: str) -> int | None:
        """The innermost line of the learner's file in a traceback."""
        lines = [int(found["line"]) for found in _IN_FUNCTION.finditer(traceback) if found["file"] == str(self.file)]
        return lines[-1] if lines else None

    def _late(self, late: RanksTimedOut, timeout: float) -> str:
        rank, where = late.ranks[0], ""
        for standing, place in late.places.items():
            if at := re.search(rf"{re.escape(self.file.name)}:(\d+)", place):
                rank, where = standing, f", in line {at[1]}"
                break
        return f"rank {rank} was still busy after {timeout:g} s{where}: does a loop there never end?"

    def _deadlock(self, waiting: list[Waiting], finished: list[int]) -> str:
        lines = [f"  {_in_words(one, finished)}" for one in waiting]
        if all(one.state == State.SENDING for one in waiting):
            head = f"deadlock: {_who(waiting)} in send, and nobody receives{self._on_deadlocks}"
        elif finished and any(one.state == State.TOGETHER for one in waiting):
            without = "rank" if len(finished) == 1 else "ranks"
            named = ", ".join(map(str, finished))
            head = f"not every rank makes this call: {without} {named} finished without it, and it needs all of them"
        elif any(one.peer in finished for one in waiting):
            head = "a rank waits for one that has finished: the messages of the two do not match"
        elif all(one.state == State.RECEIVING for one in waiting):
            head = f"deadlock: {_who(waiting)} in receive, and nobody sends: every rank waits for another"
        else:
            head = f"deadlock: every rank waits for another{self._on_deadlocks}"
        return "\n".join([head, *lines])


def _read(file: Path) -> str:
    """The learner's text, in whatever encoding it says it has."""
    try:
        with tokenize.open(file) as opened:
            return opened.read()
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        raise Wrong(f"{file.name} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _who(waiting: list[Waiting]) -> str:
    return "both ranks wait" if len(waiting) == 2 else "all ranks wait" if len(waiting) > 2 else "it waits"


def _in_words(one: Waiting, finished: list[int]) -> str:
    at = f" (line {one.line})" if one.line else ""
    if one.state == State.TOGETHER:
        return f"rank {one.rank} waits in a call that needs every rank{at}"
    gone = ", which has finished" if one.peer in finished else ""
    if one.state == State.SENDING:
        return f"rank {one.rank} waits in send{at} until rank {one.peer} receives{gone}"
    return f"rank {one.rank} waits in receive{at} for rank {one.peer} to send{gone}"


def _unlike(mismatch: str) -> str:
    """What the two ends of a message should agree about."""
    tensor = r"\((\w+)(\[[^]]*\])"
    received, sent = re.search(f"irecv{tensor}", mismatch), re.search(f"isend{tensor}", mismatch)
    if received is None or sent is None:
        return ""
    if received[1] != sent[1]:
        return "\n  a receive expects float32 unless it is told the dtype"
    return "\n  a receive must be told the shape of what was sent" if received[2] != sent[2] else ""


class _DeadlockWatch(threading.Thread):
    """Looks at the board while ranks run, and ends one of them (so that the pool ends the rest) when all are stuck."""

    def __init__(self, board: Board, pool: Pool) -> None:
        super().__init__(daemon=True)
        self._board, self._pool = board, pool
        self._over = threading.Event()
        self.found: list[Waiting] = []
        self.finished: list[int] = []

    def run(self) -> None:
        """Look until the exam is over."""
        before: list[Waiting] = []
        while not self._over.wait(_LOOKS):
            stuck = self._board.stuck()
            if stuck and stuck == before:  # a rank writes several numbers, one after another
                self.found, self.finished = stuck, self._board.finished()
                with contextlib.suppress(IndexError, ProcessLookupError):  # they have been ended meanwhile
                    os.kill(self._pool.process_ids[stuck[0].rank], signal.SIGKILL)
                return
            before = stuck

    def __enter__(self) -> _DeadlockWatch:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self.join()
        self._board.close()
