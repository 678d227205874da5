"""How long would a step take? Simulated, with times from a short calibration (`calibration`).

naive        the whole backward, then one all-reduce after another, a parameter each
ddp          an all-reduce for each bucket as soon as its gradients are there: while backward goes on, or in between
             where communication would take a core from it (`Comms.can_overlap`)
gpipe, 1f1b  the schedule's program, with the times of its stages and of a message
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from microparallel.performance.calibration import MessageTimes, RankTimes
from microparallel.performance.fitted_pipeline import FittedPipeline
from microparallel.performance.fitted_step import Fitted, FittedStep, RankWork
from microparallel.performance.pipeline_bench_costs import StageTimes
from microparallel.program import Op, Program, halves
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


def predict_naive(work: Sequence[RankTimes], sizes: Sequence[int], messages: MessageTimes) -> FittedStep:
    """Backward, then an all-reduce for each parameter; before them a small one, in which ranks tell what they have."""
    count = len(sizes)
    ranks = tuple(
        RankWork(
            one.forward,
            (one.backward, *(0.0 for _ in sizes)),
            (0.0,) * (count + 1),
            (True, *(False for _ in sizes[1:]), True)[: count + 1],
            one.optimizer,
        )
        for one in work
    )
    seconds = (messages.in_place.at(SMALL), *(messages.queued.at(size) for size in sizes))
    return FittedStep(ranks, seconds, (SMALL, *sizes))


def predict_ddp(
    work: Sequence[RankTimes],
    buckets: Sequence[Sequence[int]],
    sizes: Sequence[int],
    messages: MessageTimes,
    overlap: bool,
) -> FittedStep:
    """A bucket leaves when its last gradient has arrived, and been packed.

    Args:
        work: of each rank.
        buckets: the parameters in each bucket, by their numbers.
        sizes: of the parameters, in bytes.
        messages: what they take.
        overlap: whether backward goes on meanwhile.
    """
    totals = [sum(sizes[index] for index in bucket) for bucket in buckets]
    ranks = []
    for one in work:
        full = [max(one.arrivals[index] for index in bucket) for bucket in buckets]
        before, at = [], 0.0
        for moment, size in zip(full, totals, strict=True):
            before.append(max(0.0, moment - at) + one.packing * size / sum(totals))
            at = max(at, moment)
        rest = max(0.0, one.backward - at)
        waits = tuple(not overlap or index == len(totals) - 1 for index in range(len(totals)))
        after = (*(0.0 for _ in totals[1:]), rest if overlap else 0.0)
        last = one.optimizer + (0.0 if overlap else rest)
        ranks.append(RankWork(one.forward, tuple(before), after, waits, last))
    return FittedStep(tuple(ranks), tuple(messages.in_place.at(size) for size in totals), tuple(totals))


def predict_pipeline(
    program: Program, stages: StageTimes | Mapping[Op, float], activation: int, messages: MessageTimes
) -> FittedPipeline:
    """The schedule with the times of its computations, where all messages are as long as an activation.

    Args:
        program: the schedule.
        stages: how long its stages take for a micro-batch; or how long each computation took.
        activation: bytes.
        messages: how long messages take.
    """

    def seconds(op: Op) -> float:
        if isinstance(stages, StageTimes):
            return stages.costs.of(op)
        return sum(stages[half] for half in halves(op))

    times = {(rank, op): seconds(op) for rank, ops in enumerate(program.ranks) for op in ops if halves(op)}
    return FittedPipeline(program, times, messages.message.at(activation))
