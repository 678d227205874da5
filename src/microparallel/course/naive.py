"""Data parallelism the naive way: every rank computes on its own samples, then all ranks add up every gradient.

```
rank 0   forward  backward │ all-reduce g0 │ all-reduce g1 │ …   the same step as one process
rank 1   forward  backward │ all-reduce g0 │ all-reduce g1 │ …   on the whole batch
```

Nothing overlaps, and every gradient is a message of its own. The later chapters improve on both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from microparallel.comms import Comms
from microparallel.models.loss import LossFunction, mean_loss


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
        samples: how many samples all ranks have together, if the caller knows; otherwise an all-reduce adds them up.

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
            # A rank's mean loss counts by its number of samples; the sum over the ranks is the mean over all samples.
            loss = mean_loss(model, inputs, targets, loss_fn) * (mine / samples)
            loss.backward()  # type: ignore[no-untyped-call]
            share = loss.detach().to("cpu", torch.float64)
        return sum_gradients(parameters, comms, share)
    finally:
        for parameter, old in zip(parameters, before, strict=True):
            if old is not None:
                parameter.grad = old if parameter.grad is None else old.add_(parameter.grad)


def sum_gradients(parameters: Iterable[nn.Parameter], comms: Comms, loss: torch.Tensor) -> torch.Tensor:
    """Add up the loss over all ranks, then each gradient, with one all-reduce a gradient; returns the loss.

    On a rank that did not use a parameter, its gradient counts as zero; if no rank used it, it keeps no gradient.
    """
    parameters = list(parameters)
    totals = torch.tensor([loss.item(), *(parameter.grad is not None for parameter in parameters)], dtype=torch.float64)
    comms.all_reduce(totals)
    requests = []
    for parameter, users in zip(parameters, totals[1:].tolist(), strict=True):
        if users > 0:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            requests.append(comms.all_reduce(parameter.grad, async_op=True))
    for request in requests:
        request.wait()
    return totals[0]
