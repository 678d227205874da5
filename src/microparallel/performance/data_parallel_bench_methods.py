"""The methods that take turns in a benchmark of data parallelism: each trains a copy of its own of the same model.

none              no synchronisation at all: each rank by itself, which nobody can be faster than
naive             backward, then an all-reduce for each gradient
hooks             an all-reduce for each gradient as soon as backward has made it
buckets           the course's buckets: gradients are copied into them, and leave together
ddp               mp.DataParallel, with buckets of several sizes
torch-ddp         torch's DistributedDataParallel on gloo, with gradient_as_bucket_view=True
torch-ddp on shm  the same on our backend, where ranks share memory
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from microparallel.comms import Comms
from microparallel.data_parallel import (
    DataParallel,
    ddp_step,
    mean_loss,
    naive_data_parallel_step,
    register_ddp_hooks,
)

NONE, DDP, TORCH_DDP, TORCH_DDP_ON_SHM = "none", "ddp", "torch-ddp", "torch-ddp on shm"
LEARNING_RATE = 0.01

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Method:
    """A way to do a step; `bucket_mb` where it has buckets of a size that can be chosen."""

    name: str
    bucket_mb: float | None = None

    @property
    def label(self) -> str:
        """What it is called where all sizes stand side by side."""
        return self.name if self.bucket_mb is None else f"{self.name}, {self.bucket_mb:g} MB"

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
                return backward(DataParallel(self.model, comms, self.method.bucket_mb or 25.0))
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
