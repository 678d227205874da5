"""Predict a step of every method from a short calibration, and measure it in the same run.

    naive        the whole backward, then one all-reduce after another, a parameter each
    ddp          an all-reduce for each bucket as soon as its gradients are there: while backward goes on, or in between
                 where communication would take a core from it (`Comms.can_overlap`)
    gpipe, 1f1b  the schedule's program, with the times of its stages and of a message

Each is a program, which the simulator runs with the times of the calibration (`calibration.py`). What is calibrated
takes turns with the steps that are predicted, so that whatever else the machine does disturbs both alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from microparallel.bench.calibration import Curve, MessagesAlone, MessageTimes, RankTimes, WorkAlone, medians_of
from microparallel.bench.data_parallel import Method, Replica
from microparallel.bench.engine import Measured, Stepper, TimeBudget, step_rounds, where
from microparallel.bench.pipeline import OurPipeline, stages_alone
from microparallel.bench.pipeline_costs import StagesAlone, StageTimes
from microparallel.bench.settings import PREDICTED_REPLICAS, PredictSettings, Progress
from microparallel.bench.subjects import describe, pipeline_subject, to_device
from microparallel.comms import Comms
from microparallel.data_parallel.bucket import split
from microparallel.errors import UsageError
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
from microparallel.simulator.fitted import Fitted, RecordedCosts
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


@dataclass(frozen=True)
class Predictions(Measured):
    """Everything that was predicted and measured in one run."""

    text: str  # what is trained, for people
    bucket_cap_mb: float
    rows: tuple[Prediction, ...]
    work: tuple[RankTimes, ...]
    messages: MessageTimes


def bench_predictions(comms: Comms, settings: PredictSettings, progress: Progress = lambda *_: None) -> Predictions:
    """Calibrate, predict and measure; every rank calls this, and all get the same."""
    if comms.world_size < 2:
        raise UsageError("one rank sends nothing, so there is little to predict; start at least 2")
    bench = _Bench(comms, settings)
    subject = pipeline_subject(settings)
    budget = TimeBudget(settings.seconds, repeats=settings.steps)
    bench.rounds.fill(budget, lambda part, steps: progress(part, subject.name, steps))
    steps, messages = bench.work.steps(), bench.messages.times()
    text, rows = describe(subject, settings.microbatches), bench.predictions(steps, messages)
    return Predictions(*where(comms), text, settings.bucket_cap_mb, rows, medians_of(steps), messages)


class _Bench:
    """All methods on one model, and what is calibrated.

    Attributes:
        rounds: in which all of them take turns.
        work: a rank's own work, by itself.
        messages: messages by themselves.
    """

    def __init__(self, comms: Comms, settings: PredictSettings) -> None:
        subject = pipeline_subject(settings)
        model = subject.model().to(comms.device)
        batch = inputs, targets = to_device(subject.on_rank(0), comms.device)
        share = slice(comms.rank, None, comms.world_size)
        mine = inputs[share].contiguous(), targets[share].contiguous()
        count = settings.microbatches
        self._comms = comms
        self._settings = settings
        self._parameters = [one for one in model.parameters() if one.requires_grad]
        self._sizes = [parameter.nbytes for parameter in self._parameters]
        self._contenders: dict[str, Replica | OurPipeline] = {}
        for name in settings.methods:
            if name in PREDICTED_REPLICAS:
                method = Method(name, settings.bucket_cap_mb if name == "ddp" else None)
                self._contenders[name] = Replica(method, model, mine, comms, comms.process_group)
            else:
                self._contenders[name] = OurPipeline(name, model, batch, count, comms)
        self._activation = _largest_activation(model, inputs[: max(1, len(inputs) // count)])
        self.work = WorkAlone(comms, model, mine)
        totals = [sum(self._sizes[index] for index in bucket) for bucket in self._buckets(range(len(self._sizes)))]
        self.messages = MessagesAlone(comms, [SMALL, *totals], [SMALL, *self._sizes], [SMALL, self._activation])
        pipelines = [one for one in self._contenders.values() if isinstance(one, OurPipeline)]
        self._stages = stages_alone(pipelines, model, batch, count)
        steppers = [*self._contenders.values(), self.work, self.messages, *self._stages.values()]
        self.rounds = step_rounds(comms, steppers, _keep)

    def _buckets(self, order: Sequence[int]) -> list[list[int]]:
        """Parameters by their numbers, cut into buckets in the order in which their gradients arrive."""
        numbers = {id(self._parameters[index]): index for index in order}
        groups = split([self._parameters[index] for index in order], self._settings.bucket_cap_mb * 2**20)
        return [[numbers[id(parameter)] for parameter in group] for group in groups]

    def predictions(self, steps: Sequence[Sequence[RankTimes]], messages: MessageTimes) -> tuple[Prediction, ...]:
        """One for each method.

        In every step another rank is the slower one, and ranks that wait for each other take as long as the slower one
        each time. So each step of the calibration is simulated by itself, and the median is the prediction.
        """
        usual = medians_of(steps)
        stages = {cut: alone.stage_times() for cut, alone in self._stages.items()}
        by_step = {cut: alone.steps() for cut, alone in self._stages.items()}
        rows = []
        for name, contender in self._contenders.items():
            if isinstance(contender, OurPipeline):
                program, size = contender.pipe.program, self._activation
                fitted = predict_pipeline(program, stages[contender.cut], size, messages)
                each = [predict_pipeline(program, times, size, messages) for times in by_step[contender.cut]]
                # Before a pipeline's step the first rank says what is coming.
                before = messages.message.at(SMALL)
                seconds = statistics.median(one.makespan for one in each) + before
            else:
                fitted = self._data_parallel(name, usual, messages)
                seconds = statistics.median(self._data_parallel(name, work, messages).makespan for work in steps)
            rows.append(Prediction(name, seconds, tuple(self.rounds.seconds[contender]), fitted))
        return tuple(rows)

    def _data_parallel(self, name: str, work: Sequence[RankTimes], messages: MessageTimes) -> Fitted:
        if name == "naive":
            return predict_naive(work, self._sizes, messages)
        first = work[0].arrivals
        order = sorted(range(len(first)), key=lambda index: first[index])
        return predict_ddp(work, self._buckets(order), self._sizes, messages, self._comms.can_overlap)


def _keep(stepper: Stepper) -> None:
    if isinstance(stepper, WorkAlone | MessagesAlone | StagesAlone):
        stepper.keep()


def _largest_activation(model: nn.Module, inputs: torch.Tensor) -> int:
    """How many bytes travel between the layers of a pipeline, for one micro-batch."""
    sizes = [0]

    def look(_: nn.Module, arguments: tuple[object, ...], __: object) -> None:
        sizes.extend(one.nbytes for one in arguments if isinstance(one, torch.Tensor) and one.is_floating_point())

    layers = getattr(model, "pipeline_layers", None)
    handles = [layer.register_forward_hook(look) for layer in (layers() if layers is not None else model.children())]
    try:
        with torch.no_grad():
            model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return max(sizes)


# ── from a calibration to a program with costs ──────────────────────────────────────────────────────────────────────


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
    return Fitted(program, RecordedCosts(seconds=seconds, exchanged=bytes_of))


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
