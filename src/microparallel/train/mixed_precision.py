"""A training run in 16 bits (`--precision bf16`, `--precision fp16`): the model computes in 16 bits, its loss in 32."""

from __future__ import annotations

from typing import Any

import torch

from microparallel.comms import Comms
from microparallel.data_parallel import DataParallel
from microparallel.models.loss import Loss
from microparallel.train.batch import Batch, ModelWithLoss


class MixedModelWithLoss(DataParallel):
    """A model in mixed precision that is called with a `Batch`, and returns the loss, which is computed in float32.

    Args:
        with_loss: the plain model, and its loss.
        comms: the ranks.
        options: of `DataParallel`.
    """

    def __init__(self, with_loss: ModelWithLoss, comms: Comms, **options: Any) -> None:
        super().__init__(with_loss.model, comms, **options)
        self.loss = with_loss.loss
        self.loss_fn = with_loss.loss_fn

    def forward(self, batch: Batch, _targets: Any = None) -> Loss:
        """The loss of a batch, in which the targets are."""
        loss = self.loss(self.outputs(batch), batch)
        # Outputs may be an object in which no tensors are found. In float16 that is refused: they could not be scaled.
        if torch.is_grad_enabled() and self.loss_scale is None:
            self._wait_for_backward(loss)
        return loss

    def outputs(self, batch: Batch) -> Any:
        """What the model returns, in float32."""
        return super().forward(*batch.arguments, **batch.named)
