"""What one rank holds of a model and its optimizer, in each layout: to be saved, and to be loaded again.

```
                      whole model           stages of it           parts of it (FullyShardedDataParallel)
rank 0 saves          all parameters        layers 0, 1            w[0:6]
rank 1 saves          the same              layers 2, 3            w[6:10], b
optimizer             whole, or in parts    of these layers        of these parts
compressed gradients  what each replica has not sent
```

A checkpoint is that of the whole model, under the names of the plain one, so any layout reads what another has written.
An optimizer's state goes by the numbers that parameters have in an optimizer of the whole model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from microparallel.comms import Comms
from microparallel.comms.wire import gather_json
from microparallel.data_parallel import DataParallel, FullyShardedDataParallel
from microparallel.data_parallel.layout import Part
from microparallel.data_parallel.sharded_optimizer import SCALARS
from microparallel.errors import ConfigError, UsageError
from microparallel.pipeline import Pipeline
from microparallel.torch_private import compiled_of
from microparallel.train.checkpoint_reader import Checkpoint, StateReader, StoredTensor, read_whole


@runtime_checkable
class HasParts(Protocol):
    """An optimizer of which each rank holds the state of some elements only (ZeRO).

    `state_parts` returns what the `state_dict` of an optimizer of all elements would, with a `Part` for each tensor of
    which this rank has some elements, and without those of which it has none. `load_state_parts` takes the groups of
    such a state, and calls `read(index, key, start, stop)` for the elements that it needs.
    """

    def state_parts(self) -> dict[str, Any]:
        """Return this rank's part of the state."""

    def load_state_parts(self, groups: list[dict[str, Any]], read: StateReader) -> None:
        """Take this rank's part out of a whole state."""


class KeepsResiduals(Protocol):
    """A wrapper with `compress=`: DataParallel, say."""

    def compression_state(self) -> dict[str, Any]:
        """Return what this rank keeps from pass to pass."""

    def load_compression_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on with what all ranks had kept."""


def layout_of(comms: Comms, model: Any, optimizer: torch.optim.Optimizer | None) -> WholeModel:
    """The layout of a model as people's own scripts have it, model or not; every rank calls this."""
    if isinstance(model, Pipeline):
        return StagesOfModel(comms, model, optimizer, model.first_names(), _if_it_compresses(model))
    if isinstance(model, FullyShardedDataParallel):
        return PartsOfModel(comms, model, optimizer)
    if isinstance(model, DataParallel):
        return WholeModel(comms, compiled_of(model.module), optimizer, _if_it_compresses(model), model)
    if isinstance(model, DistributedDataParallel):
        return WholeModel(comms, compiled_of(model.module), optimizer)
    if isinstance(model, nn.Module):
        return WholeModel(comms, model, optimizer)
    raise UsageError(f"model={model!r}: give a module, or what mp.DataParallel, mp.Pipeline, … made of one")


def _if_it_compresses(model: KeepsResiduals) -> KeepsResiduals | None:
    return model if model.compression_state()["methods"] else None


class WholeModel:
    """Each rank has the whole model.

    Args:
        comms: the ranks.
        model: the plain model.
        optimizer: of its parameters; None if there is none.
        compressed: what keeps what was not sent of gradients, where they are compressed.
        wrapped: the model as its replicas average its gradients, if mp.DataParallel does that.
        learn_apart: whether each rank's optimizer has a state of its own.
    """

    def __init__(
        self,
        comms: Comms,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        compressed: KeepsResiduals | None = None,
        wrapped: DataParallel | None = None,
        *,
        learn_apart: bool = False,
    ) -> None:
        self.comms = comms
        self.model = model
        self.optimizer = optimizer
        self._compressed = compressed
        self._wrapped = wrapped
        self._learn_apart = learn_apart

    def contents(self) -> dict[str, Any]:
        """What `checkpoint.save` is given of model and optimizer; every rank must call it."""
        return {
            "model": self.model_parts(),
            "optimizer_state": self.optimizer_parts(),
            "first_names": self.first_names,
            "by_rank": self.residuals() | self._order(),
        }

    def load(self, checkpoint: Checkpoint) -> None:
        """Take this rank's share; every rank must call it."""
        self._load_states(checkpoint)
        self._load_residuals(checkpoint.stored_by_rank)
        self._load_order(checkpoint.stored_by_rank.get("gradients"))

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """What this rank has of the parameters, by their names in the whole model."""
        return self.model.named_parameters()

    @property
    def first_names(self) -> Mapping[str, str]:
        """For tensors that other ranks hold under other names, the name they are stored under."""
        return {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each whole tensor of which this rank has something, by all its names."""
        return {name: tuple(one.shape) for name, one in self.model.state_dict().items() if hasattr(one, "shape")}

    def model_parts(self) -> Mapping[str, torch.Tensor | Part]:
        """The model's tensors that this rank can save: all ranks have the same parameters, rank 0's buffers count."""
        state: dict[str, torch.Tensor] = self.model.state_dict()
        return state if self.comms.rank == 0 else _parameters_of(self.model.parameters(), state)

    # ── the optimizer ───────────────────────────────────────────────────────────────────────────────────────────

    def groups(self) -> list[list[str]]:
        """The names of the whole model's parameters in the groups of its optimizer; every rank must call it."""
        return self._own_groups()

    def _own_groups(self) -> list[list[str]]:
        """The names in the whole model of this rank's parameters, in the groups of its optimizer."""
        names = {parameter: name for name, parameter in self.named_parameters()}
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        for parameter in itertools.chain.from_iterable(group["params"] for group in groups):
            if parameter not in names:
                raise UsageError(
                    f"the optimizer updates a parameter of shape {list(parameter.shape)} that is none of the model's, "
                    "so it would not be saved: make it a part of the model, or give the optimizer model.parameters()"
                )
        return [[names[parameter] for parameter in group["params"]] for group in groups]

    def optimizer_parts(self) -> dict[str, Any]:
        """What this rank holds of the state of the whole model's optimizer; every rank must call it."""
        if self.optimizer is None:
            return {}
        if self._learn_apart:
            return {"by_rank": {f"rank_{self.comms.rank}": self.optimizer.state_dict()}}
        return self.optimizer.state_parts() if isinstance(self.optimizer, HasParts) else self.optimizer.state_dict()

    def _load_states(self, checkpoint: Checkpoint) -> None:
        self.model.load_state_dict(read_whole(checkpoint.stored_model))
        self._load_optimizer(self._own_part(checkpoint.stored_optimizer))

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        """Read the optimizer's state from the disk, or only this rank's part of it."""
        if self.optimizer is None:
            return
        if isinstance(self.optimizer, HasParts):
            self.optimizer.load_state_parts(read_whole(state["param_groups"]), StateReader(state["state"]))
        else:
            self.optimizer.load_state_dict(read_whole(state))

    def _own_part(self, state: dict[str, Any]) -> dict[str, Any]:
        """Find this rank's optimizer state; a rank that was not there before takes another's."""
        if "by_rank" not in state:
            return state
        by_rank = state["by_rank"]
        states: list[dict[str, Any]] = list(by_rank.values()) if isinstance(by_rank, dict) else by_rank  # of format 1
        return states[self.comms.rank % len(states)]

    # ── the order of gradients ──────────────────────────────────────────────────────────────────────────────────

    def _order(self) -> dict[str, Any]:
        """In which order gradients lie in buckets: with three ranks and more, the last bits of sums depend on it."""
        order = None if self._wrapped is None else self._wrapped.gradient_order()
        return {} if order is None else {"gradients": [self._saved_name(name) for name in order]}

    def _load_order(self, order: list[str] | None) -> None:
        if self._wrapped is not None and order is not None:
            names = {self._saved_name(name): name for name, _ in self._wrapped.named_parameters()}
            self._wrapped.expect_gradients([names.get(name, name) for name in order])

    # ── compressed gradients ────────────────────────────────────────────────────────────────────────────────────

    def residuals(self) -> dict[str, Any]:
        """What each rank has not sent of gradients; the state of the method is everyone's."""
        if self._compressed is None:
            return {}
        state = self._compressed.compression_state()
        residuals = {self._saved_name(name): residual for name, residual in state["residuals"].items()}
        return {"compression": state | {"residuals": {f"replica_{self._replica}": residuals}}}

    @property
    def _replica(self) -> int:
        """The number of this rank's replica of the model."""
        return self.comms.rank

    @property
    def _replicas(self) -> int:
        """How many replicas there are."""
        return self.comms.world_size

    def _saved_name(self, name: str) -> str:
        """What a residual is called in a checkpoint: as its parameter in the plain model."""
        return name

    def _own_name(self, name: str, holder: str) -> str:  # noqa: ARG002
        """What the wrapper calls a residual: here there is one for each parameter, whoever else held one before."""
        return name

    def _load_residuals(self, stored: Mapping[str, Any]) -> None:
        """Take this rank's share of what all replicas had not sent; nothing else is read."""
        if self._compressed is None or "compression" not in stored:
            return
        saved = stored["compression"]
        whole = {"passes": saved["passes"], "methods": read_whole(saved["methods"])}
        by_replica = {int(name.removeprefix("replica_")): one for name, one in saved["residuals"].items()}
        self._compressed.load_compression_state(
            [
                {**whole, "residuals": self._own_residuals(one) if number % self._replicas == self._replica else {}}
                for number, one in sorted(by_replica.items())
            ]
        )

    def _own_residuals(self, stored: Mapping[str, StoredTensor]) -> dict[str, torch.Tensor]:
        """Read what one replica had not sent, as far as this rank has the parameters, by the wrapper's names."""
        assert self._compressed is not None
        mine = (name.partition("@")[0] for name in self._compressed.compression_state()["residuals"])
        names = {self._saved_name(name): name for name in mine}
        residuals: dict[str, torch.Tensor] = {}
        for saved, residual in stored.items():
            base, _, holder = saved.partition("@")  # a parameter that stages share has one on each
            if base in names:
                name = self._own_name(names[base], holder)
                residuals[name] = residual.whole() + residuals.get(name, 0.0)
        return residuals


class ModelWithinLoss(WholeModel):
    """The wrapper, which keeps the residuals, has the model as a layer of its own, `model`."""

    def _saved_name(self, name: str) -> str:
        return name.removeprefix("model.")


class StagesOfModel(WholeModel):
    """The model is spread over the ranks of a pipeline; replicas have the same stages.

    Args:
        comms: the ranks.
        pipe: the pipeline.
        optimizer: of this rank's parameters.
        names: every name of every parameter of the whole model, with the first name of that parameter.
        compressed: the pipeline, where gradients are compressed.
    """

    def __init__(
        self,
        comms: Comms,
        pipe: Pipeline,
        optimizer: torch.optim.Optimizer | None,
        names: Mapping[str, str],
        compressed: KeepsResiduals | None = None,
    ) -> None:
        super().__init__(comms, pipe.own_layers, optimizer, compressed)
        self._pipe = pipe
        self._names = names

    @property
    def _replica(self) -> int:
        return self._pipe.replica

    @property
    def _replicas(self) -> int:
        return self._pipe.mesh.dp

    def _saved_name(self, name: str) -> str:
        base, at, holder = name.partition("@")
        return f"{self._names[base]}{at}{holder}"

    def _own_name(self, name: str, holder: str) -> str:
        return f"{name}@{holder}" if holder else name

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """The parameters of this rank's stages, by the first of their names in the whole model."""
        return ((self._names[name], parameter) for name, parameter in self._pipe.named_parameters())

    @property
    def first_names(self) -> Mapping[str, str]:
        """For weights that stages share, the first of their names in the whole model."""
        return self._names

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor of this rank's stages."""
        return {name: tuple(one.shape) for name, one in self._pipe.state_dict().items()}

    def model_parts(self) -> Mapping[str, torch.Tensor | Part]:
        """The tensors of this rank's stages that it can save: replicas have the same parameters, and buffers differ."""
        state = self._pipe.state_dict()
        return state if self._pipe.replica == 0 else _parameters_of(self._pipe.parameters(), state)

    def groups(self) -> list[list[str]]:
        """The parameters of each group of the whole model's optimizer, in the model's order; every rank calls this."""
        return self._whole_groups(self._own_groups())

    def optimizer_parts(self) -> dict[str, Any]:
        """The state of this rank's optimizer, with the numbers that its parameters have in one of the whole model."""
        mine = super().optimizer_parts()
        own = self._own_groups()
        groups, names = self._whole_groups(own), list(itertools.chain.from_iterable(own))
        if not mine:
            return mine
        order = _numbers(groups)
        return {
            "state": {order[names[index]]: state for index, state in mine["state"].items()},
            "param_groups": [
                {**group, "params": [order[name] for name in members]}
                for group, members in zip(mine["param_groups"], groups, strict=True)
            ],
        }

    def _whole_groups(self, mine: list[list[str]]) -> list[list[str]]:
        everyones = gather_json(mine, self.comms)
        if len({len(groups) for groups in everyones}) > 1:
            raise ConfigError(
                f"the optimizer has {sorted({len(groups) for groups in everyones})} groups of parameters on different "
                "ranks of a pipeline: make the same groups on each, empty ones too"
            )
        order = list(dict.fromkeys(self._names.values()))
        members = [{name for groups in everyones for name in groups[index]} for index in range(len(mine))]
        return [[name for name in order if name in group] for group in members]

    def _load_states(self, checkpoint: Checkpoint) -> None:
        own = self._own_groups()
        order = _numbers(self._whole_groups(own))
        stored = checkpoint.stored_model
        self._pipe.load_state_dict({name: stored[name].whole() for name in self._pipe.state_dict() if name in stored})
        if self.optimizer is None:
            return
        whole = self._own_part(checkpoint.stored_optimizer)
        names = enumerate(itertools.chain.from_iterable(own))
        state = {index: whole["state"][order[name]] for index, name in names if order[name] in whole["state"]}
        numbers = itertools.count()
        groups = [
            {**group, "params": [next(numbers) for _ in mine]}
            for group, mine in zip(whole["param_groups"], own, strict=True)
        ]
        self._load_optimizer({"state": state, "param_groups": groups})


class PartsOfModel(WholeModel):
    """Each rank has its part of every parameter. What is saved and read is a range of each tensor.

    Args:
        comms: the ranks.
        sharded: the model in parts.
        optimizer: one of torch's own, of this rank's parts.
    """

    def __init__(
        self, comms: Comms, sharded: FullyShardedDataParallel, optimizer: torch.optim.Optimizer | None
    ) -> None:
        super().__init__(comms, sharded.module, optimizer)
        self._sharded = sharded

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
        parts = self._sharded.parameter_parts()
        return {id(shard): parts[name] for name, shard in self.model.named_parameters()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each whole tensor."""
        parts = self._parts()
        whole = {name: (parts.get(id(tensor)), tensor) for name, tensor in self._tensors().items()}
        return {name: tuple(tensor.shape) if part is None else part.shape for name, (part, tensor) in whole.items()}

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
        if self.optimizer is None:
            return {}
        whole = self.optimizer.state_dict()
        state = {}
        for index, (shard, part) in enumerate(self._optimized(self.optimizer)):
            if index in whole["state"] and _is_kept(part):
                state[index] = {
                    key: Part(value.detach().reshape(-1), part.start, part.shape)
                    if isinstance(value, torch.Tensor) and value.dim() and value.shape == shard.shape
                    else value
                    for key, value in whole["state"][index].items()
                }
        return {"state": state, "param_groups": whole["param_groups"]}

    def _optimized(self, optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, Part]]:
        """What the optimizer updates, in its order: this rank's part of each parameter, and where that belongs."""
        parts = self._parts()
        return [(shard, parts[id(shard)]) for group in optimizer.param_groups for shard in group["params"]]

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
        if self.optimizer is None:
            return
        reader = StateReader(state["state"])
        mine = {}
        for index, (shard, part) in enumerate(self._optimized(self.optimizer)):
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


def _numbers(groups: Iterable[Iterable[str]]) -> dict[str, int]:
    """The numbers that parameters have in the state of an optimizer with these groups."""
    return {name: number for number, name in enumerate(itertools.chain.from_iterable(groups))}


def _parameters_of(parameters: Iterable[nn.Parameter], state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a state that are parameters."""
    memories = {parameter.data_ptr() for parameter in parameters}
    return {name: one for name, one in state.items() if isinstance(one, torch.Tensor) and one.data_ptr() in memories}
