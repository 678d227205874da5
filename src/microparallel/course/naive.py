"""A model's loss on a batch, whichever way the model likes to be called."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from microparallel.comms import Comms

LossFunction = Callable[[Any, Any], torch.Tensor]


def mean_loss(model: nn.Module, inputs: Any, targets: Any, loss_fn: LossFunction | None = None) -> torch.Tensor:
    """The mean loss of a batch: with `loss_fn` where one is given, else `model(inputs, targets)` is the loss."""
    if loss_fn is not None:
        return loss_fn(model(inputs), targets)
    loss: torch.Tensor = model(inputs, targets)
    return loss


# Data parallelism the naive way: compute on your own samples, then add up every gradient.
#
# ```
# rank 0   forward  backward │ all-reduce g0 │ all-reduce g1 │ …   the same step as one process
# rank 1   forward  backward │ all-reduce g0 │ all-reduce g1 │ …   on the whole batch
# ```
#
# Nothing overlaps, and every gradient is a message of its own. That is what the later chapters improve on.


def naive_data_parallel_step(
    model: nn.Module,
    comms: Comms,
    inputs: Any,
    targets: torch.Tensor,
    loss_fn: LossFunction | None = None,
    *,
    samples: int | None = None,
) -> torch.Tensor:
    """Forward and backward on this rank's samples; afterwards every rank holds the gradients of the whole batch.

    Each rank passes its own share of the batch, and shares may differ in size or be empty. The loss is the mean over
    all samples of all ranks, not a mean of the ranks' means. Gradients accumulate as after `loss.backward()`; the
    caller's optimizer steps.

    Args:
        model: the same on every rank.
        comms: the ranks that share the batch.
        inputs: this rank's inputs.
        targets: this rank's targets, one a sample.
        loss_fn: the mean loss of outputs and targets; without it, `model(inputs, targets)` is the loss.
        samples: how many samples all ranks have together, if that is known; otherwise the ranks count.

    Returns:
        The mean loss of the whole batch, the same on every rank.
    """
    mine = len(targets)
    if samples is None:
        samples = int(comms.all_reduce(torch.tensor(mine)).item())
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None

    share = torch.zeros((), dtype=torch.float64)
    try:
        if mine:
            # Weighted by its samples, each rank's loss is its part of the mean over all of them.
            loss = mean_loss(model, inputs, targets, loss_fn) * (mine / samples)
            loss.backward()  # type: ignore[no-untyped-call]
            share = loss.detach().to("cpu", torch.float64)
        return sum_gradients(parameters, comms, share)
    finally:
        for parameter, old in zip(parameters, before, strict=True):
            if old is not None:
                parameter.grad = old if parameter.grad is None else old.add_(parameter.grad)


def sum_gradients(parameters: Iterable[nn.Parameter], comms: Comms, loss: torch.Tensor) -> torch.Tensor:
    """Add up each gradient over all ranks, a message each, and the loss before them.

    A parameter that some ranks did not use counts as zero there; one that no rank used keeps no gradient.
    """
    parameters = list(parameters)
    news = torch.tensor([loss.item(), *(parameter.grad is not None for parameter in parameters)], dtype=torch.float64)
    comms.all_reduce(news)
    under_way = []
    for parameter, used_by in zip(parameters, news[1:].tolist(), strict=True):
        if used_by > 0:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            under_way.append(comms.all_reduce(parameter.grad, async_op=True))
    for request in under_way:
        request.wait()
    return news[0]
