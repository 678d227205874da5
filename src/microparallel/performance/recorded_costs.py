"""Costs that were recorded: of every operation by itself, on its own rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from microparallel.program import Goal, GroupOp, Op, Value
from microparallel.simulator import Costs
from microparallel.trace.intervals import length, outside, union
from microparallel.trace.recording import Span


class OwnClock:
    """A rank's clock that stands still while the rank is blocked by communication."""

    def __init__(self, spans: Sequence[Span], start: float) -> None:
        self._start = start
        blocks = ((span.waited, span.end) for span in spans if not span.computes and not math.isnan(span.waited))
        self._blocked = union(blocks)

    def at(self, moment: float) -> float:
        """How long the rank has been at work by itself."""
        if moment <= self._start:
            return 0.0
        return length(outside([(self._start, moment)], self._blocked))


@dataclass(frozen=True, kw_only=True)
class RecordedCosts(Costs):
    """Costs of single operations. A value's size is the time it takes to send or to sum it, at a second a byte."""

    times: Mapping[Op, float] = field(default_factory=dict)
    values: Mapping[Value, float] = field(default_factory=dict)
    message: float = 0.0

    def of(self, op: Op) -> float:
        """How long a computation took."""
        return self.times.get(op, 0.0)

    def size(self, value: Value, goal: Goal) -> float:
        """How long a value takes to be sent, or summed."""
        del goal
        return self.values.get(value, self.message)

    def together(self, op: GroupOp) -> float:
        """How long a group took to sum a value."""
        return self.values.get(op.value, self.message)


def recorded_costs(times: Mapping[Op, float], values: Mapping[Value, float], message: float = 0.0) -> RecordedCosts:
    """Costs of operations and of values; a value that is not named takes as long as any message."""
    return RecordedCosts(times=times, values=values, message=message, seconds_per_byte=1.0)
