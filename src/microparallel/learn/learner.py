"""A learner's file: loaded as a module, its functions called as the exercise says, and its errors placed in it."""

from __future__ import annotations

import functools
import inspect
import linecache
import sys
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from microparallel.learn.verdict import Wrong

_LONGEST = 4000  # characters of an error


@dataclass(frozen=True)
class Failure:
    """A rank that raised, or was still busy when the time was up (then there is no error)."""

    rank: int
    line: int | None  # of the learner's file, the innermost
    kind: str = ""
    text: str = ""
    traceback: str = ""


class Learner:
    """The learner's module, by the names that the exercise asks for."""

    def __init__(self, module: types.ModuleType, file: str) -> None:
        self._module = module
        self.file = file

    def __getattr__(self, name: str) -> Any:
        try:
            found = getattr(self._module, name)
        except AttributeError:
            why = "was it renamed or removed?" if self._has_functions() else "all of it is still to be written"
            raise Wrong(f"{Path(self.file).name} has no {name}: {why}") from None
        if not callable(found):
            raise Wrong(f"{name} should be a function, and is {found!r:.80}")
        return found if isinstance(found, type) else functools.partial(_call, name, found)

    def _has_functions(self) -> bool:
        return any(inspect.isfunction(value) for value in vars(self._module).values())


def _call(name: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a learner's function as the exercise says; other parameters are the learner's mistake, not the grader's."""
    try:
        inspect.signature(function).bind(*arguments, **named)
    except TypeError as error:
        raise Wrong(f"{name} cannot be called as the exercise says: {error}; were its parameters changed?") from None
    return function(*arguments, **named)


def raised(rank: int, error: BaseException, file: str) -> Failure:
    """What a rank's error is, and which line of the learner's file it comes from."""
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
    text = str(error)[:_LONGEST]
    written = "".join(traceback.format_exception(error))[-_LONGEST:]
    return Failure(rank, lines[-1] if lines else None, type(error).__name__, text, written)


def load_file(file: str) -> types.ModuleType:
    """Run the file as a module of its own, under a name that is not `__main__`."""
    linecache.checkcache(file)
    module = types.ModuleType("exercise")
    module.__file__ = file
    sys.modules["exercise"] = module
    exec(compile(Path(file).read_bytes(), file, "exec"), module.__dict__)  # bytes: they say in which encoding they are
    return module
