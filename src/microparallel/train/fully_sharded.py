"""A training run in which each rank keeps its part of every parameter (`--shard parameters`).

```
                 rank 0                                 rank 1
parameters       w[0:6]                                 w[6:10] b[0:2]
optimizer        exp_avg of w[0:6], …                   exp_avg of w[6:10], of b[0:2], …
checkpoint       part-00000.safetensors: these          part-00001.safetensors: these
```

The optimizer is one of torch's own, on this rank's parts. What is saved and read is a range of each tensor: no rank has
the whole model, neither to save it nor to load it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from microparallel.comms import Comms
from microparallel.data_parallel import FullyShardedDataParallel, replicas_are_identical
from microparallel.models.loss import Loss
from microparallel.train.batch import Batch, ModelWithLoss
from microparallel.train.layouts import PartsOfModel
from microparallel.train.metrics import Measurement
from microparallel.train.training import Training


class ShardedModelWithLoss(FullyShardedDataParallel):
    """A model in parts that is called with a `Batch`, and returns the loss.

    Args:
        with_loss: the plain model, and its loss.
        comms: the ranks.
        options: of `FullyShardedDataParallel`.
    """

    def __init__(self, with_loss: ModelWithLoss, comms: Comms, **options: Any) -> None:
        super().__init__(with_loss.model, comms, **options)
        self._loss = with_loss.loss

    def forward(self, batch: Batch, _targets: Any = None) -> Loss:
        """The loss of a batch, in which the targets are."""
        loss = self._loss(self.outputs(batch), batch)
        if torch.is_grad_enabled():
            self._wait_for_backward(loss)  # outputs may be an object in which no tensors are found
        return loss

    def outputs(self, batch: Batch) -> Any:
        """What the model returns; its units are gathered for it."""
        return super().forward(*batch.arguments, **batch.named)

    def replicas_are_identical(self) -> bool:
        """Whether ranks of several groups that keep the same part have the same bits; every rank must call it."""
        same = True if self._across is None else replicas_are_identical(self.module, self._across)
        return bool(self.comms.all_reduce(torch.tensor(int(same), device="cpu"), op="min"))


class FullyShardedTraining(Training):
    """One rank's part in a run whose ranks each keep their part of the parameters.

    Args:
        sharded: the model in parts.
        rest: of `Training`.
    """

    def __init__(self, sharded: ShardedModelWithLoss, **rest: Any) -> None:
        super().__init__(model=sharded.module, sharded=sharded, **rest)
        self.held = PartsOfModel(self.comms, sharded, self.optimizer)
        self.sharded = sharded

    @property
    def parameters(self) -> int:
        """How many numbers the whole model has learnt."""
        return sum(math.prod(part.shape) for part in self.sharded.parameter_parts().values())

    def replicas_are_identical(self) -> bool:
        """Whether ranks that keep the same parts, if there are any, have the same bits; every rank must call it."""
        return self.sharded.replicas_are_identical()

    # ── measuring ───────────────────────────────────────────────────────────────────────────────────────────────

    def _measure(self, batch: Batch, measurement: Measurement) -> None:
        outputs = measurement.outputs(lambda: self.sharded.outputs(batch))
        if outputs is not None:
            self._compare(outputs, batch, measurement)

    def _measure_nothing(self) -> None:
        self.sharded.sit_out_of_forward()

    def model_state(self) -> dict[str, torch.Tensor]:
        """The whole model's state on rank 0, to compare it with another's; every rank must call it."""
        return self.sharded.full_state_dict(on=0)
