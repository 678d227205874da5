"""A recorded step of a pipeline: its spans are named after operations, so it is a program already."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from microparallel.errors import ProgramError
from microparallel.performance.recorded_costs import OwnClock, recorded_costs
from microparallel.program import Op, Program, Recv, TrainingStep, Value, halves, parse_op
from microparallel.schedules import lower
from microparallel.schedules.replicas import shifted
from microparallel.simulator import simulate
from microparallel.trace import Trace
from microparallel.trace.recording import Recording, Span


@dataclass(frozen=True)
class FittedPipeline:
    """A step of a pipeline, with its messages.

    Attributes:
        program: what the ranks do.
        times: how long each computation takes on its rank, with what else the rank does before the next.
        message: how long a message takes; the median.
        messages: how long that of each value takes, where it was recorded.
        meeting: how long ranks then take to sum gradients and the loss.
        tails: what each rank does by itself after that: the optimizer.
        replicas: how many pipelines there are side by side; their micro-batches are counted through.
    """

    program: Program
    times: Mapping[Op, float]
    message: float
    messages: Mapping[Value, float] = field(default_factory=dict)
    meeting: float = 0.0
    tails: tuple[float, ...] = ()
    replicas: int = 1

    @property
    def shift(self) -> tuple[int, int]:
        """How many micro-batches and ranks each pipeline has: the next one counts on from there."""
        goal = self.program.goal
        microbatches = goal.microbatches if isinstance(goal, TrainingStep) else 0
        return microbatches // self.replicas, self.program.world_size // self.replicas

    def simulate(self) -> Trace:
        """What the simulator makes of all but the tail."""
        return simulate(self.program, recorded_costs(self.times, self.messages, self.message))

    @property
    def tail(self) -> float:
        """How long it takes after the last computation."""
        return self.meeting + max(self.tails, default=0.0)

    @property
    def makespan(self) -> float:
        """How long the simulated step takes."""
        return self.simulate().makespan + self.tail

    def with_messages(self, factor: float) -> FittedPipeline:
        """The same, with messages and sums that take so many times as long."""
        messages = {value: seconds * factor for value, seconds in self.messages.items()}
        return replace(self, message=self.message * factor, messages=messages, meeting=self.meeting * factor)


def fit_pipeline(recording: Recording) -> FittedPipeline | None:
    """The program of a recording whose computations are named after operations, as those of a pipeline are."""
    found = [_rank_of_pipeline(spans, min(span.start for span in recording.spans)) for spans in recording.by_rank]
    ranks = [one for one in found if one is not None]
    if len(ranks) < recording.ranks:
        return None
    # A rank that does what an earlier one did belongs to another pipeline, which counts from 0 as well.
    first = {op for _, op in ranks[0].times}
    size = next((place for place, one in enumerate(ranks[1:], 1) if {op for _, op in one.times} & first), len(ranks))
    ops = [half for one in ranks for _, op in one.times for half in halves(op)]
    stages, microbatches = 1 + max(op.stage for op in ops), 1 + max(op.microbatch for op in ops)
    replicas = len(ranks) // size
    try:
        orders: list[tuple[Op, ...]] = []
        for copy in range(replicas):
            mine = tuple(tuple(op for _, op in one.times) for one in ranks[copy * size : (copy + 1) * size])
            whole = lower(Program("recorded", TrainingStep(stages, microbatches), mine))
            orders += [tuple(shifted(op, copy * microbatches, copy * size) for op in ops) for ops in whole.ranks]
        program = Program("recorded", TrainingStep(stages, microbatches * replicas), tuple(orders))
        times = {
            shifted(op, rank // size * microbatches, 0): seconds
            for rank, one in enumerate(ranks[: replicas * size])
            for seconds, op in one.times
        }
        messages = _message_seconds(recording, size, microbatches)
        usual = statistics.median(messages.values()) if messages else 0.0
        tails = tuple(one.tail for one in ranks)
        fitted = FittedPipeline(program, times, usual, messages, _meeting(recording), tails, replicas)
        fitted.simulate()
    except ProgramError:
        return None
    return fitted if program.world_size == recording.ranks else None


@dataclass(frozen=True)
class _RankOfPipeline:
    times: list[tuple[float, Op]]  # the rank's computations, in order
    tail: float


def _rank_of_pipeline(spans: Sequence[Span], start: float) -> _RankOfPipeline | None:
    """What a rank computes, and how long each takes until the next; None for a rank of no pipeline."""
    named = [(span, op) for span in spans if span.computes and (op := _operation(span)) is not None]
    if not named:
        return None
    clock = OwnClock([span for span in spans if span.kind != "send"], start)  # to send is a rank's own work
    last = max([named[-1][0].end, *(span.end for span in spans if span.kind == "send")])
    bounds = [*(clock.at(span.start) for span, _ in named[1:]), clock.at(last)]
    begun = 0.0  # what the rank does before its first computation counts to that
    times = []
    for (_, op), bound in zip(named, bounds, strict=True):
        times.append((max(0.0, bound - begun), op))
        begun = bound
    return _RankOfPipeline(times, max(0.0, clock.at(max(span.end for span in spans)) - begun))


def _operation(span: Span) -> Op | None:
    try:
        op = parse_op(span.name)
    except ProgramError:
        return None
    return op if halves(op) else None


def _message_seconds(recording: Recording, size: int, microbatches: int) -> dict[Value, float]:
    """How long each message took once it had been sent and was waited for."""
    sends = {(span.rank, span.peer, span.number): span for span in recording.spans if span.kind == "send"}
    found: dict[Value, float] = {}
    for span in recording.spans:
        if span.kind != "receive":
            continue
        send = sends.get((-1 if span.peer is None else span.peer, span.rank, span.number))
        sent = span.start if send is None else send.end if not math.isnan(send.waited) else send.start
        op = shifted(parse_op(span.name), span.rank // size * microbatches, 0) if span.name.startswith("<") else None
        if isinstance(op, Recv):
            found[op.value] = max(0.0, span.end - max(sent, span.start))
    return found


def _meeting(recording: Recording) -> float:
    """How long ranks were held up by collectives, each from when all had come; the least of all ranks."""
    if recording.ranks == 1:
        return 0.0
    held_up = [0.0] * recording.ranks
    for place, span in enumerate(recording.spans):
        if span.kind == "collective" and not math.isnan(span.waited):
            held_up[span.rank] += max(0.0, span.end - max(recording.begun[place], span.waited))
    return min(held_up)
