"""What a benchmark of data parallelism trains: small models by name, each with a batch that says enough.

mlp-1024   16 layers of that width: few samples, many gradients, so communication is what costs
mlp-128    so small that starting operations and messages is what costs
gpt        attention and many tokens: computing is what costs
"""

from __future__ import annotations

import copy
import gc
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from microparallel.bench.all_reduce import gloo_for
from microparallel.bench.engine import (
    StepRounds,
    TimeBudget,
    count_ranks_here,
    largest,
    require_memory,
    transport_of,
    write_traces,
)
from microparallel.bench.settings import WIDEST, DataParallelSettings, Progress
from microparallel.comms import Comms
from microparallel.course.ddp import ddp_step, register_ddp_hooks
from microparallel.course.naive import naive_data_parallel_step
from microparallel.data_parallel import DataParallel, replicas_are_identical
from microparallel.errors import ConfigError
from microparallel.models import GPT, FullMLP
from microparallel.models.loss import mean_loss
from microparallel.text import count
from microparallel.topology import available_cores, available_memory

_DEPTH = 16
_CLASSES = 2
_VOCABULARY = 256
_CONTEXT = 64
HEAD = 32  # numbers of a vector that one attention head looks at
_BATCHES = {"mlp-512": 64, "gpt-128": 8}
_USUAL_BATCH = 32


@dataclass(frozen=True)
class Subject:
    """A model and how much it is given: `batch` is what one rank gets of samples."""

    name: str
    text: str  # for people: what it is made of
    batch: int
    build: Callable[[], nn.Module]  # from torch's random numbers
    data: Callable[[int], tuple[torch.Tensor, torch.Tensor]]  # so many inputs and targets

    def on_rank(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The samples of one rank, which are nobody else's."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 + rank)
            return self.data(self.batch)

    def model(self) -> nn.Module:
        """The same model on every rank."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.build()


def find_subject(name: str, batch: int | None = None) -> Subject:
    """The model that is called so: `mlp-WIDTH`, `gpt` or `gpt-WIDTH`."""
    found = re.fullmatch(r"(mlp|gpt)-([0-9]{1,5})", "gpt-128" if name == "gpt" else name)
    if found is None or not 1 <= int(found[2]) <= WIDEST:
        raise ConfigError(f"there is no model {name!r}; name it mlp-WIDTH, as in mlp-1024, or gpt, or gpt-WIDTH")
    width = int(found[2])
    samples = _BATCHES.get(found[0], _USUAL_BATCH if found[1] == "mlp" else _BATCHES["gpt-128"])
    return (_mlp if found[1] == "mlp" else gpt_subject)(name, width, samples if batch is None else batch)


def _mlp(name: str, width: int, batch: int) -> Subject:
    return Subject(
        name,
        f"{_DEPTH} layers of width {width}",
        batch,
        lambda: FullMLP(width, _DEPTH, out_features=_CLASSES),
        lambda samples: (torch.randn(samples, width), torch.randint(_CLASSES, (samples,))),
    )


def gpt_subject(name: str, width: int, batch: int, depth: int = 4) -> Subject:
    """A GPT with so many blocks."""
    if width % HEAD:
        raise ConfigError(
            f"{name}: a head takes {HEAD} numbers, so the width is a multiple of that; try gpt-{-(-width // 32) * 32}"
        )
    return Subject(
        name,
        f"{count(depth, 'block')} of width {width}, {_CONTEXT} tokens a sample",
        batch,
        lambda: GPT(_VOCABULARY, _CONTEXT, width, heads=width // HEAD, depth=depth),
        lambda samples: _next_tokens(torch.randint(_VOCABULARY, (samples, _CONTEXT + 1))),
    )


def _next_tokens(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def bytes_of(model: nn.Module) -> int:
    """What a model's parameters take of memory; its gradients take as much."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


# The methods that take turns in a benchmark of data parallelism: each trains a copy of its own of the same model.
#
# none              no synchronisation at all: each rank by itself, which nobody can be faster than
# naive             backward, then an all-reduce for each gradient
# hooks             an all-reduce for each gradient as soon as backward has made it
# buckets           the course's buckets: gradients are copied into them, and leave together
# ddp               mp.DataParallel, with buckets of several sizes
# torch-ddp         torch's DistributedDataParallel on gloo, with gradient_as_bucket_view=True
# torch-ddp on shm  the same on our backend, where ranks share memory


NONE, DDP, TORCH_DDP, TORCH_DDP_ON_SHM = "none", "ddp", "torch-ddp", "torch-ddp on shm"
LEARNING_RATE = 0.01

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Method:
    """A way to do a step; `bucket_cap_mb` where it has buckets of a size that can be chosen."""

    name: str
    bucket_cap_mb: float | None = None

    @property
    def label(self) -> str:
        """What it is called where all sizes stand side by side."""
        return self.name if self.bucket_cap_mb is None else f"{self.name}, {self.bucket_cap_mb:g} MB"

    @property
    def synchronises(self) -> bool:
        """Whether all ranks must end up with the same weights."""
        return self.name != NONE


class Contender:
    """A method at work on this rank: a copy of the model with an optimizer, and what leaves gradients in it."""

    def __init__(self, method: Method, model: nn.Module, batch: Batch, comms: Comms, gloo: dist.ProcessGroup) -> None:
        self.method = method
        self.model = copy.deepcopy(model)
        self.close: Callable[[], object] = lambda: None
        self._gradients = self._prepare(batch, comms, gloo)
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

    def _prepare(self, batch: Batch, comms: Comms, gloo: dist.ProcessGroup) -> Callable[[], object]:
        inputs, targets = batch
        samples = len(targets) * comms.world_size

        def backward(model: nn.Module) -> Callable[[], object]:
            return lambda: mean_loss(model, inputs, targets).backward()  # type: ignore[no-untyped-call]

        match self.method.name:
            case "none":
                return backward(self.model)
            case "naive":
                return lambda: naive_data_parallel_step(self.model, comms, inputs, targets, samples=samples)
            case "hooks" | "buckets" as name:
                self.close = register_ddp_hooks(self.model, comms, use_bucketing=name == "buckets").remove
                return lambda: ddp_step(self.model, comms, inputs, targets, samples=samples)
            case "ddp":
                return backward(DataParallel(self.model, comms, self.method.bucket_cap_mb or 25.0))
            case _:
                group = gloo if self.method.name == TORCH_DDP else comms.process_group
                return backward(DistributedDataParallel(self.model, process_group=group, gradient_as_bucket_view=True))


def methods_of(names: tuple[str, ...], buckets_mb: tuple[float, ...], gradient_bytes: int) -> list[Method]:
    """The named methods for a model with so many bytes of gradients, between what they are compared with.

    Buckets that hold the whole model are all alike, so only the smallest of those is tried.
    """
    methods = [Method(NONE)]
    for name in names:
        methods += [Method(name, size) for size in _different(buckets_mb, gradient_bytes)] if name == DDP else []
        methods += [Method(name)] if name != DDP else []
    return [*methods, Method(TORCH_DDP)]


def _different(buckets_mb: tuple[float, ...], gradient_bytes: int) -> list[float]:
    sizes = sorted(set(buckets_mb))
    whole = [size for size in sizes if size * 2**20 >= gradient_bytes]
    return [size for size in sizes if size not in whole[1:]]


# Did the methods that were timed train the model? A benchmark that measures a wrong result is worth nothing.
#
# All methods do the same steps from the same weights on the same samples. So those that synchronise must end at the
# same
# weights, but for rounding, and each must have the same ones on all ranks, bit for bit.
#
# start ─────────────────────────────── torch's DDP     how far it has come
# ╲ a method      how far from there: a tiny part of that


# Two orders of adding the same float32 numbers differ by some millionths of the way; a gradient that was left out, or
# averaged twice, by a large part of it.
_TOLERANCE = 1e-2


@dataclass(frozen=True)
class WrongWeights:
    """A method that did not train the model as torch's DistributedDataParallel does."""

    subject: str
    method: str
    problem: str


def differences(contenders: Sequence[Contender], start: nn.Module, comms: Comms) -> dict[Method, float]:
    """How far each method has ended from torch's DDP, as a part of the way that one has come; on the worst rank."""
    begun = _flat(start)
    end = next(_flat(one.model) for one in contenders if one.method.name == TORCH_DDP)
    way = float((end - begun).norm())
    found = []
    for contender in contenders:
        apart = float((_flat(contender.model) - end).norm())
        part = apart / way if way else math.nan
        found.append(part if math.isfinite(part) else math.inf)
    worst = largest(comms, found)
    return {one.method: part for one, part in zip(contenders, worst, strict=True)}


def find_wrong(
    subject: str, contenders: Sequence[Contender], apart: dict[Method, float], comms: Comms
) -> WrongWeights | None:
    """The first method with wrong weights; the same on every rank."""
    for contender in contenders:
        method = contender.method
        if not method.synchronises:
            continue
        if not replicas_are_identical(contender.model, comms):
            return WrongWeights(subject, method.label, "its ranks ended with different weights")
        if not apart[method] <= _TOLERANCE:
            problem = "its weights, or those of torch-ddp, are not finite"
            if math.isfinite(apart[method]):
                problem = f"it ended {apart[method]:.2g} of the way from where torch-ddp did"
            return WrongWeights(subject, method.label, problem)
    return None


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])


# Time a training step of every kind of data parallelism, torch's own among them, in one run: they take turns.


_COPIES = 3  # what a method needs at most, in models: weights, gradients, and buckets beside these


@dataclass(frozen=True)
class Timing:
    """The counted steps of one method and model, each with the time of the slowest rank."""

    method: Method
    seconds: tuple[float, ...]
    apart: float  # from torch's DDP at the end, as a part of the way that one has come


@dataclass(frozen=True)
class Result:
    """Everything about one model."""

    model: str
    text: str
    batch: int
    gradient_bytes: int
    steps: int  # of each method, those that were not counted too
    timings: tuple[Timing, ...]


@dataclass(frozen=True)
class Measurements:
    """Everything one run measured; it ends at the first wrong result."""

    ranks: int
    ranks_here: int  # on this machine
    cores: int
    transport: str
    device: str
    results: tuple[Result, ...]
    wrong: WrongWeights | None = None


def bench_data_parallel(
    comms: Comms, settings: DataParallelSettings, progress: Progress = lambda *_: None
) -> Measurements:
    """Measure all methods on all models; every rank calls this, and all get the same numbers."""
    subjects = [find_subject(name, settings.batch) for name in settings.models]
    results: list[Result] = []
    wrong = None
    left = settings.seconds
    with gloo_for(comms) as gloo:
        for index, subject in enumerate(subjects):
            # What one model leaves over is for those after it; what it overdraws is not all taken from them.
            share = max(left / (len(subjects) - index), settings.seconds / len(subjects) / 2)
            budget = TimeBudget(share, 1, settings.steps)

            def tell(part: float, steps: int, index: int = index, name: str = subject.name) -> None:
                progress((index + part) / len(subjects), name, steps)

            bench = _Bench(comms, settings, subject, gloo)
            bench.fill(budget, tell)
            result, wrong = bench.result()
            if settings.trace is not None:
                bench.record(settings.trace)
            results.append(result)
            left -= bench.spent
            bench.close()
            del bench
            gc.collect()  # modules and their hooks hold each other; the next model shall have the memory
            if wrong is not None:
                break
    return Measurements(
        comms.world_size,
        count_ranks_here(),
        available_cores(),
        transport_of(comms),
        comms.device.type,
        tuple(results),
        wrong,
    )


class _Bench:
    """All methods on one model."""

    def __init__(self, comms: Comms, settings: DataParallelSettings, subject: Subject, gloo: dist.ProcessGroup) -> None:
        self._comms = comms
        self._subject = subject
        self._start = subject.model().to(comms.device)
        self._gradient_bytes = bytes_of(self._start)
        methods = methods_of(settings.methods, settings.buckets_mb, self._gradient_bytes)
        _require_memory(comms, subject.name, len(methods), self._gradient_bytes)
        inputs, targets = subject.on_rank(comms.rank)
        batch = inputs.to(comms.device), targets.to(comms.device)
        self._contenders = [Contender(method, self._start, batch, comms, gloo) for method in methods]
        self._rounds = StepRounds(comms, self._contenders)

    @property
    def spent(self) -> float:
        """The seconds that all rounds took."""
        return self._rounds.spent

    def fill(self, budget: TimeBudget, tell: Callable[[float, int], None]) -> None:
        """Do rounds for as long as the budget allows."""
        self._rounds.fill(budget, tell)

    def result(self) -> tuple[Result, WrongWeights | None]:
        """What was measured, and a method whose weights are wrong."""
        apart = differences(self._contenders, self._start, self._comms)
        seconds = self._rounds.seconds
        timings = [Timing(one.method, tuple(seconds[one]), apart[one.method]) for one in self._contenders]
        subject, steps = self._subject, 2 * self._rounds.rounds
        result = Result(subject.name, subject.text, subject.batch, self._gradient_bytes, steps, tuple(timings))
        return result, find_wrong(subject.name, self._contenders, apart, self._comms)

    def record(self, folder: str) -> None:
        """Write a recorded step of each method."""
        steppers = {f"{self._subject.name} {one.method.label}": one for one in self._contenders}
        write_traces(self._comms, steppers, folder)

    def close(self) -> None:
        """Take the hooks off."""
        for contender in self._contenders:
            contender.close()


def _require_memory(comms: Comms, name: str, methods: int, model_bytes: int) -> None:
    need = count_ranks_here() * methods * _COPIES * model_bytes
    what, advice = (
        f"{name}: {methods} copies of it on every rank",
        "choose fewer --methods or --buckets, or a smaller model",
    )
    require_memory(comms, available_memory(), need, what, advice)
