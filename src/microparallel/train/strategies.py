"""How a step is done: each strategy turns a model into a function that leaves the whole batch's gradients in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from microparallel.comms import Comms
from microparallel.course.ddp import ddp_step, register_ddp_hooks
from microparallel.course.naive import naive_data_parallel_step
from microparallel.course.shortcuts import MicroBatch, accumulate, accumulated_step
from microparallel.data_parallel import DataParallel
from microparallel.models.loss import LossFunction, mean_loss
from microparallel.program import LOSS, AllReduce
from microparallel.train.data import chosen_samples, first_samples

# (this rank's inputs, this rank's targets, samples of all ranks together) → the mean loss of the whole batch
Step = Callable[[Any, torch.Tensor, int], torch.Tensor]


def single(model: nn.Module, comms: Comms, loss_fn: LossFunction | None, micro_batches: int = 1) -> Step:  # noqa: ARG001
    """One process and the whole batch: what every other strategy must agree with."""

    def step(inputs: Any, targets: torch.Tensor, samples: int) -> torch.Tensor:
        return accumulate(model, cut(inputs, targets, micro_batches), loss_fn, samples=samples)

    return step


def naive(model: nn.Module, comms: Comms, loss_fn: LossFunction | None) -> Step:
    """Backward first, then one all-reduce for every gradient."""

    def step(inputs: Any, targets: torch.Tensor, samples: int) -> torch.Tensor:
        return naive_data_parallel_step(model, comms, inputs, targets, loss_fn, samples=samples)

    return step


def hooks(model: nn.Module, comms: Comms, loss_fn: LossFunction | None) -> Step:
    """One all-reduce for every gradient, each as soon as backward has made it."""
    register_ddp_hooks(model, comms, use_bucketing=False)

    def step(inputs: Any, targets: torch.Tensor, samples: int) -> torch.Tensor:
        return ddp_step(model, comms, inputs, targets, loss_fn, samples=samples)

    return step


def ddp(model: nn.Module, comms: Comms, loss_fn: LossFunction | None, micro_batches: int = 1) -> Step:
    """Gradients in buckets, averaged while backward still computes."""
    wrapped = DataParallel(model, comms)

    def step(inputs: Any, targets: torch.Tensor, samples: int) -> torch.Tensor:
        return accumulated_step(wrapped, cut(inputs, targets, micro_batches), loss_fn, samples=samples)

    return step


def averaging(model: nn.Module, comms: Comms, loss_fn: LossFunction | None, micro_batches: int = 1) -> Step:
    """Every rank keeps its gradients to itself; `ParameterAveraging` brings the ranks together every few steps."""

    def step(inputs: Any, targets: torch.Tensor, samples: int) -> torch.Tensor:
        mine = len(targets)
        loss = accumulate(model, cut(inputs, targets, micro_batches), loss_fn, samples=mine)
        # For the display only: no rank's training depends on this number.
        return comms.all_reduce(loss * (mine / samples), operation=AllReduce(LOSS, "dp"))

    return step


def torch_ddp(model: nn.Module, comms: Comms, loss_fn: LossFunction | None) -> Step:
    """torch's own DistributedDataParallel, to compare with."""
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model, process_group=comms.process_group)
    sample: list[Any] = []  # one sample, kept for steps in which this rank has none

    def step(inputs: Any, targets: torch.Tensor, samples: int) -> torch.Tensor:
        mine = len(targets)
        if mine:
            sample[:] = [first_samples(inputs, 1), targets[:1]]
        else:
            inputs, targets = sample  # DDP waits for every rank's backward: compute something, and weigh it nothing
        # DDP divides by the number of ranks what we want summed.
        loss = mean_loss(wrapped, inputs, targets, loss_fn) * (mine * comms.world_size / samples)
        loss.backward()  # type: ignore[no-untyped-call]
        return comms.all_reduce_mean(loss.detach().to("cpu", torch.float64))

    return step


def cut(inputs: Any, targets: torch.Tensor, count: int) -> list[MicroBatch]:
    """Cut a rank's share of a batch into micro-batches; sizes differ by at most one, and there are no empty ones."""
    bounds = [index * len(targets) // count for index in range(count + 1)]
    parts = [slice(start, stop) for start, stop in pairwise(bounds) if start < stop]
    return [(chosen_samples(inputs, part), targets[part]) for part in parts]


STEPS: dict[str, Callable[..., Step]] = {
    "single": single,
    "naive": naive,
    "hooks": hooks,
    "ddp": ddp,
    "averaging": averaging,
    "torch-ddp": torch_ddp,
}


# ── a rank that computes more slowly than it could, to see what a straggler does to a run ─────────────────────────────


def slow_down_model(model: nn.Module, factor: float) -> None:
    """Make every layer of a model take `factor` times as long, forward and backward, from now on.

    A layer sleeps for what it is to take longer, before its result is passed on: before its output leaves, and before
    its gradients do. Hooks that are registered later, such as those of `DataParallel`, see the gradients later.
    """
    for module in model.modules():
        if not any(True for _ in module.children()):
            _Slow(module, factor - 1)


class _Slow:
    """One layer that sleeps after its own work."""

    def __init__(self, module: nn.Module, more: float) -> None:
        self._more = more
        self._begun: float | None = None
        module.register_forward_pre_hook(self._forward_begins)
        module.register_forward_hook(self._forward_ends)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._gradient_is_there)  # type: ignore[no-untyped-call]

    def _forward_begins(self, _module: nn.Module, _inputs: Any) -> None:
        self._begun = time.perf_counter()

    def _forward_ends(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self._sleep()
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]

    def _backward_begins(self, _: torch.Tensor) -> None:
        self._begun = time.perf_counter()

    def _gradient_is_there(self, _: nn.Parameter) -> None:
        self._sleep()
        self._begun = time.perf_counter()

    def _sleep(self) -> None:
        if self._begun is not None:
            time.sleep((time.perf_counter() - self._begun) * self._more)
            self._begun = None
