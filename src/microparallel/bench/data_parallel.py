"""Time a training step of every kind of data parallelism, torch's own among them, in one run: they take turns.

Each method trains a copy of its own of the same model:

    none              no synchronisation at all: each rank by itself, so no method can be faster
    naive             backward, then an all-reduce for each gradient
    hooks             an all-reduce for each gradient as soon as backward has made it
    buckets           the course's buckets: gradients are copied into them, and leave together
    ddp               mp.DataParallel as it is by default (gradients that are kept stay), with buckets of several sizes
    torch-ddp         torch's DistributedDataParallel on gloo, with gradient_as_bucket_view=True
    torch-ddp on shm  the same on our backend, where ranks share memory
    torch-ddp on cuda the same where ranks share a GPU; there, ddp and torch-ddp are measured twice: what lies between
                      a method and itself is chance
"""

from __future__ import annotations

import copy
import gc
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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
from microparallel.bench.settings import DataParallelSettings, Progress
from microparallel.bench.subjects import Batch, Subject, bytes_of, find_subject, to_device
from microparallel.comms import Comms
from microparallel.course.ddp import ddp_step, register_ddp_hooks
from microparallel.course.naive import naive_data_parallel_step
from microparallel.data_parallel import DataParallel, replicas_are_identical
from microparallel.models.loss import mean_loss

NONE, DDP, TORCH_DDP, TORCH_DDP_ON_SHM = "none", "ddp", "torch-ddp", "torch-ddp on shm"
LEARNING_RATE = 0.01
_COPIES = 3  # what a method needs at most, in models: weights, gradients, and buckets beside these


@dataclass(frozen=True)
class Method:
    """A way to do a step; `bucket_cap_mb` where it has buckets of a size that can be chosen."""

    name: str
    bucket_cap_mb: float | None = None

    @property
    def label(self) -> str:
        """Its name in the table, where all sizes stand side by side."""
        if self.bucket_cap_mb is None:
            return self.name
        name = self.name.removesuffix(AGAIN)
        return f"{name}, {self.bucket_cap_mb:g} MB{self.name.removeprefix(name)}"

    @property
    def synchronises(self) -> bool:
        """Whether all ranks must end up with the same weights."""
        return not self.name.startswith(NONE)


@dataclass(frozen=True)
class Timing:
    """The counted steps of one method and model, each with the time of the slowest rank."""

    method: Method
    seconds: tuple[float, ...]
    apart: float  # from torch's DDP at the end, as a part of the way that one has come
    use: GpuUse | None = None  # what it takes of the GPU


@dataclass(frozen=True)
class Result:
    """Everything about one model."""

    model: str
    text: str
    batch: int
    gradient_bytes: int
    steps: int  # of each method, those that were not counted too
    timings: tuple[Timing, ...]
    in_float64: tuple[str, ...] = ()  # methods that rounding led elsewhere: these were compared without it


@dataclass(frozen=True)
class Measurements(Measured):
    """Everything one run measured; it ends at the first wrong result."""

    results: tuple[Result, ...]


def bench_data_parallel(
    comms: Comms, settings: DataParallelSettings, progress: Progress = lambda *_: None
) -> Measurements:
    """Measure all methods on all models; every rank calls this, and all get the same numbers."""
    subjects = [find_subject(name, settings.batch) for name in settings.models]
    results: list[Result] = []
    wrong = None
    left = settings.seconds
    with torch_group(comms) as group:
        for index, subject in enumerate(subjects):
            # What one model leaves over is for those after it; what it overdraws is not all taken from them.
            share = max(left / (len(subjects) - index), settings.seconds / len(subjects) / 2)

            def of_all(part: float, steps: int, index: int = index, name: str = subject.name) -> None:
                progress((index + part) / len(subjects), name, steps)

            result, wrong, spent = _bench_model(comms, settings, subject, group, share, of_all)
            results.append(result)
            left -= spent
            gc.collect()  # modules and their hooks hold each other; the next model shall have the memory
            if wrong is not None:
                break
        gpu = gpu_of(comms)
    return Measurements(*where(comms), tuple(results), wrong=wrong, dtype_of_model=settings.dtype, gpu=gpu)


def _bench_model(
    comms: Comms,
    settings: DataParallelSettings,
    subject: Subject,
    group: dist.ProcessGroup,
    seconds: float,
    progress: Callable[[float, int], None],
) -> tuple[Result, Wrong | None, float]:
    """All methods on one model: what was measured, a wrong result, and how many seconds it took."""
    dtype: torch.dtype = getattr(torch, settings.dtype)
    start = subject.model().to(comms.device, dtype)
    size = bytes_of(start)
    methods = methods_of(settings.methods, settings.buckets_mb, size, twice=transport_of(comms) == "cuda")
    require_memory(
        comms,
        count_ranks_here() * len(methods) * _COPIES * size,
        f"{subject.name}: {len(methods)} copies of it on every rank",
        "choose fewer --methods or --buckets, or a smaller model",
    )
    batch = to_device(subject.on_rank(comms.rank), comms.device, dtype)
    replicas = [Replica(method, start, batch, comms, group) for method in methods]
    rounds = step_rounds(comms, replicas)
    rounds.fill(TimeBudget(seconds, repeats=settings.steps), progress)
    apart, again = without_rounding(
        differences(replicas, start, comms),
        start,
        batch,
        comms,
        TORCH_DDP,
        lambda method, model, samples: Replica(method, model, samples, comms, group),
    )
    wrong = find_wrong(subject.name, replicas, apart, comms)
    if settings.trace is not None:
        write_traces(comms, {f"{subject.name} {one.method.label}": one for one in replicas}, settings.trace)
    for one in replicas:
        one.close()
    seconds_of = {one.method: tuple(rounds.seconds[one]) for one in replicas}
    steps, spent = 2 * rounds.rounds, rounds.spent
    del one, replicas, rounds  # where memory is counted, each method is alone

    def use(method: Method) -> GpuUse | None:
        if method.name.endswith(AGAIN):
            return None
        seconds = statistics.median(seconds_of[method])
        return use_of(comms, lambda: Replica(method, start, batch, comms, group), seconds)

    timings = [Timing(method, seconds_of[method], apart[method], use(method)) for method in methods]
    result = Result(subject.name, subject.text, subject.batch, size, steps, tuple(timings), again)
    return result, wrong, spent


# ── methods ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Replica:
    """One method's copy of the model on this rank, with its optimizer.

    Args:
        method: how ranks average the gradients.
        model: is copied.
        batch: inputs and targets of this rank.
        comms: the ranks.
        group: what torch's own talks through.
    """

    def __init__(self, method: Method, model: nn.Module, batch: Batch, comms: Comms, group: dist.ProcessGroup) -> None:
        self.method = method
        self.model = copy.deepcopy(model)
        self.close: Callable[[], object] = lambda: None  # takes the hooks off the model
        self._gradients = self._prepare(batch, comms, group)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)

    @property
    def alone(self) -> bool:
        """Whether no rank waits for another."""
        return not self.method.synchronises

    def step(self) -> None:
        """One step of training: forward, backward, and the optimizer."""
        self._optimizer.zero_grad()
        self._gradients()
        self._optimizer.step()

    def _prepare(self, batch: Batch, comms: Comms, group: dist.ProcessGroup) -> Callable[[], object]:
        """What does forward and backward, and leaves this method's gradients in the model."""
        inputs, targets = batch
        samples = len(targets) * comms.world_size

        def backward(model: nn.Module) -> Callable[[], object]:
            return lambda: mean_loss(model, inputs, targets).backward()  # type: ignore[no-untyped-call]

        match self.method.name.removesuffix(AGAIN):
            case "none":
                return backward(self.model)
            case "naive":
                return lambda: naive_data_parallel_step(self.model, comms, inputs, targets, samples=samples)
            case "hooks" | "buckets" as name:
                self.close = register_ddp_hooks(self.model, comms, use_bucketing=name == "buckets").remove
                return lambda: ddp_step(self.model, comms, inputs, targets, samples=samples)
            case "ddp":
                return backward(DataParallel(self.model, comms, self.method.bucket_cap_mb or 25.0))
            case name:
                torchs = group if name == TORCH_DDP else comms.process_group
                return backward(DistributedDataParallel(self.model, process_group=torchs, gradient_as_bucket_view=True))


def methods_of(
    names: tuple[str, ...], buckets_mb: tuple[float, ...], gradient_bytes: int, *, twice: bool = False
) -> list[Method]:
    """The named methods for a model with so many bytes of gradients, between what they are compared with.

    Buckets that hold the whole model are all alike, so only the smallest of those is tried. With `twice`, ddp and
    torch-ddp are there once more.
    """
    methods = [Method(NONE)]
    for name in names:
        sizes = _different(buckets_mb, gradient_bytes) if name == DDP else [None]
        methods += [Method(name, size) for size in sizes]
    again = [next(one for one in methods if one.name == DDP)] if twice and DDP in names else []
    return [
        *methods,
        Method(TORCH_DDP),
        *(Method(one.name + AGAIN, one.bucket_cap_mb) for one in again),
        *([Method(TORCH_DDP + AGAIN)] if twice else []),
    ]


def _different(buckets_mb: tuple[float, ...], gradient_bytes: int) -> list[float]:
    sizes = sorted(set(buckets_mb))
    whole = [size for size in sizes if size * 2**20 >= gradient_bytes]
    return [size for size in sizes if size not in whole[1:]]


# ── did they train the model? ───────────────────────────────────────────────────────────────────────────────────────
#
# All methods do the same steps from the same weights on the same samples. So those that synchronise must end at the
# same weights, but for rounding, and each must have the same ones on all ranks, bit for bit.
#
#     start ─────────────────────────────── torch's DDP     how far it has come
#                                         ╲ a method        how far from there: a tiny part of that

# Two orders of adding the same float32 numbers differ by some millionths of the way; a gradient that was left out, or
# averaged twice, by a large part of it. But rounding can also push a ReLU over its edge, or turn the sign of a gradient
# that is almost nothing, which Adam makes a whole step of; then the ways part. So what is further apart is done again
# in float64, where this does not happen within a few steps, and a wrong sum is as wrong as before.
_TOLERANCE = 1e-2
_STEPS_IN_FLOAT64 = 3


class Trained(Protocol):
    """A copy of a model that was trained by a method."""

    method: Method

    @property
    def model(self) -> nn.Module:
        """The plain model, whole."""


class Stepping(Trained, Protocol):
    """One that can be trained further."""

    def step(self) -> None:
        """One step of training."""


def differences(
    replicas: Sequence[Trained], start: nn.Module, comms: Comms, reference: str = TORCH_DDP
) -> dict[Method, float]:
    """How far each method has ended from the reference, as a part of the way that one has come; on the worst rank."""
    begun = _flat(start)
    end = next(_flat(one.model) for one in replicas if one.method.name == reference)
    way = float((end - begun).norm())
    found = []
    for replica in replicas:
        apart = float((_flat(replica.model) - end).norm())
        part = apart / way if way else math.nan
        found.append(part if math.isfinite(part) else math.inf)
    worst = largest(comms, found)
    return {one.method: part for one, part in zip(replicas, worst, strict=True)}


def without_rounding(
    apart: dict[Method, float],
    start: nn.Module,
    batch: Batch,
    comms: Comms,
    reference: str,
    make: Callable[[Method, nn.Module, Batch], Stepping],
) -> tuple[dict[Method, float], tuple[str, ...]]:
    """Do a few steps in float64 with each method that is too far apart; every rank calls this.

    Args:
        apart: what `differences` has found.
        start: the model that all began with.
        batch: inputs and targets of this rank.
        comms: the ranks.
        reference: the name of the method that is right.
        make: makes a method's copy of a model, on these inputs and targets.

    Returns:
        How far apart they are, without rounding where that was needed; and which those were.
    """
    suspects = [method for method, part in apart.items() if method.synchronises and _TOLERANCE < part < math.inf]
    if not suspects:
        return apart, ()
    exact = copy.deepcopy(start).double()
    inputs, targets = (part.double() if part.is_floating_point() else part for part in batch)
    right = next(method for method in apart if method.name == reference)
    copies = [make(method, exact, (inputs, targets)) for method in (*suspects, right)]
    for one in copies:
        for _ in range(_STEPS_IN_FLOAT64):
            one.step()
    found = differences(copies, exact, comms, reference)
    return apart | {method: found[method] for method in suspects}, tuple(method.label for method in suspects)


def find_wrong(
    subject: str, replicas: Sequence[Trained], apart: dict[Method, float], comms: Comms, reference: str = TORCH_DDP
) -> Wrong | None:
    """The first method with wrong weights; the same on every rank."""
    for replica in replicas:
        method = replica.method
        if not method.synchronises:
            continue
        problem = ""
        if not replicas_are_identical(replica.model, comms):
            problem = "its ranks ended with different weights"
        elif not math.isfinite(apart[method]):
            problem = f"its weights, or those of {reference}, are not finite"
        elif apart[method] > _TOLERANCE:
            problem = f"it ended {apart[method]:.2g} of the way from where {reference} did"
        if problem:
            return Wrong(method.label, f"trained {subject} wrongly: {problem}")
    return None


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])
