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
from collections.abc import Mapping
from typing import Any

import torch

from microparallel.comms import Comms
from microparallel.data_parallel import FullyShardedDataParallel, replicas_are_identical
from microparallel.data_parallel.layout import Part
from microparallel.data_parallel.sharded_optimizer import SCALARS
from microparallel.models.loss import Loss
from microparallel.train.batch import Batch, ModelWithLoss
from microparallel.train.checkpoint_reader import Checkpoint, StateReader, StoredTensor, read_whole
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
        return bool(self.comms.all_reduce(torch.tensor(int(same)), op="min"))


class FullyShardedTraining(Training):
    """One rank's part in a run whose ranks each keep their part of the parameters.

    Args:
        sharded: the model in parts.
        rest: of `Training`.
    """

    def __init__(self, sharded: ShardedModelWithLoss, **rest: Any) -> None:
        super().__init__(model=sharded.module, sharded=sharded, **rest)
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

    # ── saving and loading ──────────────────────────────────────────────────────────────────────────────────────

    def model_state(self) -> dict[str, torch.Tensor]:
        """The whole model's state on rank 0, to compare it with another's; every rank must call it."""
        return self.sharded.full_state_dict(on=0)

    @property
    def first_names(self) -> Mapping[str, str]:
        """For weights with several names, the first of them: a rank may have nothing of one."""
        first: dict[int, str] = {}
        return {name: first.setdefault(id(tensor), name) for name, tensor in self._tensors().items()}

    def _tensors(self) -> dict[str, torch.Tensor]:
        """What the plain model's state has, under all names: shards of parameters, and whole buffers."""
        state: dict[str, torch.Tensor] = self.model.state_dict(keep_vars=True)
        return state

    def _parts(self) -> dict[int, Part]:
        """What this rank has of each parameter, by the identity of its shard."""
        parts = self.sharded.parameter_parts()
        return {id(shard): parts[name] for name, shard in self.model.named_parameters()}

    def model_parts(self) -> Mapping[str, torch.Tensor | Part]:
        """What this rank has of the parameters; of the buffers, rank 0's count."""
        parts = self._parts()
        found: dict[str, torch.Tensor | Part] = {}
        for name, tensor in self._tensors().items():
            part = parts.get(id(tensor))
            if part is not None and _is_kept(part):
                found[name] = part
            elif part is None and self.comms.rank == 0:
                found[name] = tensor
        return found

    def optimizer_parts(self) -> dict[str, Any]:
        """The state of this rank's optimizer, with a `Part` for each tensor that has a number for each element."""
        whole = self.optimizer.state_dict()
        state = {}
        for index, (shard, part) in enumerate(self._optimized()):
            if index in whole["state"] and _is_kept(part):
                state[index] = {
                    key: Part(value.detach().reshape(-1), part.start, part.shape)
                    if isinstance(value, torch.Tensor) and value.dim() and value.shape == shard.shape
                    else value
                    for key, value in whole["state"][index].items()
                }
        return {"state": state, "param_groups": whole["param_groups"]}

    def _optimized(self) -> list[tuple[torch.Tensor, Part]]:
        """What the optimizer updates, in its order: this rank's part of each parameter, and where that belongs."""
        parts = self._parts()
        return [(shard, parts[id(shard)]) for group in self.optimizer.param_groups for shard in group["params"]]

    def _load_states(self, checkpoint: Checkpoint) -> None:
        self._load_model(checkpoint.stored_model)
        self._load_optimizer(self._own_part(checkpoint.stored_optimizer))

    def _load_model(self, stored: Mapping[str, StoredTensor]) -> None:
        """Read this rank's ranges of the parameters, one after another, and all buffers."""
        tensors, parts = self._tensors(), self._parts()
        words = [f"it has no {name}" for name in tensors if name not in stored]
        words += [f"the model has no {name}" for name in stored if name not in tensors]
        if words:
            raise ValueError(", ".join(words))
        for name, tensor in tensors.items():
            part, there = parts.get(id(tensor)), stored[name]
            shape = tuple(tensor.shape) if part is None else part.shape
            if there.shape != shape:
                raise ValueError(f"{name} has shape {there.shape} there, and {shape} in the model")
            if part is None:
                tensor.detach().copy_(there.whole())
            else:
                part.tensor.copy_(there.read(part.start, part.stop))

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        """Read this rank's ranges of the optimizer's state."""
        reader = StateReader(state["state"])
        mine = {}
        for index, (shard, part) in enumerate(self._optimized()):
            values = {}
            for key, shape in reader.shapes(index).items():
                if shape is None:
                    values[key] = reader(index, key)
                elif shape == part.shape and key not in SCALARS:
                    values[key] = reader(index, key, part.start, part.stop).view(shard.shape)
                else:
                    values[key] = reader(index, key).view(shape)
            if values:
                mine[index] = values
        self.optimizer.load_state_dict({"state": mine, "param_groups": read_whole(state["param_groups"])})


def _is_kept(part: Part) -> bool:
    """Whether there is anything to save of it: an empty part is nothing, unless the whole is empty."""
    return bool(part.tensor.numel()) or not math.prod(part.shape)
