"""Two ways to synchronise M times less often: a larger batch, and averaging weights, which changes the result.

```
every step      ▒▒ ▓ ▒▒ ▓ ▒▒ ▓ ▒▒ ▓      ▒▒ forward and backward of one micro-batch    ▓ synchronise
accumulation    ▒▒ ▒▒ ▒▒ ▒▒ ▓ u          gradients add up, one average, one update
averaging       ▒▒ u ▒▒ u ▒▒ u ▒▒ u ▓    every rank updates its own weights, and then the weights are averaged
```

Accumulation is exactly the step of a batch M times as large. Averaging parameters is another algorithm (local SGD):
after the first update each rank has other weights, and computes its next gradients with those.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Sized
from typing import Any

import torch
from torch import nn

from microparallel.comms import Comms
from microparallel.data_parallel.replicate import replicate, require_same_model
from microparallel.data_parallel.wrapper import DataParallel
from microparallel.errors import UsageError
from microparallel.models.loss import LossFunction, loss_of, sum_and_count
from microparallel.program import LOSS, SAMPLES, AllReduce

MicroBatch = tuple[Any, Sized]  # (inputs, targets), of as many samples as the targets' length


# ── accumulation ────────────────────────────────────────────────────────────────────────────────────────────────────


def accumulated_step(
    model: DataParallel,
    micro_batches: Iterable[MicroBatch],
    loss_fn: LossFunction | None = None,
    *,
    samples: int | None = None,
    most: int | None = None,
) -> torch.Tensor:
    """Forward and backward of several micro-batches on every rank, and one synchronisation for all of them.

    Afterwards every rank holds the gradients of the mean loss over all samples of all micro-batches of all ranks: those
    of one large batch. Micro-batches may differ in size and be empty, and ranks may have different numbers of them, or
    none. (A layer that looks at its whole batch, as BatchNorm does, sees micro-batches.) The caller's optimizer steps.

    A model with `shard="gradients"` keeps no whole gradients: those of each micro-batch are summed at once. A rank that
    has no more micro-batches then takes part in the sums of the others.

    Args:
        model: wrapped, on every rank.
        micro_batches: this rank's, as pairs of inputs and targets.
        loss_fn: the mean loss of outputs and targets; without it, `model(inputs, targets)` is the loss. Either may
            return a tuple (sum, count) instead, such as a sum over all tokens that are not padding and their number:
            then the result is the total sum over the total count of all ranks. `grad` must be None before.
        samples: how many samples all ranks have together, if the caller knows; otherwise an all-reduce adds them up.
        most: how many micro-batches with samples the rank has that has most, if the caller knows; it matters with
            `shard="gradients"` alone, and comes with the all-reduce of the samples otherwise.

    Returns:
        The mean loss of all samples, the same on every rank.

    Example:
        ```python
        model = mp.DataParallel(build_model(), comms)
        optimizer.zero_grad()
        mp.course.accumulated_step(model, [(inputs_1, targets_1), (inputs_2, targets_2)], loss_fn)
        optimizer.step()
        ```
    """
    if not isinstance(model, DataParallel):
        raise UsageError(
            f"accumulated_step: {type(model).__name__} does not know its ranks; pass mp.DataParallel(model, comms)"
        )
    filled = [(inputs, targets) for inputs, targets in micro_batches if len(targets)]
    mine = sum(len(targets) for _, targets in filled)
    if samples is None or (model.sums_at_once and most is None):
        samples, most = _exchange(model.comms, mine, len(filled))
    if not samples:
        raise UsageError("accumulated_step: no rank has a sample, and the mean of nothing is not a number")
    begun = _has_gradients(model)
    with model.weighted(mine, samples):
        if model.sums_at_once:
            loss, count = _add_up(model, filled, loss_fn, mine)
            for _ in range((most or 0) - len(filled)):
                model.sit_out()
        elif filled:
            with model.no_sync():
                loss, count = _add_up(model, filled[:-1], loss_fn, mine)
            last_loss, last_count = _add_up(model, filled[-1:], loss_fn, mine)
            loss, count = loss + last_loss, count + last_count
        else:
            loss, count = torch.zeros((), dtype=torch.float64), 0.0
            model.sit_out()
    # What was counted goes with the loss: only now does every rank know the total, and can divide by it.
    totals = torch.stack([loss * (mine / samples), torch.tensor(count, dtype=torch.float64)])
    model.comms.all_reduce(totals, operation=AllReduce(LOSS, "dp"))
    return _over_count(model, totals[0], samples, float(totals[1]), begun)


def _exchange(comms: Comms, samples: int, microbatches: int) -> tuple[int, int]:
    """Tell all ranks how much this one has; returns the sum of all samples, and the most micro-batches of a rank."""
    table = torch.zeros(1 + comms.world_size, dtype=torch.int64)  # the samples; a place for each rank's micro-batches
    table[0], table[1 + comms.rank] = samples, microbatches
    everyones, *each = comms.all_reduce(table, operation=AllReduce(SAMPLES, "dp")).tolist()
    return everyones, max(each)


def accumulate(
    model: nn.Module, micro_batches: Sequence[MicroBatch], loss_fn: LossFunction | None = None, *, samples: int
) -> torch.Tensor:
    """Forward and backward of one micro-batch after another, without communication; returns their loss.

    `samples` is how many this rank has: its gradients are those of the mean over them, not of a mean of the
    micro-batches' means. With a loss that returns (sum, count), they are those of the total sum over the total count.
    """
    begun = _has_gradients(model)
    loss, count = _add_up(model, micro_batches, loss_fn, samples)
    return _over_count(model, loss, samples, count, begun) if micro_batches else loss


def _add_up(
    model: nn.Module, micro_batches: Sequence[MicroBatch], loss_fn: LossFunction | None, samples: int
) -> tuple[torch.Tensor, float]:
    """Forward and backward of each micro-batch; returns the sum of their losses over `samples`, and what it counts."""
    total, counted = torch.zeros((), dtype=torch.float64), 0.0
    for inputs, targets in micro_batches:
        loss = loss_of(model, inputs, targets, loss_fn)
        if isinstance(loss, tuple):
            whole, count = sum_and_count(loss, len(targets))
            part = whole / samples
        else:
            part, count = loss * (len(targets) / samples), float(len(targets))
        part.backward()  # type: ignore[no-untyped-call]
        total += part.detach().to("cpu", torch.float64)
        counted += count
    return total, counted


def _has_gradients(model: nn.Module) -> bool:
    return any(parameter.grad is not None for parameter in model.parameters())


def _over_count(model: nn.Module, loss: torch.Tensor, samples: int, count: float, begun: bool) -> torch.Tensor:
    """Make a mean over `samples` one over what the loss counted: scale the loss and all gradients, if that differs."""
    if count == samples:
        return loss
    if not count:  # a sum of nothing: gradients are zero, and there is no mean
        return loss * math.nan
    if begun:
        raise UsageError(
            "the loss returned (sum, count), which scales all gradients at the end, and there were gradients before "
            "this step: call optimizer.zero_grad() first"
        )
    if isinstance(model, DataParallel):
        model.scale_gradients(samples / count)
    else:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(samples / count)
    return loss * (samples / count)


# ── averaging parameters ────────────────────────────────────────────────────────────────────────────────────────────


class ParameterAveraging:
    """Let every rank train on its own, and every few steps replace all ranks' parameters by their average.

    Rank 0's parameters and buffers are copied to all ranks at the start. Between two averages nothing is sent, the
    ranks' models differ, and only after an average are they the same again, bit for bit. Buffers that are real numbers
    (BatchNorm's statistics) are averaged too; those that are not come from rank 0.

    This is not what averaging gradients does, except for SGD and `every=1`. The update of SGD is the gradient, times a
    number, so that the average of updated parameters is the update by the average gradient. With `every` above 1 the
    ranks compute later gradients with different weights, and Adam divides by the moments of each rank's own gradients.

    The optimizer's state stays local: momentum and Adam's moments belong to the gradients of their own rank, and are
    neither averaged nor reset. So the ranks' optimizers differ even right after an average; a checkpoint must hold the
    state of every rank.

    Args:
        model: the plain model (not wrapped, or its gradients would be averaged as well), the same on every rank.
        comms: the ranks.
        every: how many steps there are from one average to the next.

    Attributes:
        steps: how many times `after_step` was called.

    Example:
        ```python
        averaging = mp.course.ParameterAveraging(model, comms, every=8)
        for inputs, targets in my_share_of_the_batches:
            optimizer.zero_grad()
            loss_fn(model(inputs), targets).backward()
            optimizer.step()
            averaging.after_step(samples=len(targets))
        averaging.average()  # for the last few steps
        ```
    """

    def __init__(self, model: nn.Module, comms: Comms, every: int) -> None:
        if not isinstance(every, int) or every < 1:
            raise UsageError(f"ParameterAveraging: every={every!r} must be a whole number of steps, at least 1")
        if isinstance(model, DataParallel):
            raise UsageError("ParameterAveraging: DataParallel averages gradients already; pass the model itself")
        require_same_model(model, comms)
        replicate(model, comms)
        self.steps = 0
        self._model = model
        self._comms = comms
        self._every = every
        self._samples = 0.0  # that this rank was trained on since the last average

    def after_step(self, samples: float = 1) -> bool:
        """Count a step of the optimizer, and average after every `every` steps; every rank calls it after every step.

        Args:
            samples: how many samples this rank was trained on in this step, which may be 0; ranks count by that in the
                average. Without it all count alike.

        Returns:
            Whether parameters were averaged: then they are the same on every rank.
        """
        if not (isinstance(samples, int | float) and math.isfinite(samples) and samples >= 0):
            raise UsageError(f"after_step: samples={samples!r} must be a finite number, at least 0")
        self.steps += 1
        self._samples += samples
        if self.steps % self._every:
            return False
        self.average()
        return True

    @torch.no_grad()
    def average(self) -> None:
        """Average now, if some rank was trained since the last average; every rank calls it."""
        total = self._comms.all_reduce(torch.tensor(self._samples, dtype=torch.float64)).item()
        if total:
            tensors = [p for p in self._model.parameters() if p.requires_grad] + list(self._model.buffers())
            _average(tensors, self._samples / total, self._comms)
        self._samples = 0.0


def _average(tensors: Sequence[torch.Tensor], weight: float, comms: Comms) -> None:
    """Replace real numbers by the ranks' weighted sum, one message a dtype and device; the rest comes from rank 0."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        else:
            comms.broadcast(tensor)
    for alike in kinds.values():
        flat = torch.cat([tensor.flatten() for tensor in alike]).mul_(weight)
        comms.all_reduce(flat)
        parts = torch.split(flat, [tensor.numel() for tensor in alike])
        for tensor, part in zip(alike, parts, strict=True):
            tensor.copy_(part.view_as(tensor))
