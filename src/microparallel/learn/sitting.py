"""One rank of an exam: load the learner's file, and let the grader try it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from microparallel.comms import Comms
from microparallel.learn.board import Board, State
from microparallel.learn.exam_comms import ExamComms
from microparallel.learn.guards import Guards
from microparallel.learn.verdict import NotAllowed, Wrong


class Learner:
    """The learner's module, by the names that the exercise asks for; and what has happened, in order."""

    def __init__(self, module: types.ModuleType, file: str) -> None:
        self._module = module
        self.file = file
        self.happened: list[str] = []

    def __getattr__(self, name: str) -> Any:
        try:
            found = getattr(self._module, name)
        except AttributeError:
            raise Wrong(f"{Path(self.file).name} has no {name}: was it renamed or removed?") from None
        if not callable(found):
            raise Wrong(f"{name} should be a function, and is {found!r:.80}")
        return found if isinstance(found, type) else functools.partial(_call, name, found)

    def happens(self, what: str) -> None:
        """Write down that something happened."""
        self.happened.append(what)


def _call(name: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a learner's function as the exercise says; other parameters are the learner's mistake, not the grader's."""
    try:
        inspect.signature(function).bind(*arguments, **named)
    except TypeError as error:
        raise Wrong(f"{name} cannot be called as the exercise says: {error}; were its parameters changed?") from None
    return function(*arguments, **named)


def sit(
    comms: Comms, body: Callable[..., Any], file: str, board_path: str, allowed: Sequence[str], *arguments: Any
) -> Any:
    """Run a grader's `body(learner, comms, *arguments)` on this rank."""
    board = Board(Path(board_path), comms.world_size)
    with Guards() as guards, _printing_at_once():
        module = _load(file)
        learner = Learner(module, file)
        exam_comms = ExamComms(comms, board, file, allowed, learner.happens)
        board.says(comms.rank, State.RUNNING)
        result = body(learner, exam_comms, *arguments)
        if refused := guards.refused + exam_comms.refused:  # and the learner's code caught it
            raise NotAllowed(refused[0])
    board.says(comms.rank, State.FINISHED)
    return result


def _load(file: str) -> types.ModuleType:
    """Run the file as a module of its own, under a name that is not `__main__`."""
    linecache.checkcache(file)
    module = types.ModuleType("exercise")
    module.__file__ = file
    sys.modules["exercise"] = module
    exec(compile(Path(file).read_bytes(), file, "exec"), module.__dict__)  # bytes: they say in which encoding they are
    return module


@contextlib.contextmanager
def _printing_at_once() -> Iterator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
