"""A recorded step of a pipeline: what its ranks compute are operations, so it is a program already."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from microparallel.errors import ProgramError
from microparallel.performance.recorded_costs import OwnClock, RecordedCosts
from microparallel.program import (
    WORLD,
    AllReduce,
    Join,
    Named,
    Op,
    OptimizerStep,
    Program,
    Recv,
    TrainingStep,
    Value,
    halves,
)
from microparallel.schedules import lower
from microparallel.schedules.replicas import shifted
from microparallel.simulator import simulate
from microparallel.trace import Event, Observed, Trace
from microparallel.trace.meetings import meetings

_SUM = AllReduce(Named("loss"), WORLD)  # and of gradients, after the last computation


@dataclass(frozen=True)
class FittedPipeline:
    """A step of a pipeline, with its messages.

    Attributes:
        program: what the ranks do.
        times: how long each computation takes on its rank, with what else the rank does before the next.
        message: how long a message takes; the median.
        messages: how long that of each value takes, where it was recorded; sums are among them.
        bytes: of these values.
        replicas: how many pipelines there are side by side; their micro-batches are counted through.
    """

    program: Program
    times: Mapping[tuple[int, Op], float]
    message: float
    messages: Mapping[Value, float] = field(default_factory=dict)
    bytes: Mapping[Value, float] = field(default_factory=dict)
    replicas: int = 1

    @property
    def shift(self) -> tuple[int, int]:
        """How many micro-batches and ranks each pipeline has: the next one counts on from there."""
        goal = self.program.goal
        microbatches = goal.microbatches if isinstance(goal, TrainingStep) else 0
        return microbatches // self.replicas, self.program.world_size // self.replicas

    def simulate(self) -> Trace:
        """What the simulator makes of it."""
        costs = RecordedCosts(times=self.times, transfers=self.messages, usual=self.message, sizes=self.bytes)
        return simulate(self.program, costs)

    @property
    def makespan(self) -> float:
        """How long the simulated step takes."""
        return self.simulate().makespan

    def with_messages(self, factor: float) -> FittedPipeline:
        """The same, with messages and sums that take so many times as long."""
        messages = {value: seconds * factor for value, seconds in self.messages.items()}
        return replace(self, message=self.message * factor, messages=messages)


def with_update(program: Program, *, summed: bool) -> Program:
    """A pipeline's step to its end: all ranks sum gradients and the loss, if they do, and each updates its weights."""
    end = (Join(), _SUM, Join(), OptimizerStep()) if summed else (OptimizerStep(),)
    return replace(program, ranks=tuple((*ops, *end) for ops in program.ranks))


def fit_pipeline(trace: Trace) -> FittedPipeline | None:
    """The program of a recorded step whose ranks have different stages; None for one of no pipeline."""
    found = [_rank_of_pipeline(events, trace.bounds[0]) for events in trace.by_rank]
    ranks = [one for one in found if one is not None]
    size = _ranks_of_one(ranks)
    if len(ranks) < trace.ranks or size < 2 or len(ranks) % size:
        return None
    stages = 1 + max(max(one.stages) for one in ranks)
    microbatches = 1 + max(one.last_microbatch for one in ranks[:size])
    replicas = len(ranks) // size
    # Each of several pipelines may count its micro-batches from 0.
    again = replicas > 1 and ranks[size].last_microbatch < microbatches
    shifts = [rank // size * microbatches if again else 0 for rank in range(len(ranks))]
    times: dict[tuple[int, Op], float] = {
        (rank, shifted(op, shifts[rank], 0)): seconds for rank, one in enumerate(ranks) for seconds, op in one.times
    }
    orders: list[list[Op]] = [[] for _ in ranks]
    for rank, op in times:
        orders[rank].append(op)
    goal = TrainingStep(stages, microbatches * replicas)
    messages, sizes = _messages(trace, shifts)
    usual = statistics.median(messages.values()) if messages else 0.0
    meeting = _meeting(trace)
    if meeting:
        messages[_SUM.value] = meeting
    times |= {(rank, OptimizerStep()): one.tail for rank, one in enumerate(ranks)}
    try:
        computed = lower(Program("recorded", goal, tuple(map(tuple, orders))))
        fitted = FittedPipeline(with_update(computed, summed=meeting > 0), times, usual, messages, sizes, replicas)
        fitted.simulate()
    except ProgramError:
        return None
    return fitted


@dataclass(frozen=True)
class _RankOfPipeline:
    times: list[tuple[float, Op]]  # the rank's computations, in order
    tail: float

    @property
    def stages(self) -> set[int]:
        return {half.stage for _, op in self.times for half in halves(op)}

    @property
    def last_microbatch(self) -> int:
        return max(half.microbatch for _, op in self.times for half in halves(op))


def _ranks_of_one(ranks: Sequence[_RankOfPipeline]) -> int:
    """How many ranks one pipeline has: the next rank with stages of the first one's belongs to another."""
    return next((place for place, one in enumerate(ranks[1:], 1) if one.stages & ranks[0].stages), len(ranks))


def _rank_of_pipeline(events: Sequence[Event], start: float) -> _RankOfPipeline | None:
    """What a rank computes, and how long each takes until the next; None if it computes no stages."""
    named = [(event, event.op) for event in events if not isinstance(event.op, Observed) and halves(event.op)]
    if not named:
        return None
    clock = OwnClock([event for event in events if event.kind != "send"], start)  # to send is a rank's own work
    last = max([named[-1][0].end, *(event.end for event in events if event.kind == "send")])
    bounds = [*(clock.at(event.start) for event, _ in named[1:]), clock.at(last)]
    begun = 0.0  # what the rank does before its first computation counts to that
    times = []
    for (_, op), bound in zip(named, bounds, strict=True):
        times.append((max(0.0, bound - begun), op))
        begun = bound
    return _RankOfPipeline(times, max(0.0, clock.at(max(event.end for event in events)) - begun))


def _messages(trace: Trace, shifts: Sequence[int]) -> tuple[dict[Value, float], dict[Value, float]]:
    """How long each message took once it had been sent and was waited for; and how many bytes it had."""
    seconds: dict[Value, float] = {}
    sizes: dict[Value, float] = {}
    for places in meetings(trace.events):
        together = {trace.events[place].kind: trace.events[place] for place in places}
        send, receive = together.get("send"), together.get("receive")
        if receive is None or not isinstance(receive.op, Recv):
            continue
        value = _value(receive.op, shifts[receive.rank])
        sent = -math.inf if send is None else send.asked if send.waited is None else send.end
        seconds[value] = max(0.0, receive.end - max(sent, receive.asked))
        sizes[value] = receive.bytes if send is None else send.bytes
    return seconds, sizes


def _value(op: Recv, microbatches: int) -> Value:
    moved = shifted(op, microbatches, 0)
    assert isinstance(moved, Recv)
    return moved.value


def _meeting(trace: Trace) -> float:
    """How long ranks were held up by collectives, each from when all had come; the least of all ranks."""
    held_up = [0.0] * trace.ranks
    for event in trace.events:
        if event.kind == "collective" and event.waited is not None:
            held_up[event.rank] += max(0.0, event.end - max(event.start, event.waited))
    return min(held_up)
