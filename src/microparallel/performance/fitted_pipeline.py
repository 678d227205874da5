"""A recorded step of a pipeline: its spans are named after operations, so it is a program already."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from microparallel.errors import ProgramError
from microparallel.performance.recorded_costs import OwnClock, recorded_costs
from microparallel.program import Op, Program, Recv, TrainingStep, Value, halves, parse_op
from microparallel.schedules import lower
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
        meeting: how long all ranks then take to sum the loss.
        tails: what each rank does by itself after that: the optimizer.
    """

    program: Program
    times: Mapping[Op, float]
    message: float
    messages: Mapping[Value, float] = field(default_factory=dict)
    meeting: float = 0.0
    tails: tuple[float, ...] = ()

    def simulate(self) -> Trace:
        """What the simulator makes of all but the tail."""
        return simulate(self.program, recorded_costs(self.times, self.messages, self.program.world_size, self.message))

    @property
    def tail(self) -> float:
        """How long it takes after the last computation."""
        return self.meeting + max(self.tails, default=0.0)

    @property
    def makespan(self) -> float:
        """How long the simulated step takes."""
        return self.simulate().makespan + self.tail

    def with_messages(self, factor: float) -> FittedPipeline:
        """The same, with messages that take so many times as long."""
        messages = {value: seconds * factor for value, seconds in self.messages.items()}
        return replace(self, message=self.message * factor, messages=messages)


def fit_pipeline(recording: Recording) -> FittedPipeline | None:
    """The program of a recording whose computations are named after operations, as those of a pipeline are."""
    start = min(span.start for span in recording.spans)
    orders: list[tuple[Op, ...]] = []
    times: dict[Op, float] = {}
    tails: list[float] = []
    for spans in recording.by_rank:
        named = [(span, op) for span in spans if span.computes and (op := _operation(span)) is not None]
        if not named:
            return None
        clock = OwnClock([span for span in spans if span.kind != "send"], start)  # to send is a rank's own work
        last = max([named[-1][0].end, *(span.end for span in spans if span.kind == "send")])
        bounds = [*(clock.at(span.start) for span, _ in named[1:]), clock.at(last)]
        begun = 0.0  # what the rank does before its first computation counts to that
        for (_, op), bound in zip(named, bounds, strict=True):
            times[op] = max(0.0, bound - begun)
            begun = bound
        orders.append(tuple(op for _, op in named))
        tails.append(max(0.0, clock.at(max(span.end for span in spans)) - begun))
    ops = [half for order in orders for op in order for half in halves(op)]
    if sum(len(order) for order in orders) != len(times):
        return None  # several pipelines side by side
    stages, microbatches = 1 + max(op.stage for op in ops), 1 + max(op.microbatch for op in ops)
    messages = _message_seconds(recording)
    usual = statistics.median(messages.values()) if messages else 0.0
    try:
        program = lower(Program("recorded", TrainingStep(stages, microbatches), tuple(orders)))
        fitted = FittedPipeline(program, times, usual, messages, _meeting(recording), tuple(tails))
        fitted.simulate()
    except ProgramError:
        return None
    return fitted


def _operation(span: Span) -> Op | None:
    try:
        op = parse_op(span.name)
    except ProgramError:
        return None
    return op if halves(op) else None


def _message_seconds(recording: Recording) -> dict[Value, float]:
    """How long each message took once it had been sent and was waited for."""
    sends = {(span.rank, span.peer, span.number): span for span in recording.spans if span.kind == "send"}
    found: dict[Value, float] = {}
    for span in recording.spans:
        if span.kind != "receive":
            continue
        send = sends.get((-1 if span.peer is None else span.peer, span.rank, span.number))
        sent = span.start if send is None else send.end if not math.isnan(send.waited) else send.start
        op = parse_op(span.name) if span.name.startswith("<") else None
        if isinstance(op, Recv):
            found[op.value] = max(0.0, span.end - max(sent, span.start))
    return found


def _meeting(recording: Recording) -> float:
    """How long the last collective of all ranks took, once all had come."""
    last = [
        max((span for span in spans if span.kind == "collective"), key=lambda span: span.end, default=None)
        for spans in recording.by_rank
    ]
    if recording.ranks == 1 or any(span is None or len(span.group) != recording.ranks for span in last):
        return 0.0
    together = [span for span in last if span is not None]
    return max(0.0, statistics.median(span.end for span in together) - max(span.start for span in together))
