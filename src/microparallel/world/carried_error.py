"""A rank's exception on its way to the parent, which raises `RankFailed` from it.

Like a rank's result it comes from a process that the parent itself has started, over a pipe that no other process has.
An exception that cannot be rebuilt exactly is left out: `RankFailed` has its text and its traceback in any case.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterator
from itertools import pairwise, takewhile
from typing import Any

_MOST = 1 << 20  # bytes: an exception may hold a model


def dumps_error(error: BaseException) -> bytes | None:
    """An exception and what it was raised from, pickled; None if it cannot be rebuilt. Called in the rank."""
    import cloudpickle

    chain = list(takewhile(lambda rebuilder: rebuilder is not None, map(_rebuilder, _causes(error))))
    if not chain:
        return None
    pickled: bytes = cloudpickle.dumps(chain)
    return pickled if len(pickled) <= _MOST else None


def loads_error(pickled: bytes | None) -> BaseException | None:
    """The exception that a rank raised, without its traceback. Called in the parent."""
    if pickled is None:
        return None
    try:
        chain: list[BaseException] = [rebuild(*parts) for rebuild, *parts in pickle.loads(pickled)]
    except Exception:  # a class, say, that can only be imported in the rank
        return None
    for error, cause in pairwise(chain):
        error.__cause__ = cause
    return chain[0]


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__


def _rebuilder(error: BaseException) -> tuple[Any, ...] | None:
    """How to make this exception again: a function and its arguments, which have been tried."""
    ways: list[Callable[[], tuple[Any, ...]]] = [
        lambda: (pickle.loads, _dumps(error)),
        lambda: (_without_init, _dumps((type(error), error.args, error.__dict__))),
    ]
    for way in ways:
        try:
            rebuild, *parts = way()
            again = rebuild(*parts)
            if traceback.format_exception_only(again) == traceback.format_exception_only(error):
                return (rebuild, *parts)
        except Exception:  # its __init__ takes other arguments than its `args`, or it holds a lock, say
            continue
    return None


def _without_init(pickled: bytes) -> BaseException:
    kind, arguments, attributes = pickle.loads(pickled)
    error: BaseException = kind.__new__(kind)
    error.args = arguments
    error.__dict__.update(attributes)
    return error


def _dumps(what: object) -> bytes:
    import cloudpickle

    pickled: bytes = cloudpickle.dumps(what)
    return pickled
