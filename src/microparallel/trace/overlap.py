"""How much of the communication was hidden behind computation."""

from __future__ import annotations

from microparallel.program import Lane
from microparallel.trace.intervals import length, union
from microparallel.trace.trace import Trace


def communication(trace: Trace) -> list[float]:
    """How long each rank communicates, whatever else it does meanwhile."""
    spans = [[(event.start, event.end) for event in events if event.lane is Lane.COMM] for events in trace.by_rank]
    return [length(union(mine)) for mine in spans]


def hidden_share(trace: Trace) -> float:
    """The share of all ranks' communication during which they computed: 1 if all of it was hidden, 0 if none."""
    talking = sum(communication(trace))
    return 1 - sum(trace.exposed_communication) / talking if talking else 1.0
