"""An exam: what a grader may do with a learner's file, and how what goes wrong there is put into words.

```
grader          exam.run(body, ranks, …)                        in the referee's process
  └── process   run_on_threads: loads the file, a thread a rank, the sandbox around them
        └── rank      body(learner, comms, …): calls the learner's functions
```
"""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import threading
import tokenize
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from microparallel.comms import Comms
from microparallel.errors import LaunchError, RankFailed, RanksTimedOut
from microparallel.learn.learner import Failure, Learner, load_file, raised
from microparallel.learn.log import RECEIVES, SENDS, Called, Row, waited_for
from microparallel.learn.processes import LearnerFailed, run_in_process
from microparallel.learn.ranks import POINT_TO_POINT, ExamComms, Over, ThreadGroup, World
from microparallel.learn.requirements import listed
from microparallel.learn.sandbox import Sandbox, trusted
from microparallel.learn.verdict import NotAllowed, Step, Wrong
from microparallel.program.walk import Wait
from microparallel.world import Pool
from microparallel.world.fork_server import NEEDED, ForkServer, hidden_gpus

_SECONDS = 12.0  # for one run
_GRACE = 5.0  # seconds more for a process that does not even notice that its time is up
_GRACE_OF_RANKS = 0.5  # seconds for a rank to fail after another
_NOT_PYTHON = ("SyntaxError", "IndentationError", "TabError")
# What ranks of an exam import, and need not look for in each attempt.
QUICK = (*NEEDED, "microparallel.learn.exam", "microparallel.learn.sandbox:load")
# The latter comes to a process that writes more into a file than it may.
_KILLED_BY = (-signal.SIGKILL, -signal.SIGXFSZ)
_LET_RETURN = "let your function return, and do not end the process"


class Stuck(Wrong):
    """Ranks wait for ever: for what each of them waits, and which ranks have finished."""

    def __init__(self, words: str, waits: Sequence[Wait], finished: Sequence[int]) -> None:
        super().__init__(words)
        self.waits, self.finished = waits, finished


class Exam:
    """One learner's file, and the ranks to try it on."""

    def __init__(
        self, file: Path, pool: Pool, on_step: Callable[[Step], None] = lambda _: None, on_deadlocks: str = ""
    ) -> None:
        self.file = file
        self._on_deadlocks = f"; see the deadlock in {on_deadlocks}" if on_deadlocks else ""
        self.source = _read(file)
        self.rows: list[Row] = []  # what each rank did in the last run
        self._pool = pool
        self._own = contextlib.ExitStack()
        self._on_step = on_step

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[list[str]]:
        """One thing that the grader looks at; the learner sees its title, and what is put into the list beside it."""
        notes: list[str] = []
        passed = False
        try:
            yield notes
            passed = True
        finally:
            self._on_step(Step(title, passed, "; ".join(notes)))

    def run(
        self,
        body: Callable[..., Any],
        ranks: int,
        *arguments: Any,
        allowed: Sequence[str] = POINT_TO_POINT,
        timeout: float = _SECONDS,
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
            [attempt] = self._pool.run(run_on_threads, 1, *named, device="cpu", timeout=timeout + _GRACE)
        except RankFailed as failure:
            if failure.traceback:
                raise  # the grader's own fault
            ended = failure.reason.splitlines()[0]
            raise Wrong(f"the process of your ranks {ended}: {_LET_RETURN}") from None
        except RanksTimedOut:
            raise Wrong(f"your code was still busy after {timeout:g} s, where nothing could stop it") from None
        self.rows = attempt.rows
        if attempt.failure is None and not attempt.stuck:
            return list(attempt.results)
        self._pool.replace_ranks()  # some of its threads may still be busy
        if attempt.failure is not None:
            raise self._failed(attempt.failure, timeout)
        raise Stuck(self._deadlock(attempt), attempt.stuck, attempt.finished)

    def run_in_processes(
        self, body: Callable[..., Any], ranks: int, *arguments: Any, timeout: float = _SECONDS
    ) -> list[Any] | None:
        """Run a grader's `body(load, comms, *arguments)` on ranks that are processes, which the body may kill.

        `load()` loads the learner's file. Returns what each rank returned, or None if one was killed.

        Raises:
            Wrong: the learner's code raised, or had not come to its end when the time was up.
        """
        named = (body, str(self.file), *arguments)
        try:
            return self._pool_of_processes.run(run_in_process, ranks, *named, device="cpu", timeout=timeout, check=True)
        except RankFailed as failure:
            if isinstance(failure.__cause__, LearnerFailed):
                raise self._failed(failure.__cause__.failure, timeout) from None
            if failure.exit_status in _KILLED_BY:
                return None
            raise Wrong(f"rank {failure.rank} {failure.reason.splitlines()[0]}") from None
        except RanksTimedOut as late:
            places = "\n".join(f"  rank {rank}: {place}" for rank, place in sorted(late.places.items()))
            raise Wrong(f"your ranks had not come to their end after {timeout:g} s\n{places}") from None

    @functools.cached_property
    def _pool_of_processes(self) -> Pool:
        """Where ranks are there at once: where there is a GPU, forked from a process that does not see it."""
        if self._pool.forks or sys.platform != "linux":
            return self._pool
        with hidden_gpus():
            server = self._own.enter_context(ForkServer(QUICK))
        return self._own.enter_context(Pool(server))

    def close(self) -> None:
        """End the processes that this exam has started itself."""
        self._own.close()

    def run_on_processes(self, body: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
        """Run a grader's own `body(comms, *arguments)` on real ranks; nothing of the learner's runs there."""
        return self._pool.run(body, ranks, *arguments, device="cpu", timeout=_SECONDS, check=True)

    # ── words ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _failed(self, failure: Failure, timeout: float) -> LaunchError | Wrong:
        kind, text, line, rank = failure.kind, failure.text, failure.line, failure.rank
        at = "" if line is None else f", in line {line}"
        if not kind:
            return Wrong(
                f"rank {rank} was still busy after {timeout:g} s{at}: does a loop there never end, or is it too slow?"
            )
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

    def _deadlock(self, attempt: Attempt) -> str:
        waiting, finished = [waited_for(attempt.rows, wait) for wait in attempt.stuck], attempt.finished
        lines = [f"  {_in_words(call, finished)}" for call in waiting]
        if all(call.call in SENDS for call in waiting):
            head = f"deadlock: {_who(waiting)} in send, and no rank receives{self._on_deadlocks}"
        elif finished and any(call.peer < 0 for call in waiting):
            without = "rank" if len(finished) == 1 else "ranks"
            head = (
                f"not every rank makes this call: {without} {listed(finished)} finished without it, and it needs all "
                "of them"
            )
        elif any(call.peer in finished for call in waiting):
            head = "a rank waits for one that has finished: the messages of the two do not match"
        elif all(call.call in RECEIVES for call in waiting):
            head = f"deadlock: {_who(waiting)} in receive, and no rank sends: every rank waits for another"
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


# ── in the process of the ranks ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Attempt:
    """What came of one run: what each rank returned and did; and what went wrong, if something did."""

    results: list[Any]
    rows: list[Row]
    failure: Failure | None = None
    stuck: Sequence[Wait] = ()  # ranks that wait for ever
    finished: Sequence[int] = ()  # ranks that had come to their end by then


def run_on_threads(
    _: Comms, body: Callable[..., Any], file: str, ranks: int, allowed: Sequence[str], timeout: float, *arguments: Any
) -> Attempt:
    """Run a grader's `body(learner, comms, *arguments)` on every rank: a thread each, of this process."""
    world, entered = World(ranks), contextlib.ExitStack()
    sandbox = entered.enter_context(Sandbox())
    entered.enter_context(trusted())  # this thread

    def run_rank(rank: int) -> None:
        try:
            comms = ExamComms(ThreadGroup(rank, ranks, world), file, allowed)
            result = body(Learner(load_file(file), file), comms, *arguments)
            if refused := sandbox.refused + comms.refused:  # the learner's code caught the refusal
                raise NotAllowed(refused[0])
            world.ends(rank, result)
        except Over:  # another rank has failed, and is named below
            pass
        except BaseException as error:
            world.fails(rank, error)

    threads = [threading.Thread(target=run_rank, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    in_time, finished, rows = world.join(timeout), sorted(world.results), [log.row for log in world.logs]
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    failure = None if in_time else _still_busy(world, threads, file)
    if world.failures:
        for thread in threads:  # a failure ends all waits; of the ranks that fail, the lowest one is named
            thread.join(_GRACE_OF_RANKS)
        rank = min(world.failures)
        failure = raised(rank, world.failures[rank], file)
    if failure is not None or world.stuck:
        _KEPT.append(entered)
        return Attempt([], rows, failure, world.stuck, finished)
    with entered:
        return Attempt([world.results[rank] for rank in range(ranks)], rows)


_KEPT: list[contextlib.ExitStack] = []  # sandboxes of ranks that may still run; the process ends soon


def _still_busy(world: World, threads: Sequence[threading.Thread], file: str) -> Failure:
    """The first rank that is busy, and where its thread is; ranks that wait for it are not to blame."""
    rank = world.busy[0]
    frame = sys._current_frames().get(threads[rank].ident or 0)
    lines = [line for found, line in traceback.walk_stack(frame) if found.f_code.co_filename == file]
    return Failure(rank, lines[0] if lines else None)
