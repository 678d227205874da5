"""Check a task in a notebook: print one verdict in words, whatever the reader's answer does.

A notebook has a cell with the reader's answer, and below it one with a judge: a function that takes the answer, raises
an error that says what is wrong (`require`), and returns what is right about it. `check` runs the judge and prints.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any

from microparallel.errors import MicroparallelError, RankFailed
from microparallel.learn.verdict import Wrong

_OPEN = "○ not solved yet: fill in the cell above and run it, then run this cell again"


def require(holds: bool, words: str) -> None:
    """Refuse the reader's answer with these words, unless this holds."""
    if not holds:
        raise Wrong(words)


def check(judge: Callable[..., str], *answers: Any) -> None:
    """Print what a judge says of the reader's answers: right (✓), wrong (✗), or not yet there (○).

    Args:
        judge: takes the answers, raises an error if one is wrong, and returns what is right.
        answers: what the reader wrote: functions, texts or numbers. A hole that is left is `...`, in a text too, or a
            function that raises NotImplementedError.
    """
    print(_OPEN if any(map(_has_hole, answers)) else _verdict(judge, answers))


def _has_hole(answer: Any) -> bool:
    if isinstance(answer, Mapping):
        return any(map(_has_hole, answer.values()))
    return "..." in answer if isinstance(answer, str) else answer is ...


def _verdict(judge: Callable[..., str], answers: tuple[Any, ...]) -> str:
    try:
        return f"✓ {judge(*answers)}"
    except NotImplementedError:
        return _OPEN
    except RankFailed as failure:
        if isinstance(failure.__cause__, NotImplementedError):
            return _OPEN
        return f"✗ rank {failure.rank} {failure.reason}"
    except MicroparallelError as error:
        return f"✗ {error}"
    except Exception as error:  # whatever the reader's code raises
        return f"✗ {_where(error, answers)} {type(error).__name__}: {error}"


def _where(error: Exception, answers: tuple[Any, ...]) -> str:
    """Which line of the reader's functions raised the error, if one of them did."""
    names = {getattr(answer, "__name__", "") for answer in answers}
    lines = [frame.line for frame in traceback.extract_tb(error.__traceback__) if frame.name in names]
    return f"your line `{lines[-1]}` raised" if lines else "this answer cannot be checked:"
