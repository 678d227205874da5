"""Time a step of every pipeline schedule beside torch's same one, and measure what it could be at best, in one run.

All of them take turns step by step, and so do the computations by themselves (`pipeline_bench_costs`). After some of
the turns a step is traced: what each rank did when. In the end one step more is watched for its memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from microparallel.comms import Comms
from microparallel.performance.bench_settings import PipelineSettings, Progress
from microparallel.performance.case import transport_of
from microparallel.performance.caveats import count_ranks_here
from microparallel.performance.data_parallel_bench_models import bytes_of
from microparallel.performance.memory_budget import require_memory
from microparallel.performance.methods import gloo_for
from microparallel.performance.pipeline_bench_check import Apart, SingleProcess
from microparallel.performance.pipeline_bench_costs import Alone, StageTimes, kinds_in
from microparallel.performance.pipeline_bench_memory import SavedBytes
from microparallel.performance.pipeline_bench_methods import TORCH_S, Batch, Method, Ours, TorchRefuses, Torchs
from microparallel.performance.pipeline_bench_models import describe, pipeline_subject
from microparallel.performance.rounds import largest
from microparallel.performance.step_rounds import StepRounds, write_traces
from microparallel.performance.time_budget import TimeBudget
from microparallel.performance.utilisation import Shares, shares
from microparallel.program import peak_activations
from microparallel.topology import available_cores, available_memory
from microparallel.trace import Trace

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
