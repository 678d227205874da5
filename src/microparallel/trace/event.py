"""Event: one operation of one rank, with the time it took."""

from __future__ import annotations

from typing import NamedTuple

from microparallel.program import Lane, Op


class Event(NamedTuple):
    """An operation that ran from `start` to `end`, on one lane of one rank.

    Waiting is not part of it: a receive begins when its message begins to arrive, not when the rank began to wait.
    """

    rank: int
    lane: Lane
    op: Op
    start: float
    end: float
    messages: int = 0  # that this rank sent
    bytes: float = 0

    @property
    def duration(self) -> float:
        """How long it took."""
        return self.end - self.start
