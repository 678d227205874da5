"""Time a step of every pipeline schedule beside torch's same one, and measure what it could be at best, in one run.

| ours        | torch's                       | stages a rank |
|-------------|-------------------------------|---------------|
| naive       | –                             | 1             |
| gpipe       | ScheduleGPipe                 | 1             |
| 1f1b        | Schedule1F1B                  | 1             |
| interleaved | ScheduleInterleaved1F1B       | 2             |
| zb-h1       | ScheduleInterleavedZeroBubble | 1             |
| zb-h2       | –                             | 1             |
| zbv         | ScheduleZBVZeroBubble         | 2             |
| dualpipev   | ScheduleDualPipeV             | 2             |

Both have the same layers on the same ranks: torch's stages are copies of ours. All of them take turns step by step, and
so do the stages' computations by themselves (`pipeline_costs`). After some of the timed steps one more is traced: what
each rank did when. In the end one step more is watched for its memory.

On a GPU that ranks share, torch's messages go through main memory by gloo (`StagedGloo`), and the first schedule that
torch has runs twice there, by torch and by us: what lies between a method and itself is chance.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from microparallel.bench.engine import (
    AGAIN,
    Measured,
    TimeBudget,
    Wrong,
    count_ranks_here,
    largest,
    require_memory,
    step_rounds,
    torch_group,
    transport_of,
    where,
    write_traces,
)
from microparallel.bench.gpu_use import GpuUse, gpu_of, use_of
from microparallel.bench.other_groups import staged_gloo
from microparallel.bench.pipeline_costs import SavedBytes, StagesAlone, StageTimes, kinds_in
from microparallel.bench.settings import PipelineSettings, Progress
from microparallel.bench.subjects import Batch, bytes_of, describe, pipeline_subject, to_device
from microparallel.comms import Comms
from microparallel.models.loss import cross_entropy
from microparallel.pipeline import Pipeline
from microparallel.pipeline.programs import Schedule
from microparallel.program import peak_activations
from microparallel.trace import Trace
from microparallel.trace.parts import Shares, shares

TORCH_SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
_TAKES_ONE_STAGE = ("gpipe", "1f1b")  # all others take a list
_TRACED = 5  # steps of each schedule
_COPIES = 2  # what a method needs at most, in models: weights and gradients


@dataclass(frozen=True)
class Method:
    """A schedule, run by us or by torch."""

    schedule: str
    by_torch: bool = False
    again: bool = False

    @property
    def label(self) -> str:
        """Its name where it stands alone."""
        name = f"torch's {TORCH_SCHEDULES[self.schedule]}" if self.by_torch else self.schedule
        return name + AGAIN * self.again


@dataclass(frozen=True)
class Timing:
    """The counted steps of one method, each with the time of the slowest rank; and what else was seen of it."""

    method: Method
    seconds: tuple[float, ...]
    saved_bytes: tuple[int, ...]  # for backward: the most at once, of each rank
    apart: Apart
    use: GpuUse | None = None  # what it takes of the GPU


@dataclass(frozen=True)
class TracedSteps:
    """What traced steps of one of our schedules showed."""

    bubble: float  # the share of a step that even the busiest rank does not compute; the median
    shares: tuple[Shares, ...]  # of each rank; the means
    activations: tuple[int, ...]  # the most at once, of each rank
    activations_of_program: tuple[int, ...]
    stage_times: StageTimes  # of its cut


@dataclass(frozen=True)
class Measurements(Measured):
    """Everything one run measured."""

    model: str
    text: str  # what is trained, for people
    microbatches: int
    timings: tuple[Timing, ...]
    traced: dict[str, TracedSteps]  # by schedule
    refused: dict[str, str]  # what torch would not do, by schedule
    in_float64: tuple[str, ...] = ()  # methods that rounding led elsewhere: these were compared without it


def bench_pipelines(comms: Comms, settings: PipelineSettings, progress: Progress = lambda *_: None) -> Measurements:
    """Measure all schedules; every rank calls this, and all get the same numbers."""
    subject = pipeline_subject(settings)
    sends_from_gpu = comms.device.type == "cpu" or transport_of(comms) == "nccl"
    with torch_group(comms) if sends_from_gpu else staged_gloo(comms) as group:
        bench = _Bench(comms, settings, group)
        budget = TimeBudget(settings.seconds, repeats=settings.steps)
        bench.rounds.fill(budget, lambda part, steps: progress(part, subject.name, steps))
        timings = bench.timings()
        traced = bench.traced()
        if settings.trace is not None:
            write_traces(comms, {one.method.label: one for one in bench.contenders}, settings.trace)
        timings = bench.with_use(timings)
        gpu = gpu_of(comms)
    wrong = [
        Wrong(timing.method.label, f"computed something wrong: {problem}")
        for timing in timings
        if (problem := timing.apart.problem)
    ]
    return Measurements(
        *where(comms),
        subject.name,
        describe(subject, settings.microbatches),
        settings.microbatches,
        timings,
        traced,
        bench.refused,
        tuple(bench.in_float64),
        wrong=wrong[0] if wrong else None,
        dtype_of_model=settings.dtype,
        gpu=gpu,
    )


class _Bench:
    """All methods on one model.

    Attributes:
        contenders: our pipelines, and torch's after them.
        rounds: in which they take turns, and the stages' computations with them.
        refused: why torch does not do a schedule, by its name.
        in_float64: the methods that were compared once more without rounding.
    """

    def __init__(self, comms: Comms, settings: PipelineSettings, group: dist.ProcessGroup) -> None:
        subject = pipeline_subject(settings)
        dtype: torch.dtype = getattr(torch, settings.dtype)
        model = subject.model().to(comms.device, dtype)
        schedules = len(settings.schedules)
        # All ranks together hold each schedule's model once, ours, torch's and for the computations alone; while a
        # pipeline is built, every rank holds the whole model twice.
        require_memory(
            comms,
            (3 * schedules + 2 * count_ranks_here()) * _COPIES * bytes_of(model),
            f"{schedules} schedules of this model",
            "choose fewer --schedules, or a smaller --width or --depth",
        )
        batch = to_device(subject.on_rank(0), comms.device, dtype)  # all ranks work on the same samples
        count = settings.microbatches
        self._comms = comms
        self._given = model, batch, count, group
        self._single = SingleProcess(model, batch)
        self._exact: SingleProcess | None = None
        self.refused: dict[str, str] = {}
        self.in_float64: list[str] = []
        self._ours = [OurPipeline(name, model, batch, count, comms) for name in settings.schedules]
        self.contenders: list[OurPipeline | TorchPipeline] = [*self._ours]
        for ours in self._ours if settings.with_torch else ():
            self._add_torchs(ours, batch, count, group)
        if transport_of(comms) == "cuda":
            self._add_again()
        self._alone = stages_alone(self._ours, model, batch, count)
        self._traces: dict[OurPipeline, list[Trace]] = {ours: [] for ours in self._ours}
        self.rounds = step_rounds(comms, [*self.contenders, *self._alone.values()], self._after_each)

    def _add_torchs(self, ours: OurPipeline, batch: Batch, count: int, group: dist.ProcessGroup) -> None:
        schedule = ours.method.schedule
        if schedule not in TORCH_SCHEDULES:
            return
        if len(batch[0]) % count:
            self.refused[schedule] = "its micro-batches must be of one size, and these are not"
            return
        try:
            self.contenders.append(TorchPipeline(ours, batch, count, group))
        except TorchRefuses as error:
            self.refused[schedule] = str(error)

    def _add_again(self) -> None:
        """Once more the first schedule that both have: its ratio to itself is chance."""
        torchs = next((one for one in self.contenders if one.method.by_torch), None)
        schedule = self._ours[0].method.schedule if torchs is None else torchs.method.schedule
        for method in (Method(schedule, again=True), *([replace(torchs.method, again=True)] if torchs else [])):
            self.contenders.append(self._make(method, *self._given))

    def _make(
        self, method: Method, model: nn.Module, batch: Batch, count: int, group: dist.ProcessGroup
    ) -> OurPipeline | TorchPipeline:
        """A method's copy of a model; every rank calls this."""
        ours = OurPipeline(method.schedule, model, batch, count, self._comms)
        made = TorchPipeline(ours, batch, count, group) if method.by_torch else ours
        made.method = method
        return made

    def _after_each(self, stepper: OurPipeline | TorchPipeline | StagesAlone) -> None:
        if isinstance(stepper, StagesAlone):
            stepper.keep()
        elif isinstance(stepper, OurPipeline) and len(self._traces.get(stepper, [None] * _TRACED)) < _TRACED:
            self._traces[stepper].append(stepper.traced_step())

    def timings(self) -> tuple[Timing, ...]:
        """What was measured of each method, torch's after ours."""
        found = []
        for contender in self.contenders:
            apart = self._single.compare(contender, self._comms)  # what a timed step left
            if apart.problem and math.isfinite(apart.loss) and math.isfinite(apart.gradient):
                apart = self._without_rounding(contender.method)
            with SavedBytes(contender.parameters.values()) as saved:
                contender.step()
            seconds = tuple(self.rounds.seconds[contender])
            found.append(Timing(contender.method, seconds, self._of_each_rank(saved.most), apart))
        return tuple(found)

    def _without_rounding(self, method: Method) -> Apart:
        """Do a step in float64 with a method that is too far from a single process; every rank calls this."""
        model, (inputs, targets), count, group = self._given
        exact = copy.deepcopy(model).double()
        batch = to_device((inputs, targets), inputs.device, torch.float64)
        if self._exact is None:
            self._exact = SingleProcess(exact, batch)
        made = self._make(method, exact, batch, count, group)
        made.step()
        self.in_float64.append(method.label)
        return self._exact.compare(made, self._comms)

    def with_use(self, timings: Sequence[Timing]) -> tuple[Timing, ...]:
        """The same timings, with what each method takes of the GPU: the last thing to be done here."""
        if self._comms.device.type == "cpu":
            return tuple(timings)
        self.contenders, self._ours, self._traces, self._alone = [], [], {}, {}
        del self.rounds
        return tuple(one if one.method.again else replace(one, use=self._use(one)) for one in timings)

    def _use(self, timing: Timing) -> GpuUse | None:
        seconds = statistics.median(timing.seconds)
        return use_of(self._comms, lambda: self._make(timing.method, *self._given), seconds)

    def traced(self) -> dict[str, TracedSteps]:
        """What the traces of our schedules show."""
        times = {cut: alone.stage_times() for cut, alone in self._alone.items()}
        return {
            ours.method.schedule: TracedSteps(
                statistics.median(trace.bubble_fraction for trace in traces),
                _means([shares(trace) for trace in traces]),
                self._of_each_rank(ours.pipe.most_activations),
                tuple(peak_activations(ops) for ops in ours.pipe.program.ranks),
                times[ours.cut],
            )
            for ours, traces in self._traces.items()
        }

    def _of_each_rank(self, number: int) -> tuple[int, ...]:
        mine = [number if rank == self._comms.rank else 0 for rank in range(self._comms.world_size)]
        return tuple(int(one) for one in largest(self._comms, mine))


def stages_alone(
    pipelines: Sequence[OurPipeline], model: nn.Module, batch: Batch, microbatches: int
) -> dict[Cut, StagesAlone]:
    """The stages' computations by themselves, for each way in which these pipelines cut the model."""
    cuts: dict[Cut, list[OurPipeline]] = {}
    for one in pipelines:
        cuts.setdefault(one.cut, []).append(one)
    return {
        cut: StagesAlone(same[0], kinds_in(one.pipe.program for one in same), model, batch, microbatches)
        for cut, same in cuts.items()
    }


def _means(steps: Sequence[Sequence[Shares]]) -> tuple[Shares, ...]:
    """The mean over steps, rank by rank."""
    return tuple(
        Shares(
            statistics.fmean(one.computing for one in ranks),
            statistics.fmean(one.communicating for one in ranks),
            statistics.fmean(one.waiting for one in ranks),
        )
        for ranks in zip(*steps, strict=True)
    )


# ── our schedules, and torch's ──────────────────────────────────────────────────────────────────────────────────────

Cut = tuple[tuple[int, ...], bool]  # the rank of each stage, and whether ranks compute at the same time


class OurPipeline:
    """`mp.Pipeline` with one schedule, on a copy of the model.

    Attributes:
        homes: the rank of each stage.
        parameters: those of this rank, by their names in the whole model.
    """

    alone = False

    def __init__(self, schedule: str, model: nn.Module, batch: Batch, microbatches: int, comms: Comms) -> None:
        self.method = Method(schedule)
        self.homes = tuple(Schedule(schedule, comms.world_size, microbatches).homes)
        self.pipe = Pipeline(copy.deepcopy(model), comms, schedule, microbatches, loss_fn=cross_entropy)
        self.parameters = dict(self.pipe.named_parameters())
        self._batch = batch
        self._loss = torch.zeros(())

    @property
    def computes_together(self) -> bool:
        """Whether ranks compute at the same time: then they share caches, memory and perhaps cores."""
        return self.method.schedule != "naive"

    @property
    def cut(self) -> Cut:
        """Schedules with the same cut have stages that take equally long."""
        return self.homes, self.computes_together

    @property
    def loss(self) -> float | None:
        """The last step's, where this rank knows it."""
        return float(self._loss)

    def step(self) -> None:
        """Forward and backward of all micro-batches, from no gradients at all."""
        _clear_gradients(self.parameters)
        self._loss = self.pipe.step(*self._batch)

    def traced_step(self) -> Trace:
        """The same, and what every rank did when."""
        _clear_gradients(self.parameters)
        self._loss, trace = self.pipe.traced_step(*self._batch)
        return trace


_FOLDS_OVER_GLOO = "2.13"  # the first version that was seen to run a schedule folded into a V


class TorchRefuses(Exception):
    """torch's schedule cannot do what was asked for; the text says why."""


class TorchPipeline:
    """torch's same schedule, on copies of the same stages.

    Args:
        ours: the pipeline whose stages are copied.
        batch: inputs and targets.
        microbatches: of the batch.
        group: what torch talks through.
    """

    alone = False

    def __init__(self, ours: OurPipeline, batch: Batch, microbatches: int, group: dist.ProcessGroup) -> None:
        self.method = Method(ours.method.schedule, by_torch=True)
        self.parameters: dict[str, nn.Parameter] = {}
        self._arguments: tuple[torch.Tensor, ...] = ()
        self._targets: dict[str, Any] = {}
        self._losses: list[torch.Tensor] = []
        stages = [self._copy_of(index, ours, batch, group) for index in sorted(ours.pipe.stages)]
        schedule = getattr(pipelining, TORCH_SCHEDULES[self.method.schedule])
        given = stages[0] if self.method.schedule in _TAKES_ONE_STAGE else stages
        if len(stages) > 1 and ours.homes[0] == ours.homes[-1] and torch.__version__ < _FOLDS_OVER_GLOO:
            raise TorchRefuses(f"torch {torch.__version__} sends from a rank to itself here, which gloo cannot")
        try:
            self._schedule = schedule(given, microbatches, loss_fn=cross_entropy)
        except ValueError as error:
            raise TorchRefuses(str(error)) from error

    def _copy_of(
        self, index: int, ours: OurPipeline, batch: Batch, group: dist.ProcessGroup
    ) -> pipelining.PipelineStage:
        stage, count = ours.pipe.stages[index], len(ours.homes)
        modules = copy.deepcopy(stage.modules)
        for layer, module in zip(stage.layers, modules, strict=True):
            names = [name for name, _ in layer.named_parameters()]
            self.parameters |= dict(zip(names, module.parameters(), strict=True))
        inputs, targets = batch
        if index == 0:
            self._arguments = (inputs,)
        if index == count - 1:
            self._targets = {"target": targets, "losses": self._losses}
        return pipelining.PipelineStage(nn.Sequential(*modules), index, count, batch[0].device, group=group)

    @property
    def loss(self) -> float | None:
        """The last step's, where this rank knows it."""
        return float(torch.stack(self._losses).detach().mean()) if self._losses else None

    def step(self) -> None:
        """Forward and backward of all micro-batches, from no gradients at all."""
        _clear_gradients(self.parameters)
        self._losses.clear()
        self._schedule.step(*self._arguments, **self._targets, return_outputs=False)


def _clear_gradients(parameters: Mapping[str, nn.Parameter]) -> None:
    for parameter in parameters.values():
        parameter.grad = None


# ── did they compute what they should? ──────────────────────────────────────────────────────────────────────────────
#
# A benchmark of wrong results is worth nothing. So every rank computes the loss and all gradients of the whole batch by
# itself, without stages and micro-batches. What each method's last step left must be the same but for rounding.

# Micro-batches are added up in another order than a whole batch: some millionths. What is left out, or counted twice,
# is a large part.
_TOLERANCE = 1e-3


class Computed(Protocol):
    """What a method's last step has left on this rank."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Those of this rank, by their names in the whole model."""

    @property
    def loss(self) -> float | None:
        """The mean over the batch, where this rank knows it."""


@dataclass(frozen=True)
class Apart:
    """How far loss and gradients are from those of a single process, each as a part of its size there."""

    loss: float
    gradient: float  # of the parameter that is furthest away
    parameter: str

    @property
    def problem(self) -> str | None:
        """What is wrong, if anything is."""
        if not self.loss <= _TOLERANCE:
            return f"its loss is {self.loss:.2g} of its size from that of a single process"
        if not self.gradient <= _TOLERANCE:
            return f"the gradient of {self.parameter} is {self.gradient:.2g} of its size from that of a single process"
        return None


class SingleProcess:
    """The loss and the gradients of the whole batch, computed without a pipeline."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        inputs, targets = batch
        model.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self._loss = float(loss.detach())
        self._gradients = {name: _gradient(parameter) for name, parameter in model.named_parameters()}
        model.zero_grad()

    def compare(self, computed: Computed, comms: Comms) -> Apart:
        """How far a method is from this; all ranks call it, and get the same."""
        not_here = -1.0
        found = [not_here] * len(self._gradients)
        for place, (name, expected) in enumerate(self._gradients.items()):
            if name in computed.parameters:
                found[place] = _part(_gradient(computed.parameters[name]) - expected, expected)
        loss = not_here if computed.loss is None else abs(computed.loss - self._loss) / abs(self._loss or 1.0)
        apart, *parts = (math.inf if part == not_here else part for part in largest(comms, [_finite(loss), *found]))
        furthest = max(range(len(parts)), key=lambda place: parts[place])
        return Apart(apart, parts[furthest], list(self._gradients)[furthest])


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return found.detach().clone()


def _part(difference: torch.Tensor, whole: torch.Tensor) -> float:
    apart, size = float(difference.double().norm()), float(whole.double().norm())
    return _finite(apart / size if size else apart)


def _finite(number: float) -> float:
    return number if math.isfinite(number) else math.inf
