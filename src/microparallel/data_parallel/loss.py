"""A model's loss on a batch, whichever way the model likes to be called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

LossFunction = Callable[[Any, Any], torch.Tensor]


def mean_loss(model: nn.Module, inputs: Any, targets: Any, loss_fn: LossFunction | None = None) -> torch.Tensor:
    """The mean loss of a batch: with `loss_fn` where one is given, else `model(inputs, targets)` is the loss."""
    if loss_fn is not None:
        return loss_fn(model(inputs), targets)
    loss: torch.Tensor = model(inputs, targets)
    return loss
