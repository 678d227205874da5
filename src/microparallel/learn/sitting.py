"""An exam in one process: load the learner's file for every rank, and let the grader try it on threads."""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import sys
import threading
import traceback
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from microparallel.comms import Comms
from microparallel.learn.guards import Guards, trusted
from microparallel.learn.log import Row
from microparallel.learn.ranks import ExamComms, Over, ThreadGroup, World
from microparallel.learn.verdict import NotAllowed, Wrong
from microparallel.verifier import Wait

_LONGEST = 4000  # characters of an error
_GRACE = 0.5  # seconds for a rank to fail after another


@dataclass(frozen=True)
class Failure:
    """A rank that raised, or was still busy when the time was up (then there is no error)."""

    rank: int
    line: int | None  # of the learner's file, the innermost
    kind: str = ""
    text: str = ""
    traceback: str = ""


@dataclass(frozen=True)
class Sitting:
    """What came of it: what each rank returned and did; and what went wrong, if something did."""

    results: list[Any]
    rows: list[Row]
    failure: Failure | None = None
    stuck: Sequence[Wait] = ()
    finished: Sequence[int] = ()


class Learner:
    """The learner's module, by the names that the exercise asks for."""

    def __init__(self, module: types.ModuleType, file: str) -> None:
        self._module = module
        self.file = file

    def __getattr__(self, name: str) -> Any:
        try:
            found = getattr(self._module, name)
        except AttributeError:
            raise Wrong(f"{Path(self.file).name} has no {name}: was it renamed or removed?") from None
        if not callable(found):
            raise Wrong(f"{name} should be a function, and is {found!r:.80}")
        return found if isinstance(found, type) else functools.partial(_call, name, found)


def _call(name: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a learner's function as the exercise says; other parameters are the learner's mistake, not the grader's."""
    try:
        inspect.signature(function).bind(*arguments, **named)
    except TypeError as error:
        raise Wrong(f"{name} cannot be called as the exercise says: {error}; were its parameters changed?") from None
    return function(*arguments, **named)


def sit(
    _: Comms, body: Callable[..., Any], file: str, ranks: int, allowed: Sequence[str], patience: float, *arguments: Any
) -> Sitting:
    """Run a grader's `body(learner, comms, *arguments)` on every rank: a thread each, of this process."""
    world, guarded = World(ranks), contextlib.ExitStack()
    guards = guarded.enter_context(Guards())
    guarded.enter_context(trusted())  # this thread

    def take_part(rank: int) -> None:
        try:
            comms = ExamComms(ThreadGroup(rank, ranks, world), file, allowed)
            result = body(Learner(_load(file), file), comms, *arguments)
            if refused := guards.refused + comms.refused:  # and the learner's code caught it
                raise NotAllowed(refused[0])
            world.ends(rank, result)
        except Over:
            pass
        except BaseException as error:
            world.fails(rank, error)

    threads = [threading.Thread(target=take_part, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    in_time, finished, rows = world.join(patience), sorted(world.results), [log.row for log in world.logs]
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    failure = None if in_time else _still_busy(world, threads, file)
    if world.failures:
        for thread in threads:  # nobody waits any more: of all that fail the first rank is named, whoever came first
            thread.join(_GRACE)
        rank = min(world.failures)
        failure = _raised(rank, world.failures[rank], file)
    if failure is not None or world.stuck:
        _KEPT.append(guarded)
        return Sitting([], rows, failure, world.stuck, finished)
    with guarded:
        return Sitting([world.results[rank] for rank in range(ranks)], rows)


_KEPT: list[contextlib.ExitStack] = []  # guards of ranks that may still run; the process ends soon


def _still_busy(world: World, threads: Sequence[threading.Thread], file: str) -> Failure:
    """The first rank that is busy, and where its thread is; ranks that wait for it are not to blame."""
    rank = world.busy[0]
    frame = sys._current_frames().get(threads[rank].ident or 0)
    lines = [line for found, line in traceback.walk_stack(frame) if found.f_code.co_filename == file]
    return Failure(rank, lines[0] if lines else None)


def _raised(rank: int, error: BaseException, file: str) -> Failure:
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
    text = str(error)[:_LONGEST]
    written = "".join(traceback.format_exception(error))[-_LONGEST:]
    return Failure(rank, lines[-1] if lines else None, type(error).__name__, text, written)


def _load(file: str) -> types.ModuleType:
    """Run the file as a module of its own, under a name that is not `__main__`."""
    linecache.checkcache(file)
    module = types.ModuleType("exercise")
    module.__file__ = file
    sys.modules["exercise"] = module
    exec(compile(Path(file).read_bytes(), file, "exec"), module.__dict__)  # bytes: they say in which encoding they are
    return module
