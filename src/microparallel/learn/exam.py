"""An exam: what a grader may do with a learner's file, and how what goes wrong there is put into words."""

from __future__ import annotations

import contextlib
import tokenize
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from microparallel.errors import LaunchError, RankFailed, RanksTimedOut
from microparallel.learn.log import RECEIVES, SENDS, Called, Row, waited_for
from microparallel.learn.ranks import POINT_TO_POINT
from microparallel.learn.sitting import Failure, Sitting, sit
from microparallel.learn.verdict import Step, Wrong
from microparallel.learn.words import listed
from microparallel.verifier import Wait
from microparallel.world import Pool

_PATIENCE = 12.0
_GRACE = 5.0  # seconds more for a process that does not even notice that its time is up
_NOT_PYTHON = ("SyntaxError", "IndentationError", "TabError")
_LET_RETURN = "let your function return, and do not end the process"


class Stuck(Wrong):
    """Ranks that wait for ever, as the verifier would put it; and those that have finished."""

    def __init__(self, words: str, waits: Sequence[Wait], finished: Sequence[int]) -> None:
        super().__init__(words)
        self.waits, self.finished = waits, finished


class Exam:
    """One learner's file, and the ranks to try it on."""

    def __init__(
        self, file: Path, pool: Pool, tell: Callable[[Step], None] = lambda _: None, on_deadlocks: str = ""
    ) -> None:
        self.file = file
        self._on_deadlocks = f"; see the deadlock in {on_deadlocks}" if on_deadlocks else ""
        self.source = _read(file)
        self.rows: list[Row] = []  # what each rank did in the last run
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
        """Run a grader's `body(learner, comms, *arguments)` on that many ranks, threads of one process.

        Returns what each returned; `rows` says what they did. The learner may make those calls of `comms` that are
        `allowed`, and has `timeout` seconds.

        Raises:
            Wrong: the learner's code raised, has ended its process, or called what it may not.
            Stuck: its ranks wait for ever.
        """
        named = (body, str(self.file), ranks, allowed, timeout, *arguments)
        try:
            [sitting] = self._pool.run(sit, 1, *named, device="cpu", timeout=timeout + _GRACE)
        except RankFailed as failure:
            if failure.traceback:
                raise  # the grader's own fault
            ended = failure.reason.splitlines()[0]
            raise Wrong(f"the process of your ranks {ended}: {_LET_RETURN}") from None
        except RanksTimedOut:
            raise Wrong(f"your code was still busy after {timeout:g} s, where nothing could stop it") from None
        self.rows = sitting.rows
        if sitting.failure is None and not sitting.stuck:
            return list(sitting.results)
        self._pool.replace_ranks()  # some of them may still be busy
        if sitting.failure is not None:
            raise self._failed(sitting.failure, timeout)
        raise Stuck(self._deadlock(sitting), sitting.stuck, sitting.finished)

    def run_on_processes(self, body: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
        """Run a grader's own `body(comms, *arguments)` on real ranks; nothing of the learner's runs there."""
        return self._pool.run(body, ranks, *arguments, device="cpu", timeout=_PATIENCE, check=True)

    # ── words ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _failed(self, failure: Failure, timeout: float) -> LaunchError | Wrong:
        kind, text, line, rank = failure.kind, failure.text, failure.line, failure.rank
        at = "" if line is None else f", in line {line}"
        if not kind:
            return Wrong(f"rank {rank} was still busy after {timeout:g} s{at}: does a loop there never end?")
        if kind in ("Wrong", "NotAllowed"):
            return Wrong(text)
        if kind in _NOT_PYTHON:
            return Wrong(f"this is not Python yet: {text.strip()}")
        if kind == "SystemExit":
            return Wrong(f"rank {rank} exited with code {text}{at}: {_LET_RETURN}")
        if line is None:
            return RankFailed(rank, f"raised {kind}: {text}", failure.traceback)  # the grader's own fault
        if kind == "NotImplementedError":
            return Wrong(f"line {line} is still to be written: {text}")
        lines = self.source.splitlines()
        code = f"\n  {lines[line - 1].strip()}" if line <= len(lines) else ""
        return Wrong(f"rank {rank} stopped in line {line} with {kind}: {text.strip()}{code}")

    def _deadlock(self, sitting: Sitting) -> str:
        waiting, finished = [waited_for(sitting.rows, wait) for wait in sitting.stuck], sitting.finished
        lines = [f"  {_in_words(call, finished)}" for call in waiting]
        if all(call.call in SENDS for call in waiting):
            head = f"deadlock: {_who(waiting)} in send, and nobody receives{self._on_deadlocks}"
        elif finished and any(call.peer < 0 for call in waiting):
            without = "rank" if len(finished) == 1 else "ranks"
            head = (
                f"not every rank makes this call: {without} {listed(finished)} finished without it, and it needs all "
                "of them"
            )
        elif any(call.peer in finished for call in waiting):
            head = "a rank waits for one that has finished: the messages of the two do not match"
        elif all(call.call in RECEIVES for call in waiting):
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


def _who(waiting: Sequence[Called]) -> str:
    return "both ranks wait" if len(waiting) == 2 else "all ranks wait" if len(waiting) > 2 else "it waits"


def _in_words(call: Called, finished: Sequence[int]) -> str:
    at = f" (line {call.waits_in or call.line})"
    if call.peer < 0:
        return f"rank {call.rank} waits in a call that needs every rank{at}"
    gone = ", which has finished" if call.peer in finished else ""
    if call.call in SENDS:
        return f"rank {call.rank} waits in send{at} until rank {call.peer} receives{gone}"
    return f"rank {call.rank} waits in receive{at} for rank {call.peer} to send{gone}"
