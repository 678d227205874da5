"""The loss: one number that says how wrong a model is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from microparallel.errors import UsageError

# The mean over the samples; or (sum, count), such as the sum over all tokens that are not padding, and their number.
Loss = torch.Tensor | tuple[torch.Tensor, torch.Tensor | float]
LossFunction = Callable[[Any, Any], Loss]


def loss_of(model: nn.Module, inputs: Any, targets: Any, loss_fn: LossFunction | None = None) -> Loss:
    """The loss of a batch: `loss_fn(model(inputs), targets)`, or without a `loss_fn` `model(inputs, targets)`."""
    loss: Loss = model(inputs, targets) if loss_fn is None else loss_fn(model(inputs), targets)
    return loss


def mean_loss(model: nn.Module, inputs: Any, targets: Any, loss_fn: LossFunction | None = None) -> torch.Tensor:
    """The mean loss of a batch, for callers that weigh batches by their samples: a (sum, count) is refused."""
    loss = loss_of(model, inputs, targets, loss_fn)
    if isinstance(loss, tuple):
        raise UsageError(
            "the loss returned (sum, count), and this step weighs batches by their samples; "
            "return the mean, or use mp.course.accumulated_step (train: --strategy ddp)"
        )
    return loss


def sum_and_count(loss: Loss, samples: int) -> tuple[torch.Tensor, float]:
    """A loss as a sum and what it is a sum over: a mean is one over the samples."""
    if not isinstance(loss, tuple):
        return loss * samples, float(samples)
    if len(loss) != 2:
        raise UsageError(f"the loss returned {len(loss)} values; return the mean, or (sum, count)")
    total, count = loss
    return total, float(count)


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Average, over every position of the batch, how surprised the model is by the right class.

    Logits of shape (batch, classes) go with targets of shape (batch,), and logits of shape (batch, time, classes)
    with targets of shape (batch, time): one class number per position.
    """
    if outputs.shape[:-1] != targets.shape:
        raise UsageError(
            f"targets of shape {tuple(targets.shape)} do not fit outputs of shape {tuple(outputs.shape)}: "
            f"cross-entropy needs one class number per position, so targets of shape {tuple(outputs.shape[:-1])}"
        )
    return functional.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1))


def mean_squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Average the squared difference of outputs and targets, which must have the same shape."""
    if outputs.shape != targets.shape:
        # torch would broadcast one to the shape of the other, and compute a loss over all pairs
        raise UsageError(
            f"targets of shape {tuple(targets.shape)} do not fit outputs of shape {tuple(outputs.shape)}: "
            "give them the same shape, for example with targets.unsqueeze(1)"
        )
    return functional.mse_loss(outputs, targets)
