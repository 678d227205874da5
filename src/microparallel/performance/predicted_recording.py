"""A simulated step as a recording, so that it can be drawn over the measured one, and sorted into the same parts."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from microparallel.performance.fitted_pipeline import FittedPipeline
from microparallel.performance.fitted_step import Fitted, FittedStep, fit_step
from microparallel.program import AllReduce, Backward, Broadcast, Forward, Lane, Op, OptimizerStep, Recv, Send, parse_op
from microparallel.schedules.replicas import shifted
from microparallel.trace import Event, Trace
from microparallel.trace.intervals import Span as Interval
from microparallel.trace.intervals import outside, union
from microparallel.trace.recording import Kind, Recording, Span


def predicted_recording(measured: Recording) -> Recording:
    """What the simulator makes of a recorded step, with spans that are named as in the recording.

    Args:
        measured: one step alone. Its program and its costs are found in it (`fit_step`).
    """
    fitted = fit_step(measured)
    names = {span.kind: span.name for span in measured.spans if span.computes}
    calls = [span.name for span in measured.by_rank[0] if span.kind == "collective"]
    return recording_of(fitted, names, calls)


def recording_of(fitted: Fitted, names: dict[Kind, str] | None = None, calls: list[str] | None = None) -> Recording:
    """Simulate a step, and write it down as a recording.

    Args:
        fitted: the step.
        names: what forward, backward and optimizer are called; those of a pipeline are called as their operations.
        calls: what the collectives are called, in order.
    """
    trace = fitted.simulate()
    if not isinstance(fitted, FittedStep):
        recording = recording_of_trace(trace)
        recording = replace(recording, spans=[_counted_from_0(span, fitted) for span in recording.spans])
        return replace(recording, spans=[*recording.spans, *_tail(fitted, trace, recording, names or {}, calls or [])])
    recording = recording_of_trace(trace, after_all=Backward(0, 0))
    spans: list[Span] = []
    for mine in recording.by_rank:
        spans += _as_seen_from_outside(mine, names or {})
    if len(fitted.work) == 1:
        spans = [span for span in spans if span.computes]
    return replace(recording, spans=[_called(span, fitted, calls or []) for span in spans])


def _counted_from_0(span: Span, pipe: FittedPipeline) -> Span:
    """Each of several pipelines names its own micro-batches and ranks from 0 on."""
    microbatches, ranks = pipe.shift
    copy = span.rank // ranks
    return replace(span, name=str(shifted(parse_op(span.name), -copy * microbatches, -copy * ranks))) if copy else span


def _tail(
    pipe: FittedPipeline, trace: Trace, recording: Recording, names: dict[Kind, str], calls: list[str]
) -> Iterator[Span]:
    """After a pipeline's last computation: all ranks sum the loss, and each updates its weights."""
    end = trace.makespan
    everybody = tuple(range(recording.ranks))
    for rank, spans in enumerate(recording.by_rank):
        if pipe.meeting:
            come = max((span.end for span in spans), default=0.0)
            name = calls[-1] if calls else "all_reduce"
            yield Span(rank, "collective", name, come, end + pipe.meeting, waited=come, bytes=8, group=everybody)
        if pipe.tails and pipe.tails[rank]:
            start = end + pipe.meeting
            yield Span(rank, "optimizer", names.get("optimizer", "optimizer"), start, start + pipe.tails[rank])


def _called(span: Span, fitted: FittedStep, calls: list[str]) -> Span:
    if span.kind != "collective":
        return span
    name = calls[span.number] if span.number < len(calls) else "all_reduce"
    return replace(span, name=name, bytes=fitted.bytes[span.number])


def _as_seen_from_outside(spans: list[Span], names: dict[Kind, str]) -> Iterator[Span]:
    """Pieces of one forward, one backward and one optimizer as one span each; they last while they are blocked."""
    for kind in ("forward", "backward", "optimizer"):
        pieces = [span for span in spans if span.kind == kind and span.duration > 0]
        if pieces:
            first, last = min(one.start for one in pieces), max(one.end for one in pieces)
            yield replace(pieces[0], name=names.get(kind, kind), start=first, end=last)
    yield from (span for span in spans if not span.computes)


# ── from a trace ────────────────────────────────────────────────────────────────────────────────────────────────────


def recording_of_trace(trace: Trace, after_all: Op | None = None) -> Recording:
    """A trace as a recording, each span named as its operation.

    An event of a trace begins when a message begins to arrive. The span of a recording begins when the rank came to it,
    and has the moment from which on the rank had nothing else to do: so what lies before is seen to be waiting.

    Args:
        trace: of a run or a simulation.
        after_all: an operation that stands for the optimizer; its stage says so, on whatever rank.
    """
    spans: list[Span] = []
    groups = trace.program.groups()
    for rank, events in enumerate(trace.by_rank):
        idle = _idle(events)
        numbers: dict[object, Iterator[int]] = defaultdict(itertools.count)
        for event in events:
            span = Span(rank, _kind(event.op, after_all), str(event.op), event.start, event.end, bytes=int(event.bytes))
            match event.op:
                case Send(_, to):
                    spans.append(_at_the_end(replace(span, peer=to, number=next(numbers["send", to])), idle))
                case Recv(_, source):
                    span = replace(span, peer=source, number=next(numbers["receive", source]))
                    spans.append(_waiting(span, idle))
                case AllReduce() | Broadcast() as op:
                    group = groups[rank, op]
                    spans.append(_waiting(replace(span, group=group, number=next(numbers[group])), idle))
                case _ if event.lane is Lane.COMPUTE:
                    spans.append(span)
    return Recording(trace.program.world_size, spans)


def _kind(op: Op, after_all: Op | None) -> Kind:
    match op:
        case Forward():
            return "forward"
        case OptimizerStep():
            return "optimizer"
        case Send():
            return "send"
        case Recv():
            return "receive"
        case AllReduce() | Broadcast():
            return "collective"
        case Backward(stage) if isinstance(after_all, Backward) and stage == after_all.stage:
            return "optimizer"
    return "backward"


def _idle(events: list[Event]) -> list[Interval]:
    """When a rank computes nothing, from its first event to its last."""
    if not events:
        return []
    whole = min(event.start for event in events), max(event.end for event in events)
    whole = (min(0.0, whole[0]), whole[1])
    return outside([whole], union((event.start, event.end) for event in events if event.lane is Lane.COMPUTE))


def _waiting(span: Span, idle: list[Interval]) -> Span:
    """Find out since when the rank has waited for a communication: since its computations stopped, if they did."""
    tiny = 1e-12 + 1e-9 * abs(span.end)
    for start, end in idle:
        if start < span.end - tiny and end >= span.end - tiny:
            return replace(span, start=min(start, span.start), waited=start)
    return replace(span, waited=math.nan)


def _at_the_end(span: Span, idle: list[Interval]) -> Span:
    """Nobody waits for a message to leave, but for those after the last computation: then there is nothing else."""
    start, end = idle[-1] if idle else (math.inf, math.inf)
    return replace(span, waited=max(start, span.start)) if start < span.end <= end else span
