"""What a benchmark of pipelines cuts into stages: layers that are all alike, so that stages can be.

mlp   a wide perceptron, whose last layer is as wide as all others
gpt   an embedding, blocks of attention, and a head
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from microparallel.bench.all_reduce import gloo_for
from microparallel.bench.data_parallel import HEAD, Subject, bytes_of, gpt_subject
from microparallel.bench.engine import (
    StepRounds,
    TimeBudget,
    count_ranks_here,
    largest,
    require_memory,
    transport_of,
    write_traces,
)
from microparallel.bench.pipeline_costs import Alone, SavedBytes, StageTimes, kinds_in
from microparallel.bench.settings import PipelineSettings, Progress, Size
from microparallel.comms import Comms
from microparallel.errors import ConfigError
from microparallel.models import FullMLP
from microparallel.models.loss import cross_entropy
from microparallel.pipeline import Pipeline
from microparallel.pipeline.programs import Schedule
from microparallel.program import peak_activations
from microparallel.text import count
from microparallel.topology import available_cores, available_memory
from microparallel.trace import Trace
from microparallel.trace.parts import Shares, shares


def pipeline_subject(size: Size) -> Subject:
    """The model of that name and size, with its batch."""
    depth, width, batch = size.filled
    if size.model == "gpt":
        if width % HEAD:
            nearest = -(-width // HEAD) * HEAD
            raise ConfigError(
                f"--width {width}: a head of gpt takes {HEAD} numbers, so it is a multiple; try {nearest}"
            )
        return gpt_subject("gpt", width, batch, depth)
    return Subject(
        "mlp",
        f"{count(depth, 'layer')} of width {width}",
        batch,
        lambda: FullMLP(width, depth, out_features=width),
        lambda samples: (torch.randn(samples, width), torch.randint(width, (samples,))),
    )


def require_cuttable(size: Size, schedules: Sequence[str], ranks: int, microbatches: int) -> None:
    """Refuse more micro-batches than samples, and more stages than layers."""
    batch = size.filled[2]
    if microbatches > batch:
        raise ConfigError(
            f"--microbatches {microbatches}: a batch of {batch} has too few samples for that; "
            f"try --batch {microbatches}, or --microbatches {batch}"
        )
    for name in schedules:
        stages = Schedule(name, ranks, microbatches).stages
        if stages > size.layers:
            raise ConfigError(
                f"--depth {size.filled[0]}: {name} on {ranks} ranks has {stages} stages, and this {size.model} "
                f"{size.layers} layers; try --depth {size.filled[0] + stages - size.layers}, fewer --ranks, or leave "
                f"{name} out with --schedules"
            )


def describe(subject: Subject, microbatches: int) -> str:
    """The model and how it is fed, for people."""
    return f"{subject.text}, {count(subject.batch, 'sample')} in {count(microbatches, 'micro-batch', 'es')}"


# What takes turns in a benchmark of pipelines: our schedules, each beside torch.distributed.pipelining's same one.
#
# | ours        | torch's                       | stages a rank |
# |-------------|-------------------------------|---------------|
# | naive       | –                             | 1             |
# | gpipe       | ScheduleGPipe                 | 1             |
# | 1f1b        | Schedule1F1B                  | 1             |
# | interleaved | ScheduleInterleaved1F1B       | 2             |
# | zb-h1       | ScheduleInterleavedZeroBubble | 1             |
# | zb-h2       | –                             | 1             |
# | zbv         | ScheduleZBVZeroBubble         | 2             |
# | dualpipev   | ScheduleDualPipeV             | 2             |
#
# Both have the same layers on the same ranks: torch's stages are copies of ours.


TORCH_S = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
_TAKES_ONE_STAGE = ("gpipe", "1f1b")  # all others take a list

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Method:
    """A schedule, run by us or by torch."""

    schedule: str
    by_torch: bool = False

    @property
    def label(self) -> str:
        """What it is called where it stands alone."""
        return f"torch's {TORCH_S[self.schedule]}" if self.by_torch else self.schedule


class Ours:
    """`mp.Pipeline` with one schedule, on a copy of the model."""

    alone = False

    def __init__(self, schedule: str, model: nn.Module, batch: Batch, microbatches: int, comms: Comms) -> None:
        self.method = Method(schedule)
        self.homes = tuple(Schedule(schedule, comms.world_size, microbatches).homes)  # the rank of each stage
        self.pipe = Pipeline(copy.deepcopy(model), comms, schedule, microbatches, loss_fn=cross_entropy)
        self.parameters = dict(self.pipe.named_parameters())  # those of this rank, by their names in the whole model
        self._batch = batch
        self._loss = torch.zeros(())

    @property
    def computes_together(self) -> bool:
        """Whether ranks compute at the same time: then they share caches, memory and perhaps cores."""
        return self.method.schedule != "naive"

    @property
    def loss(self) -> float | None:
        """The last step's, where this rank knows it."""
        return float(self._loss)

    def step(self) -> None:
        """Forward and backward of all micro-batches, from no gradients at all."""
        _forget_gradients(self.parameters)
        self._loss = self.pipe.step(*self._batch)

    def traced_step(self) -> Trace:
        """The same, and what every rank did when."""
        _forget_gradients(self.parameters)
        self._loss, trace = self.pipe.traced_step(*self._batch)
        return trace


_FOLDS_OVER_GLOO = "2.13"  # the first version that was seen to run a schedule folded into a V


class TorchRefuses(Exception):
    """torch's schedule cannot do what was asked for; the text says why."""


class Torchs:
    """torch's same schedule, on copies of the same stages.

    Args:
        ours: the pipeline whose stages are copied.
        batch: inputs and targets.
        microbatches: of the batch.
        group: what torch talks through.
    """

    alone = False

    def __init__(self, ours: Ours, batch: Batch, microbatches: int, group: dist.ProcessGroup) -> None:
        self.method = Method(ours.method.schedule, by_torch=True)
        self.parameters: dict[str, nn.Parameter] = {}
        self._arguments: tuple[torch.Tensor, ...] = ()
        self._targets: dict[str, Any] = {}
        self._losses: list[torch.Tensor] = []
        stages = [self._copy_of(index, ours, batch, group) for index in sorted(ours.pipe.stages)]
        schedule = getattr(pipelining, TORCH_S[self.method.schedule])
        given = stages[0] if self.method.schedule in _TAKES_ONE_STAGE else stages
        if len(stages) > 1 and ours.homes[0] == ours.homes[-1] and torch.__version__ < _FOLDS_OVER_GLOO:
            raise TorchRefuses(f"torch {torch.__version__} sends from a rank to itself here, which gloo cannot")
        try:
            self._schedule = schedule(given, microbatches, loss_fn=cross_entropy)
        except ValueError as error:
            raise TorchRefuses(str(error)) from error

    def _copy_of(self, index: int, ours: Ours, batch: Batch, group: dist.ProcessGroup) -> pipelining.PipelineStage:
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
        _forget_gradients(self.parameters)
        self._losses.clear()
        self._schedule.step(*self._arguments, **self._targets, return_outputs=False)


def _forget_gradients(parameters: Mapping[str, nn.Parameter]) -> None:
    for parameter in parameters.values():
        parameter.grad = None


# Did the schedules that were timed compute what they should? A benchmark of wrong results is worth nothing.
#
# Every rank computes the loss and all gradients of the whole batch by itself, without stages and micro-batches. What
# each
# method's last step left must be the same but for rounding.


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
        nobody_s = -1.0
        found = [nobody_s] * len(self._gradients)
        for place, (name, expected) in enumerate(self._gradients.items()):
            if name in computed.parameters:
                found[place] = _part(_gradient(computed.parameters[name]) - expected, expected)
        loss = nobody_s if computed.loss is None else abs(computed.loss - self._loss) / abs(self._loss or 1.0)
        apart, *parts = (math.inf if part == nobody_s else part for part in largest(comms, [_finite(loss), *found]))
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


# Time a step of every pipeline schedule beside torch's same one, and measure what it could be at best, in one run.
#
# All of them take turns step by step, and so do the computations by themselves (`pipeline_bench_costs`). After some of
# the turns a step is traced: what each rank did when. In the end one step more is watched for its memory.


_TRACED = 5  # steps of each schedule
_COPIES = 2  # what a method needs at most, in models: weights and gradients


@dataclass(frozen=True)
class Timing:
    """The counted steps of one method, each with the time of the slowest rank; and what else was seen of it."""

    method: Method
    seconds: tuple[float, ...]
    saved_bytes: tuple[int, ...]  # for backward: the most at once, of each rank
    apart: Apart


@dataclass(frozen=True)
class Look:
    """What traced steps of one of our schedules showed."""

    bubble: float  # the share of a step that even the busiest rank does not compute; the median
    shares: tuple[Shares, ...]  # of each rank; the means
    activations: tuple[int, ...]  # the most at once, of each rank
    activations_of_program: tuple[int, ...]
    stage_times: StageTimes  # of its cut


@dataclass(frozen=True)
class Wrong:
    """A method that did not compute what a single process does."""

    method: str
    problem: str


@dataclass(frozen=True)
class Measurements:
    """Everything one run measured; it is the same on every rank."""

    ranks: int
    ranks_here: int  # on this machine
    cores: int
    transport: str
    device: str
    model: str
    text: str  # what is trained, for people
    microbatches: int
    timings: tuple[Timing, ...]
    looks: dict[str, Look]  # by schedule
    refused: dict[str, str]  # what torch would not do, by schedule
    wrong: Wrong | None = None


def bench_pipelines(comms: Comms, settings: PipelineSettings, progress: Progress = lambda *_: None) -> Measurements:
    """Measure all schedules; every rank calls this, and all get the same numbers."""
    subject = pipeline_subject(settings)
    with gloo_for(comms) as group:
        bench = _Bench(comms, settings, group)
        budget = TimeBudget(settings.seconds, 1, settings.steps)
        bench.rounds.fill(budget, lambda part, steps: progress(part, subject.name, steps))
        timings = bench.timings()
        looks = bench.looks()
        if settings.trace is not None:
            bench.record(settings.trace)
    wrong = [Wrong(timing.method.label, problem) for timing in timings if (problem := timing.apart.problem)]
    return Measurements(
        comms.world_size,
        count_ranks_here(),
        available_cores(),
        transport_of(comms),
        comms.device.type,
        subject.name,
        describe(subject, settings.microbatches),
        settings.microbatches,
        timings,
        looks,
        bench.refused,
        wrong[0] if wrong else None,
    )


class _Bench:
    """All methods on one model."""

    def __init__(self, comms: Comms, settings: PipelineSettings, group: dist.ProcessGroup) -> None:
        subject = pipeline_subject(settings)
        model = subject.model().to(comms.device)
        _require_memory(comms, len(settings.schedules), bytes_of(model))
        inputs, targets = subject.on_rank(0)  # all ranks work on the same samples
        batch = inputs.to(comms.device), targets.to(comms.device)
        count = settings.microbatches
        self._comms = comms
        self._single = SingleProcess(model, batch)
        self.refused: dict[str, str] = {}
        self._ours = [Ours(name, model, batch, count, comms) for name in settings.schedules]
        self._torchs: list[Torchs] = []
        for ours in self._ours if settings.with_torch else ():
            self._add_torchs(ours, batch, count, group)
        self._alone = {
            cut: Alone(same[0], kinds_in(ours.pipe.program for ours in same), model, batch, count)
            for cut, same in _by_cut(self._ours).items()
        }
        self._traces: dict[Ours, list[Trace]] = {ours: [] for ours in self._ours}
        steppers: list[Ours | Torchs | Alone] = [*self._ours, *self._torchs, *self._alone.values()]
        self.rounds = StepRounds(comms, steppers, self._after_turn)

    def _add_torchs(self, ours: Ours, batch: Batch, count: int, group: dist.ProcessGroup) -> None:
        schedule = ours.method.schedule
        if schedule not in TORCH_S:
            return
        if len(batch[0]) % count:
            self.refused[schedule] = "its micro-batches must be of one size, and these are not"
            return
        if self._comms.device.type == "cuda" and transport_of(self._comms) != "nccl":
            self.refused[schedule] = "between GPUs it needs nccl, and gloo sends from main memory alone"
            return
        try:
            self._torchs.append(Torchs(ours, batch, count, group))
        except TorchRefuses as error:
            self.refused[schedule] = str(error)

    def _after_turn(self, stepper: Ours | Torchs | Alone) -> None:
        if isinstance(stepper, Alone):
            stepper.keep()
        elif isinstance(stepper, Ours) and len(self._traces[stepper]) < _TRACED:
            self._traces[stepper].append(stepper.traced_step())

    def timings(self) -> tuple[Timing, ...]:
        """What was measured of each method, torch's after ours."""
        contenders: list[Ours | Torchs] = [*self._ours, *self._torchs]
        return tuple(self._timing(contender) for contender in contenders)

    def record(self, folder: str) -> None:
        """Write a recorded step of each method."""
        contenders: list[Ours | Torchs] = [*self._ours, *self._torchs]
        write_traces(self._comms, {one.method.label: one for one in contenders}, folder)

    def _timing(self, contender: Ours | Torchs) -> Timing:
        apart = self._single.compare(contender, self._comms)  # what a timed step left
        with SavedBytes(contender.parameters.values()) as saved:
            contender.step()
        seconds = tuple(self.rounds.seconds[contender])
        return Timing(contender.method, seconds, self._of_each_rank(saved.most), apart)

    def looks(self) -> dict[str, Look]:
        """What was seen in the traces of our schedules."""
        times = {cut: alone.stage_times() for cut, alone in self._alone.items()}
        found = {}
        for ours, traces in self._traces.items():
            found[ours.method.schedule] = Look(
                statistics.median(trace.bubble_fraction for trace in traces),
                _means([shares(trace) for trace in traces]),
                self._of_each_rank(ours.pipe.most_activations),
                tuple(peak_activations(ops) for ops in ours.pipe.program.ranks),
                times[_cut(ours)],
            )
        return found

    def _of_each_rank(self, number: int) -> tuple[int, ...]:
        mine = [number if rank == self._comms.rank else 0 for rank in range(self._comms.world_size)]
        return tuple(int(one) for one in largest(self._comms, mine))


_Cut = tuple[tuple[int, ...], bool]  # the rank of each stage, and whether ranks compute at the same time


def _cut(ours: Ours) -> _Cut:
    return ours.homes, ours.computes_together


def _by_cut(all_of_ours: Sequence[Ours]) -> dict[_Cut, list[Ours]]:
    cuts: dict[_Cut, list[Ours]] = {}
    for ours in all_of_ours:
        cuts.setdefault(_cut(ours), []).append(ours)
    return cuts


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


def _require_memory(comms: Comms, schedules: int, model_bytes: int) -> None:
    # All ranks together hold each schedule's model once, ours, torch's and for the computations alone; while a
    # pipeline is built, every rank holds the whole model twice.
    need = (3 * schedules + 2 * count_ranks_here()) * _COPIES * model_bytes
    what, advice = f"{schedules} schedules of this model", "choose fewer --schedules, or a smaller --width or --depth"
    require_memory(comms, available_memory(), need, what, advice)
