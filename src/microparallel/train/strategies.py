"""How a step is done: each strategy turns a model into a function that leaves the whole batch's gradients in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from microparallel.comms import Comms
from microparallel.course.ddp import ddp_step, register_ddp_hooks
from microparallel.course.naive import naive_data_parallel_step
from microparallel.course.shortcuts import accumulate, accumulated_step
from microparallel.data_parallel import DataParallel
from microparallel.models.loss import mean_loss
from microparallel.pipeline.layers import left_as_found
from microparallel.program import LOSS, AllReduce
from microparallel.train.batch import EMPTY, Batch, ModelWithLoss
from microparallel.train.random_state import own_randomness
from microparallel.train.shares import Shares

# (this rank's micro-batches, samples of all ranks together) → the mean loss of the whole batch
Step = Callable[[Sequence[Batch], int], torch.Tensor]


def single(model: ModelWithLoss, comms: Comms) -> Step:  # noqa: ARG001
    """One process and the whole batch: what every other strategy must agree with."""

    def step(batches: Sequence[Batch], samples: int) -> torch.Tensor:
        return accumulate(model, [batch.pair for batch in batches], samples=samples)

    return step


def naive(model: ModelWithLoss, comms: Comms) -> Step:
    """Backward first, then one all-reduce for every gradient."""

    def step(batches: Sequence[Batch], samples: int) -> torch.Tensor:
        return naive_data_parallel_step(model, comms, *_only(batches).pair, samples=samples)  # type: ignore[arg-type]

    return step


def hooks(model: ModelWithLoss, comms: Comms) -> Step:
    """One all-reduce for every gradient, each as soon as backward has made it."""
    register_ddp_hooks(model, comms, use_bucketing=False)

    def step(batches: Sequence[Batch], samples: int) -> torch.Tensor:
        return ddp_step(model, comms, *_only(batches).pair, samples=samples)  # type: ignore[arg-type]

    return step


def data_parallel(model: DataParallel, shares: Shares, microbatches: int = 1) -> Step:
    """The step of a wrapped model, whose ranks cut each of their shares into so many micro-batches, or one a sample."""

    def step(batches: Sequence[Batch], samples: int) -> torch.Tensor:
        pairs = [batch.pair for batch in batches]
        most = shares.most_microbatches(samples, microbatches)
        return accumulated_step(model, pairs, samples=samples, most=most)

    return step


def averaging(model: ModelWithLoss, comms: Comms) -> Step:
    """Every rank keeps its gradients to itself; `ParameterAveraging` brings the ranks together every few steps."""

    def step(batches: Sequence[Batch], samples: int) -> torch.Tensor:
        mine = sum(map(len, batches))
        loss = accumulate(model, [batch.pair for batch in batches], samples=mine)
        # For the display only: no rank's training depends on this number.
        return comms.all_reduce(loss * (mine / samples), operation=AllReduce(LOSS, "dp"))

    return step


def torch_ddp(model: nn.Module, comms: Comms) -> Step:
    """torch's own DistributedDataParallel, to compare with."""
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model, process_group=comms.process_group)
    last: list[Batch] = []  # kept for steps in which this rank has no samples

    def arrange_buckets() -> None:
        """Let a pass be seen, of which nothing stays: after its first, DDP arranges its buckets anew.

        With three ranks and more the order in buckets decides the last bits of sums. So a run that goes on would not be
        bit for bit what it would have been, if the first step of each start had other buckets than all others.
        """
        with own_randomness(), left_as_found([model]):
            mean_loss(wrapped, *last[0].pair).backward()  # type: ignore[no-untyped-call]

    def step(batches: Sequence[Batch], samples: int) -> torch.Tensor:
        mine = len(_only(batches))
        begins = not last
        if mine:
            last[:] = batches
        if begins:
            arrange_buckets()
        # DDP waits for every rank's backward: a rank without samples computes something, and weighs it nothing.
        # DDP divides by the number of ranks what we want summed.
        loss = mean_loss(wrapped, *last[0].pair) * (mine * comms.world_size / samples)
        loss.backward()  # type: ignore[no-untyped-call]
        return comms.all_reduce_mean(loss.detach().to("cpu", torch.float64))

    return step


def _only(batches: Sequence[Batch]) -> Batch:
    """The one micro-batch of a strategy that cannot accumulate; one of no samples where this rank has none."""
    return batches[0] if batches else EMPTY


STEPS: dict[str, Callable[..., Step]] = {
    "single": single,
    "naive": naive,
    "hooks": hooks,
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
