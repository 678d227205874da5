"""Time a training step whose ranks keep parts of the model's state, and count their memory and bytes.

Each method trains a copy of its own of the same model, with AdamW:

    none                    no synchronisation at all: each rank by itself, so no method can be faster
    ddp                     mp.DataParallel: every rank keeps everything
    shard optimizer         mp.DataParallel(shard="optimizer") and mp.ShardedOptimizer
    shard gradients         mp.DataParallel(shard="gradients") and mp.ShardedOptimizer
    shard parameters        mp.FullyShardedDataParallel
    shard parameters, kept  the same with reshard_after_forward=False: no unit is gathered twice
    torch-zero              torch's DistributedDataParallel and ZeroRedundancyOptimizer on gloo, both with bucket views
    torch-zero on shm       the same on our backend, where ranks share memory
    torch-fsdp              torch's fully_shard (FSDP2) on gloo, with the units of `shard parameters`
    torch-fsdp on shm       the same on our backend

Where ranks share a GPU, our backend is called "on cuda". What torch refuses to do there on gloo is left out, and named.

`none`, `torch-zero` and `torch-fsdp`, to which the others are compared, run twice: what lies between a method and
itself is chance.
"""

from __future__ import annotations

import copy
import gc
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from microparallel.bench.data_parallel import Method, differences, find_wrong, without_rounding
from microparallel.bench.engine import (
    AGAIN,
    Measured,
    TimeBudget,
    Wrong,
    count_ranks_here,
    has_gloo_beside,
    largest,
    require_memory,
    step_rounds,
    torch_group,
    transport_of,
    where,
    write_traces,
)
from microparallel.bench.gpu_use import GpuUse, gpu_of, use_of
from microparallel.bench.settings import Progress, ShardSettings
from microparallel.bench.shard_memory import Watch, covered, own_part, span
from microparallel.bench.subjects import Batch, Subject, bytes_of, find_subject, to_device
from microparallel.comms import Comms
from microparallel.comms.record import Recorder
from microparallel.data_parallel import DataParallel, FullyShardedDataParallel, ShardedOptimizer
from microparallel.data_parallel.units import unit_modules
from microparallel.models.loss import mean_loss
from microparallel.trace import Trace
from microparallel.trace.parts import Parts, parts

NONE, DDP, OPTIMIZER, GRADIENTS = "none", "ddp", "shard optimizer", "shard gradients"
PARAMETERS, PARAMETERS_KEPT = "shard parameters", "shard parameters, kept"
TORCH_ZERO, TORCH_ZERO_ON_SHM = "torch-zero", "torch-zero on shm"
TORCH_FSDP, TORCH_FSDP_ON_SHM = "torch-fsdp", "torch-fsdp on shm"
ON_SHM, ON_CUDA = " on shm", " on cuda"  # our backend beneath torch's own, by the transport
LEARNING_RATE = 1e-3
PREFETCH = 1  # units ahead, of `shard parameters`
_COPIES = 6  # what a method needs at most, in models: weights, gradients, two moments, and buckets beside these
_STEPS_COMPARED = 3  # later, rounding may have led Adam elsewhere
_STEPS_RECORDED = 3


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, the one that has most: of the tensors themselves, padding included.

    Attributes:
        parameters: the most there were at any time of a step: the rank's own, and what was gathered.
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
    parts: Parts | None  # where a recorded step's time went, as the mean over the ranks; None for torch's own
    apart: float  # from torch-zero after three steps, as a part of the way that one has come
    use: GpuUse | None = None  # what it takes of the GPU


@dataclass(frozen=True)
class Result:
    """Everything about one model; `units` are the bytes that are gathered together, in the order of their use."""

    model: str
    text: str
    batch: int
    parameter_bytes: int
    units: tuple[int, ...]
    accumulate: int
    timings: tuple[Timing, ...]
    in_float64: tuple[str, ...] = ()  # methods that rounding led elsewhere: these were compared without it
    refused: tuple[str, ...] = ()  # what torch would not do, and why


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
        gpu = gpu_of(comms)
    return Measurements(*where(comms), tuple(results), wrong=wrong, dtype_of_model=settings.dtype, gpu=gpu)


def _bench_model(
    comms: Comms,
    settings: ShardSettings,
    subject: Subject,
    group: dist.ProcessGroup,
    progress: Callable[[float, int], None],
) -> tuple[Result, Wrong | None]:
    """All methods on one model: what was measured, and a wrong result."""
    dtype: torch.dtype = getattr(torch, settings.dtype)
    start = subject.model().to(comms.device, dtype)
    size = bytes_of(start)
    methods = methods_of(transport_of(comms))
    require_memory(
        comms,
        count_ranks_here() * len(methods) * _COPIES * size,
        f"{subject.name}: {len(methods)} copies of it on every rank",
        "choose a smaller model with --models",
    )
    batch = to_device(subject.on_rank(comms.rank), comms.device, dtype)
    replicas: list[Replica] = []
    refused: dict[Method, str] = {}
    for method in methods:
        replica, reason = _begin(method, start, batch, comms, group, settings)
        if replica is None:
            refused[method] = reason
        else:
            replicas.append(replica)
    apart, again = without_rounding(
        differences(replicas, start, comms, TORCH_ZERO),
        start,
        batch,
        comms,
        TORCH_ZERO,
        lambda method, model, samples: Replica(method, model, samples, comms, group, settings),
    )
    rounds = step_rounds(comms, replicas)
    rounds.fill(TimeBudget(settings.seconds / len(settings.models), repeats=settings.steps), progress)
    timings = []
    for one in replicas:
        memory, (sent, spent) = one.memory(comms), one.recorded(comms)
        timings.append(Timing(one.method, tuple(rounds.seconds[one]), memory, sent, spent, apart[one.method]))
    if settings.trace is not None:
        write_traces(comms, {f"{subject.name} {one.method.label}": one for one in replicas}, settings.trace)
    wrong = find_wrong(subject.name, replicas, apart, comms, TORCH_ZERO)
    del one, replica, replicas, rounds  # where a GPU's memory is counted, each method is alone
    timings = [_with_use(one, start, batch, comms, group, settings) for one in timings]
    units = tuple(_bytes_of_units(start))
    result = Result(
        subject.name,
        subject.text,
        subject.batch,
        size,
        units,
        settings.accumulate,
        tuple(timings),
        again,
        tuple(f"{method.label}: {reason}" for method, reason in refused.items() if not method.name.endswith(AGAIN)),
    )
    return result, wrong


def _begin(
    method: Method,
    start: nn.Module,
    batch: Batch,
    comms: Comms,
    group: dist.ProcessGroup,
    settings: ShardSettings,
) -> tuple[Replica | None, str]:
    """A method that has done its first steps; or, where torch refuses them on a GPU, why. All ranks call this."""
    may_refuse = comms.device.type == "cuda" and method.name.removesuffix(AGAIN) == TORCH_FSDP
    replica, problem = None, ""
    try:
        replica = Replica(method, start, batch, comms, group, settings)
        for _ in range(_STEPS_COMPARED):
            replica.step()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if not may_refuse:
            raise
        problem = str(error).partition("\n")[0] or type(error).__name__
    if may_refuse and largest(comms, [float(bool(problem))])[0]:
        return None, problem or "another rank was refused"
    return replica, ""


def _with_use(
    timing: Timing, start: nn.Module, batch: Batch, comms: Comms, group: dist.ProcessGroup, settings: ShardSettings
) -> Timing:
    """The same, with what the method takes of the GPU."""
    if timing.method.name.endswith(AGAIN):
        return timing
    seconds = statistics.median(timing.seconds)
    use = use_of(comms, lambda: Replica(timing.method, start, batch, comms, group, settings), seconds)
    return replace(timing, use=use)


def methods_of(transport: str) -> list[Method]:
    """Everything that can be measured where ranks talk through this transport."""
    ours = [NONE, DDP, OPTIMIZER, GRADIENTS, PARAMETERS, PARAMETERS_KEPT]
    zero, fsdp = [TORCH_ZERO, TORCH_ZERO_ON_SHM], [TORCH_FSDP, TORCH_FSDP_ON_SHM]
    torchs = [*zero, *fsdp] if has_gloo_beside(transport) else [TORCH_ZERO, TORCH_FSDP]
    if transport == "cuda":
        torchs = [name.replace(ON_SHM, ON_CUDA) for name in torchs]
    again = [name + AGAIN for name in (NONE, TORCH_ZERO, TORCH_FSDP)]
    return [Method(name) for name in (*ours, *torchs, *again)]


def plain_name(method: str) -> str:
    """A method's name, whether it runs once more or not, on whatever transport of ours."""
    return method.removesuffix(AGAIN).replace(ON_CUDA, ON_SHM)


def _bytes_of_units(model: nn.Module) -> list[int]:
    """How large the units are that `shard parameters` and torch-fsdp gather."""
    inside = {name: module for name, module in unit_modules(model, "auto").items() if name}
    sizes = [bytes_of(module) for module in inside.values()]  # none of the benchmark's units has others inside of it
    rest = bytes_of(model) - sum(sizes)
    return [*([rest] if rest else []), *sizes]


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
        self._start = model
        self._module = copy.deepcopy(model)
        count = settings.accumulate
        self._microbatches = list(zip(*(part.tensor_split(count) for part in batch), strict=True))
        self._samples = len(batch[1])
        self._comms = comms
        self._wrapped, self._optimizer = self._prepare(comms, group, settings.bucket_cap_mb)

    def _prepare(
        self, comms: Comms, group: dist.ProcessGroup, bucket_cap_mb: float | None
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model as this method calls it, and its optimizer."""
        module, parameters = self._module, list(self._module.parameters())
        match plain_name(self.method.name):
            case "none":
                return module, torch.optim.AdamW(parameters, lr=LEARNING_RATE)
            case "ddp":
                return DataParallel(module, comms, bucket_cap_mb), torch.optim.AdamW(parameters, lr=LEARNING_RATE)
            case "shard optimizer" | "shard gradients" as name:
                what: Any = name.removeprefix("shard ")
                wrapped = DataParallel(module, comms, bucket_cap_mb, shard=what)
                return wrapped, ShardedOptimizer(parameters, torch.optim.AdamW, comms, lr=LEARNING_RATE)
            case "shard parameters" | "shard parameters, kept" as name:
                kept = name == PARAMETERS_KEPT
                sharded = FullyShardedDataParallel(module, comms, prefetch=PREFETCH, reshard_after_forward=not kept)
                return sharded, torch.optim.AdamW(sharded.parameters(), lr=LEARNING_RATE)
            case "torch-fsdp" | "torch-fsdp on shm" as name:
                mesh = DeviceMesh.from_group(group if name == TORCH_FSDP else comms.process_group, comms.device.type)
                for unit in reversed(unit_modules(module, "auto").values()):  # those inside first, the model last
                    fully_shard(unit, mesh=mesh)
                return module, torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)
            case name:
                torchs = group if name == TORCH_ZERO else comms.process_group
                ddp = DistributedDataParallel(module, process_group=torchs, gradient_as_bucket_view=True)
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

    @property
    def model(self) -> nn.Module:
        """The plain model, whole; where each rank has a part, every rank calls this."""
        if isinstance(self._wrapped, FullyShardedDataParallel):
            whole = self._wrapped.full_state_dict()
        elif isinstance(self._wrapped, FSDPModule):
            state = self._module.state_dict()
            whole = {name: self._put_together(one) if isinstance(one, DTensor) else one for name, one in state.items()}
        else:
            return self._module
        plain = copy.deepcopy(self._start)
        plain.load_state_dict(whole)
        return plain

    def _put_together(self, tensor: DTensor) -> torch.Tensor:
        """A parameter of fully_shard, which each rank has some rows of.

        Its own `full_tensor` finds groups by a name that torch remembers, also if they have been closed since.
        """
        rows = tensor.to_local()
        most = -(-len(tensor) // self._comms.world_size)  # the last ranks may have fewer
        padded = torch.zeros(most, *tensor.shape[1:], dtype=rows.dtype)
        padded[: len(rows)] = rows.detach()
        return torch.cat(self._comms.all_gather(padded))[: len(tensor)]

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

    # ── memory, bytes and parts, in steps that are not timed ────────────────────────────────────────────────────

    def memory(self, comms: Comms) -> Memory:
        """Do a step and count what its tensors take; every rank calls this, and gets the numbers of the largest."""
        with Watch(self._wrapped, comms) as watch:
            self.step()
        optimizer = self._optimizer
        if isinstance(optimizer, ShardedOptimizer):
            of_kind = optimizer.memory()
        else:
            inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
            values = [value for state in inner.state.values() for value in state.values()]
            of_kind = {"optimizer": [own_part(value) for value in values if isinstance(value, torch.Tensor)]}
        outside = [*self._module.parameters(), *of_kind["parameters"]] if "parameters" in of_kind else []
        parameters = max(watch.weights, covered(map(span, outside)))
        counted = [parameters, watch.gradients, covered(map(span, of_kind["optimizer"]))]
        return Memory(*largest(comms, counted))

    def recorded(self, comms: Comms) -> tuple[float | None, Parts | None]:
        """Record steps: the bytes of the rank that sent most, and where the time of the median step went.

        Every rank calls this. What torch's own does in one of its calls is not told, on gloo or on our backend.
        """
        if self.method.name.startswith((TORCH_ZERO, TORCH_FSDP)):
            return None, None
        steps = [self._record(comms) for _ in range(_STEPS_RECORDED)]
        typical = sorted(steps, key=lambda step: step.makespan)[len(steps) // 2]
        [most] = largest(comms, [sum(event.sent for event in typical.by_rank[comms.rank])])
        each = zip(*map(astuple, parts(typical)), strict=True)
        return most, Parts(*map(statistics.fmean, each))

    def _record(self, comms: Comms) -> Trace:
        recorder = Recorder(comms, memory=False)
        comms.barrier()
        recorder.start()
        try:
            self.step()
        finally:
            recorder.stop()
        return recorder.gather({})
