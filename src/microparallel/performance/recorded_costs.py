"""Costs that were recorded: of every operation by itself, on its own rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from microparallel.program import Goal, GroupOp, Op, Send, Value
from microparallel.simulator import Costs
from microparallel.trace import Event, Trace
from microparallel.trace.intervals import length, outside, union


class OwnClock:
    """A rank's clock that stands still while the rank is blocked by communication."""

    def __init__(self, events: Iterable[Event], start: float) -> None:
        self._start = start
        self._blocked = union((event.waited, event.end) for event in events if event.waited is not None)

    def at(self, moment: float) -> float:
        """How long the rank has been at work by itself."""
        if moment <= self._start:
            return 0.0
        return length(outside([(self._start, moment)], self._blocked))


def as_recorded(trace: Trace) -> Trace:
    """The trace with what a recorder notes: when each rank asked for communication, and since when it waited for it."""
    if not trace.simulated:
        return trace
    events = [
        event if waited is None else event._replace(issued=min(event.asked, waited), waited=waited)
        for event, waited in zip(trace.events, trace.waits, strict=True)
    ]
    return replace(trace, events=events)


@dataclass(frozen=True, kw_only=True)
class RecordedCosts(Costs):
    """Costs of single operations.

    Attributes:
        times: how long each computation takes on its rank.
        transfers: how long it takes to send or to sum each value.
        usual: how long those take that are not named.
        sizes: of the values, in bytes.
    """

    times: Mapping[tuple[int, Op], float] = field(default_factory=dict)
    transfers: Mapping[Value, float] = field(default_factory=dict)
    usual: float = 0.0
    sizes: Mapping[Value, float] = field(default_factory=dict)

    def of(self, op: Op, rank: int = 0) -> float:
        """How long a computation took on a rank."""
        return self.times.get((rank, op), 0.0)

    def transfer(self, send: Send) -> float:
        """How long a message took."""
        return self.transfers.get(send.value, self.usual)

    def together(self, op: GroupOp) -> float:
        """How long a collective took once all had come."""
        return self.transfers.get(op.value, self.usual)

    def size(self, value: Value, goal: Goal) -> float:
        """How many bytes a value had."""
        del goal
        return self.sizes.get(value, 0.0)
