"""What the simulator makes of a recorded step, to be set beside it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from microparallel.performance.fitted_pipeline import FittedPipeline
from microparallel.performance.fitted_step import Fitted, fit_step
from microparallel.program import Op, OptimizerStep
from microparallel.schedules.replicas import shifted
from microparallel.trace import Event, Kind, Observed, Trace


def predicted(measured: Trace) -> Trace:
    """Simulate a step with the costs that are found in it; what it does is called as it was recorded.

    Args:
        measured: one step alone.
    """
    fitted = fit_step(measured)
    trace = fitted.simulate()
    events = [event for mine in trace.by_rank for event in _named(mine, measured, fitted)]
    return replace(trace, events=events, program=None, about=measured.about)


def _named(events: list[Event], measured: Trace, fitted: Fitted) -> Iterator[Event]:
    """One rank's events under the names of what it recorded."""
    rank = events[0].rank
    by_kind: dict[Kind, set[Op | Observed]] = defaultdict(set)
    for event in measured.by_rank[rank]:
        by_kind[event.kind].add(event.op)
    everybody = tuple(range(measured.ranks))
    calls = [one.op for one in measured.by_rank[rank] if one.kind == "collective" and one.group == everybody]
    left = sum(event.kind == "collective" for event in events)  # the last of both are the same
    for event in events:
        op = event.op
        if event.kind == "collective":
            op = calls[-left] if left <= len(calls) else op
            left -= 1
        elif isinstance(fitted, FittedPipeline) and not isinstance(op, Observed | OptimizerStep):
            op = _counted(op, rank, by_kind[event.kind], fitted)
        elif len(by_kind[event.kind]) == 1:
            (op,) = by_kind[event.kind]
        else:  # a piece of several things
            op = Observed(event.kind, event.kind)
        if event.duration or not event.computes:  # a piece of work between two calls may be empty
            yield event._replace(op=op)


def _counted(op: Op, rank: int, recorded: set[Op | Observed], pipe: FittedPipeline) -> Op:
    """An operation as the rank's own pipeline counts, which may begin at 0."""
    microbatches, ranks = pipe.shift
    copy = rank // ranks
    own = shifted(op, -copy * microbatches, -copy * ranks)
    return own if own in recorded else op
