"""How long would a step take? Simulated, with times from a short calibration (`calibration`).

naive        the whole backward, then one all-reduce after another, a parameter each
ddp          an all-reduce for each bucket as soon as its gradients are there: while backward goes on, or in between
             where communication would take a core from it (`Comms.can_overlap`)
gpipe, 1f1b  the schedule's program, with the times of its stages and of a message
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from microparallel.performance.calibration import Curve, MessageTimes, RankTimes
from microparallel.performance.fitted import Fitted, RecordedCosts
from microparallel.performance.pipeline_bench_costs import StageTimes
from microparallel.program import (
    AllReduce,
    Backward,
    Bucket,
    Forward,
    ForwardStages,
    Join,
    Named,
    Observed,
    Op,
    OptimizerStep,
    Program,
    Send,
    halves,
    is_meeting,
)
from microparallel.schedules import data_parallel_step, ddp_naive
from microparallel.trace import Difference, Trace

SMALL = 8  # bytes: a message that only says something


@dataclass(frozen=True)
class Prediction:
    """One method: what was predicted, and what was measured.

    Attributes:
        method: by its name.
        seconds: of a step, predicted.
        measured: of each step that was timed.
        fitted: what was simulated.
    """

    method: str
    seconds: float
    measured: tuple[float, ...]
    fitted: Fitted

    @property
    def median(self) -> float:
        """The median of the measured steps."""
        return statistics.median(self.measured)

    @property
    def trace(self) -> Trace:
        """The simulated step, to be drawn over a measured one."""
        return self.fitted.simulate()

    @property
    def error(self) -> float:
        """How much too long the prediction is, as a share of what was measured; negative if it is too short."""
        return Difference("step", self.seconds, self.median).error


def predict_naive(work: Sequence[RankTimes], sizes: Sequence[int], messages: MessageTimes) -> Fitted:
    """Backward, then an all-reduce for each parameter; before them a small one, in which ranks tell what they have."""
    plain = ddp_naive(len(sizes), len(work))
    told = (Join(), AllReduce(Named("present"), "dp"), Join())
    ranks = [[new for op in ops for new in (told if isinstance(op, Join) else (op,))] for ops in plain.ranks]
    seconds: dict[tuple[int, Op], float] = {}
    for rank, one in enumerate(work):
        seconds[rank, Forward(0, rank)] = one.forward
        seconds[rank, Backward(len(sizes) - 1, rank)] = one.backward
        seconds[rank, OptimizerStep()] = one.optimizer
    program = replace(plain, ranks=tuple(map(tuple, ranks)))
    return _with_sums(program, seconds, sizes, messages.queued, messages)


def predict_ddp(
    work: Sequence[RankTimes],
    buckets: Sequence[Sequence[int]],
    sizes: Sequence[int],
    messages: MessageTimes,
    overlap: bool,
) -> Fitted:
    """A bucket leaves when its last gradient has arrived, and been packed.

    Args:
        work: of each rank.
        buckets: the parameters in each bucket, by their numbers.
        sizes: of the parameters, in bytes.
        messages: what they take.
        overlap: whether backward goes on meanwhile.
    """
    totals = [sum(sizes[index] for index in bucket) for bucket in buckets]
    rest = Observed("the rest of backward", "backward")
    plain = data_parallel_step(len(buckets), len(work), overlap=overlap)
    program = replace(plain, ranks=tuple((*ops[:-1], rest, ops[-1]) for ops in plain.ranks))
    seconds: dict[tuple[int, Op], float] = {}
    for rank, one in enumerate(work):
        at = 0.0
        for number, (bucket, size) in enumerate(zip(buckets, totals, strict=True)):
            full = max(one.arrivals[index] for index in bucket)
            packed = one.packing * size / sum(totals)
            seconds[rank, Backward(len(buckets) - 1 - number, rank)] = max(0.0, full - at) + packed
            at = max(at, full)
        seconds[rank, ForwardStages(0, len(buckets), rank)] = one.forward
        seconds[rank, rest] = max(0.0, one.backward - at)
        seconds[rank, OptimizerStep()] = one.optimizer
    return _with_sums(program, seconds, totals, messages.in_place, messages)


def _with_sums(
    program: Program,
    seconds: dict[tuple[int, Op], float],
    sizes: Sequence[int],
    curve: Curve,
    messages: MessageTimes,
) -> Fitted:
    """What ranks compute, and what they sum: the buckets of these sizes; what is of no bucket is small."""
    sums: dict[Op, int] = {AllReduce(Bucket(index), "dp"): size for index, size in enumerate(sizes)}
    bytes_of: dict[tuple[int, Op], float] = {}
    for rank, ops in enumerate(program.ranks):
        for op in filter(is_meeting, ops):
            bytes_of[rank, op] = size = sums.get(op, SMALL)
            seconds[rank, op] = (curve if op in sums else messages.in_place).at(size)
    return Fitted(program, RecordedCosts(seconds=seconds, sizes=bytes_of))


def predict_pipeline(
    program: Program, stages: StageTimes | Mapping[Op, float], activation: int, messages: MessageTimes
) -> Fitted:
    """The schedule with the times of its computations, where all messages are as long as an activation.

    Args:
        program: the schedule.
        stages: how long its stages take for a micro-batch; or how long each computation took.
        activation: bytes.
        messages: how long messages take.
    """

    def seconds(op: Op) -> float:
        if isinstance(op, Send):
            return messages.message.at(activation)
        if is_meeting(op):  # the loss
            return messages.in_place.at(SMALL)
        if isinstance(stages, StageTimes):
            return stages.costs.of(op)
        return sum(stages[half] for half in halves(op))

    ops = [(rank, op) for rank, ops in enumerate(program.ranks) for op in ops]
    return Fitted(program, RecordedCosts(seconds={(rank, op): seconds(op) for rank, op in ops}))
