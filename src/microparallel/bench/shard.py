"""Time a training step whose ranks keep parts of the optimizer's state and gradients, and count their memory and bytes.

Each method trains a copy of its own of the same model, with AdamW:

    none                no synchronisation at all: each rank by itself, so no method can be faster
    ddp                 mp.DataParallel: every rank keeps everything
    shard optimizer     mp.DataParallel(shard="optimizer") and mp.ShardedOptimizer
    shard gradients     mp.DataParallel(shard="gradients") and mp.ShardedOptimizer
    torch-zero          torch's DistributedDataParallel and ZeroRedundancyOptimizer on gloo, both with bucket views
    torch-zero on shm   the same on our backend, where ranks share memory

`none` and `torch-zero`, to which the others are compared, run twice: what lies between a method and itself is chance.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from microparallel.bench.data_parallel import Method, differences, find_wrong
from microparallel.bench.engine import (
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
from microparallel.bench.settings import Progress, ShardSettings
from microparallel.bench.subjects import Batch, Subject, bytes_of, find_subject, to_device
from microparallel.comms import Comms
from microparallel.comms.record import Recorder
from microparallel.data_parallel import DataParallel, ShardedOptimizer
from microparallel.data_parallel.sharding import GradientInParts
from microparallel.models.loss import mean_loss

NONE, DDP, OPTIMIZER, GRADIENTS = "none", "ddp", "shard optimizer", "shard gradients"
TORCH_ZERO, TORCH_ZERO_ON_SHM = "torch-zero", "torch-zero on shm"
AGAIN = ", again"  # the same method once more
LEARNING_RATE = 1e-3
_COPIES = 6  # what a method needs at most, in models: weights, gradients, two moments, and buckets beside these
_STEPS_COMPARED = 3  # later, rounding may have led Adam elsewhere


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, the one that has most: of the tensors themselves, padding included.

    Attributes:
        parameters: that the model has.
        gradients: the most there were at any time of a step: what is kept, buckets, and a gradient that has just come.
        optimizer: its state.
    """

    parameters: float
    gradients: float
    optimizer: float


@dataclass(frozen=True)
class Timing:
    """What was measured of one method and model."""

    method: Method
    seconds: tuple[float, ...]  # of the counted steps, each that of the slowest rank
    memory: Memory
    sent: float | None  # bytes of a step, by the rank that sent most; None for torch's own, which does not tell
    apart: float  # from torch-zero after three steps, as a part of the way that one has come


@dataclass(frozen=True)
class Result:
    """Everything about one model."""

    model: str
    text: str
    batch: int
    parameter_bytes: int
    accumulate: int
    timings: tuple[Timing, ...]


@dataclass(frozen=True)
class Measurements(Measured):
    """Everything one run measured; it ends at the first wrong result."""

    results: tuple[Result, ...]


def bench_shard(comms: Comms, settings: ShardSettings, progress: Progress = lambda *_: None) -> Measurements:
    """Measure all methods on all models; every rank calls this, and all get the same numbers."""
    results: list[Result] = []
    wrong = None
    with torch_group(comms) as group:
        for index, name in enumerate(settings.models):

            def of_all(part: float, steps: int, index: int = index, name: str = name) -> None:
                progress((index + part) / len(settings.models), name, steps)

            result, wrong = _bench_model(comms, settings, find_subject(name, settings.batch), group, of_all)
            results.append(result)
            gc.collect()  # modules and their hooks hold each other; the next model shall have the memory
            if wrong is not None:
                break
    return Measurements(*where(comms), tuple(results), wrong=wrong)


def _bench_model(
    comms: Comms,
    settings: ShardSettings,
    subject: Subject,
    group: dist.ProcessGroup,
    progress: Callable[[float, int], None],
) -> tuple[Result, Wrong | None]:
    """All methods on one model: what was measured, and a wrong result."""
    start = subject.model().to(comms.device)
    size = bytes_of(start)
    methods = methods_of(transport_of(comms))
    require_memory(
        comms,
        count_ranks_here() * len(methods) * _COPIES * size,
        f"{subject.name}: {len(methods)} copies of it on every rank",
        "choose a smaller model with --models",
    )
    batch = to_device(subject.on_rank(comms.rank), comms.device)
    replicas = [Replica(method, start, batch, comms, group, settings) for method in methods]
    for one in replicas:
        for _ in range(_STEPS_COMPARED):
            one.step()
    apart = differences(replicas, start, comms, TORCH_ZERO)
    rounds = step_rounds(comms, replicas)
    rounds.fill(TimeBudget(settings.seconds / len(settings.models), repeats=settings.steps), progress)
    timings = []
    for one in replicas:
        memory, sent = one.memory(comms), one.sent(comms)
        timings.append(Timing(one.method, tuple(rounds.seconds[one]), memory, sent, apart[one.method]))
    if settings.trace is not None:
        write_traces(comms, {f"{subject.name} {one.method.label}": one for one in replicas}, settings.trace)
    result = Result(subject.name, subject.text, subject.batch, size, settings.accumulate, tuple(timings))
    return result, find_wrong(subject.name, replicas, apart, comms, TORCH_ZERO)


def methods_of(transport: str) -> list[Method]:
    """Everything that can be measured where ranks talk through this transport."""
    ours = [NONE, DDP, OPTIMIZER, GRADIENTS, TORCH_ZERO]
    on_shm = [TORCH_ZERO_ON_SHM] if transport == "shm" else []
    return [Method(name) for name in (*ours, *on_shm, NONE + AGAIN, TORCH_ZERO + AGAIN)]


# ── methods ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Replica:
    """One method's copy of the model on this rank, with its optimizer.

    Args:
        method: what each rank keeps, and who does it.
        model: is copied.
        batch: inputs and targets of this rank.
        comms: the ranks.
        group: what torch's own talks through.
        settings: how many micro-batches there are, and how large buckets are.
    """

    def __init__(
        self,
        method: Method,
        model: nn.Module,
        batch: Batch,
        comms: Comms,
        group: dist.ProcessGroup,
        settings: ShardSettings,
    ) -> None:
        self.method = method
        self.model = copy.deepcopy(model)
        count = settings.accumulate
        self._microbatches = list(zip(*(part.tensor_split(count) for part in batch), strict=True))
        self._samples = len(batch[1])
        self._wrapped, self._optimizer = self._prepare(comms, group, settings.bucket_cap_mb)
        self._arrived = 0.0  # the most bytes of gradients that were there when one arrived

    def _prepare(
        self, comms: Comms, group: dist.ProcessGroup, bucket_cap_mb: float | None
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model as this method calls it, and its optimizer."""
        parameters = list(self.model.parameters())
        match self.method.name.removesuffix(AGAIN):
            case "none":
                return self.model, torch.optim.AdamW(parameters, lr=LEARNING_RATE)
            case "ddp":
                return DataParallel(self.model, comms, bucket_cap_mb), torch.optim.AdamW(parameters, lr=LEARNING_RATE)
            case "shard optimizer" | "shard gradients" as name:
                what: Any = name.removeprefix("shard ")
                wrapped = DataParallel(self.model, comms, bucket_cap_mb, shard=what)
                return wrapped, ShardedOptimizer(parameters, torch.optim.AdamW, comms, lr=LEARNING_RATE)
            case name:
                torchs = group if name == TORCH_ZERO else comms.process_group
                ddp = DistributedDataParallel(self.model, process_group=torchs, gradient_as_bucket_view=True)
                return ddp, ZeroRedundancyOptimizer(
                    parameters,
                    torch.optim.AdamW,
                    process_group=torchs,
                    parameters_as_bucket_view=True,
                    lr=LEARNING_RATE,
                )

    @property
    def alone(self) -> bool:
        """Whether no rank waits for another."""
        return not self.method.synchronises

    def step(self) -> None:
        """One step of training: forward and backward of each micro-batch, and the optimizer."""
        self._optimizer.zero_grad()
        for microbatch in self._microbatches[:-1]:
            with self._keeps_quiet():
                self._backward(*microbatch)
        self._backward(*self._microbatches[-1])
        self._optimizer.step()

    def _backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        loss = mean_loss(self._wrapped, inputs, targets) * (len(targets) / self._samples)
        loss.backward()  # type: ignore[no-untyped-call]

    def _keeps_quiet(self) -> AbstractContextManager[None]:
        """Around all micro-batches but the last: gradients add up, where the method does not sum them at once."""
        wrapped = self._wrapped
        if isinstance(wrapped, DistributedDataParallel):
            return wrapped.no_sync()
        return wrapped.no_sync() if isinstance(wrapped, DataParallel) and not wrapped.sums_at_once else nullcontext()

    # ── memory and bytes, in steps that are not timed ───────────────────────────────────────────────────────────

    def memory(self, comms: Comms) -> Memory:
        """Do a step and count what its tensors take; every rank calls this, and gets the numbers of the largest."""
        buckets = list(self._gradients_in_buckets())
        with self._watching_arrivals(buckets):
            self.step()
        gradients = max(self._arrived, covered([*buckets, *self._whole_gradients()]))
        optimizer = self._optimizer
        if isinstance(optimizer, ShardedOptimizer):
            of_kind = optimizer.memory()
        else:
            inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
            values = [value for state in inner.state.values() for value in state.values()]
            of_kind = {"optimizer": [value for value in values if isinstance(value, torch.Tensor)]}
        parameters = covered(map(span, [*self.model.parameters(), *of_kind.get("parameters", [])]))
        counted = [parameters, gradients, covered(map(span, of_kind["optimizer"]))]
        return Memory(*largest(comms, counted))

    def _whole_gradients(self) -> Iterator[Span]:
        for parameter in self.model.parameters():
            if parameter.grad is not None and not isinstance(parameter.grad, GradientInParts):
                yield span(parameter.grad)

    def _gradients_in_buckets(self) -> Iterator[Span]:
        """The memory that stays for gradients between two steps."""
        if isinstance(self._wrapped, DataParallel):
            yield from map(span, self._wrapped.gradient_memory())
        elif isinstance(self._wrapped, DistributedDataParallel):
            yield from self._whole_gradients()  # views of its buckets, since a step has been done

    @contextmanager
    def _watching_arrivals(self, buckets: Sequence[Span]) -> Iterator[None]:
        """In this block, count what there is of gradients whenever autograd has made one."""

        def arrives(gradient: torch.Tensor) -> None:
            there = covered([*buckets, *self._whole_gradients(), span(gradient)])
            self._arrived = max(self._arrived, there)

        self._arrived = 0.0
        hooks = [one.register_hook(arrives) for one in self.model.parameters()]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def sent(self, comms: Comms) -> float | None:
        """Record a step, and return the bytes that the rank sent that sent most; every rank calls this.

        What torch's own sends for one of its calls is not told, on gloo or on our backend.
        """
        if self.method.name.startswith(TORCH_ZERO):
            return None
        recorder = Recorder(comms)
        comms.barrier()
        recorder.start()
        try:
            self.step()
        finally:
            recorder.stop()
        trace = recorder.gather({})
        [most] = largest(comms, [sum(event.sent for event in trace.by_rank[comms.rank])])
        return most


# ── how many bytes tensors take ─────────────────────────────────────────────────────────────────────────────────────

Span = tuple[int, int]  # where a tensor begins in memory, and where it ends


def span(tensor: torch.Tensor) -> Span:
    """The addresses of a dense tensor."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def covered(spans: Iterable[Span]) -> float:
    """How many bytes lie in at least one of these spans: views of the same memory count once."""
    total, reached = 0, 0
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return float(total)
