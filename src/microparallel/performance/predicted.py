"""What the simulator makes of a recorded step, to be set beside it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from microparallel.performance.fitted_pipeline import FittedPipeline
from microparallel.performance.fitted_step import FittedStep, collectives_of, fit_step
from microparallel.program import AllReduce, Backward, Bucket, Forward, Op
from microparallel.schedules.replicas import shifted
from microparallel.trace import Event, Observed, Trace

Name = Callable[[Event], Op | Observed]


def predicted(measured: Trace) -> Trace:
    """Simulate a step with the costs that are found in it; what it does is called as it was recorded.

    Args:
        measured: one step alone.
    """
    fitted = fit_step(measured)
    trace = fitted.simulate()
    name = _of_pipeline(fitted, measured) if isinstance(fitted, FittedPipeline) else _of_pieces(fitted, measured)
    numbers: Counter[object] = Counter()
    events = []
    for event in trace.events:
        if event.kind == "collective":  # under one name, they are told apart by their numbers
            event = event._replace(number=numbers[event.rank, event.group])  # noqa: PLW2901
            numbers[event.rank, event.group] += 1
        if event.duration or not event.computes:  # a piece of work between two calls may be empty
            events.append(event._replace(op=name(event)))
    return replace(trace, events=events, program=None, about=measured.about)


def _of_pipeline(pipe: FittedPipeline, measured: Trace) -> Name:
    """Its operations have their names already, but each of several pipelines may count from 0."""
    recorded = [{event.op for event in events} for events in measured.by_rank]
    microbatches, ranks = pipe.shift

    def name(event: Event) -> Op | Observed:
        copy = event.rank // ranks
        if isinstance(event.op, Observed):
            return event.op
        own = shifted(event.op, -copy * microbatches, -copy * ranks)
        return next((op for op in (event.op, own) if op in recorded[event.rank]), _last(event, measured, math.inf))

    return name


def _of_pieces(step: FittedStep, measured: Trace) -> Name:
    """A piece of work is called as what its rank did when it ended; a collective as it was called."""
    together = collectives_of(measured)

    def name(event: Event) -> Op | Observed:
        match event.op:
            case AllReduce(Bucket(index)):
                return together[index][event.rank].op
            case Backward(stage) if together:
                index, after = step.piece(stage)
                call = together[index][event.rank]
                return _last(event, measured, call.waited if after and call.waited is not None else call.asked)
            case Forward():
                begun = [one.start for one in measured.compute[event.rank] if one.kind == "backward"]
                return _last(event, measured, min(begun, default=math.inf))
        return _last(event, measured, math.inf)

    return name


def _last(event: Event, measured: Trace, moment: float) -> Op | Observed:
    """What a rank had last begun of that kind, before a moment; if nothing, it has no name but its kind."""
    same = [one for one in measured.by_rank[event.rank] if one.kind == event.kind and one.start < moment]
    return same[-1].op if same else Observed(event.kind, event.kind)
