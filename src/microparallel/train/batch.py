"""A batch as a model takes it: what `forward` is called with, what its outputs are compared with, and the loss of both.

```
a sample is             the model is called as        the loss
(x, y)                  model(x)                      loss_fn(outputs, y)
(x, y)                  model(x, y)                   its own: forward needs both, or names one `targets`
(a, b, y)               model(a, b) or (a, b, y)      the same
{"ids": …, "labels": …} model(ids=…, labels=…)        its own, if forward takes the labels by name
{"x": …, "labels": …}   model(x=…)                    loss_fn(outputs, labels)
```
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from microparallel.comms.calls import describe
from microparallel.errors import DataError, UsageError
from microparallel.models.loss import Loss, LossFunction, cross_entropy, mean_squared_error

TARGETS = ("labels", "label", "targets", "target")  # what a dict calls that with which outputs are compared


@dataclass(frozen=True)
class Batch:
    """Some samples, put together for one call of the model.

    Attributes:
        arguments: what the model is given by position.
        named: what it is given by name.
        targets: what its outputs are compared with.
        samples: how many samples these are.
        own_loss: whether the model computes its loss itself.
    """

    arguments: tuple[Any, ...]
    named: dict[str, Any]
    targets: Any
    samples: int
    own_loss: bool = False

    def __len__(self) -> int:
        """Count the samples: steps that take pairs of inputs and targets ask the targets for it."""
        return self.samples

    @property
    def pair(self) -> tuple[Batch, Batch]:
        """The batch as the inputs and targets of a step: `ModelWithLoss` takes both out of it."""
        return self, self


EMPTY = Batch((), {}, None, 0)  # of a rank that has no samples in a step


def placed(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Bring a batch, which may be a nest, to a device, and its real numbers to a dtype; every mapping becomes a dict.

    From pinned memory the copy to a GPU runs in the background: the GPU computes with it only after it has arrived.
    """
    if isinstance(value, torch.Tensor):
        kind = dtype if value.is_floating_point() else value.dtype
        return value.to(device, kind, non_blocking=device.type == "cuda")
    if isinstance(value, Mapping):
        return {key: placed(part, device, dtype) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(placed(part, device, dtype) for part in value))
    if isinstance(value, list | tuple):
        return type(value)(placed(part, device, dtype) for part in value)
    return value


# ── how a model is called ───────────────────────────────────────────────────────────────────────────────────────────


class ModelSignature:
    """What a model's `forward` takes, which decides how a batch is passed to it.

    Args:
        model: the model.
        has_loss: whether a loss function computes the loss from its outputs (`--loss`).
        one_argument: whether it is called with one value: the layers of a pipeline are.
    """

    def __init__(self, model: nn.Module, has_loss: bool, one_argument: bool = False) -> None:
        self._model = type(model).__name__
        self._has_loss = has_loss
        self._one_argument = one_argument
        parameters = list(inspect.signature(model.forward).parameters.values())
        kinds = {parameter.kind for parameter in parameters}
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        single = [parameter for parameter in parameters if parameter.kind not in several]
        self._names = [parameter.name for parameter in single]
        self._required = [parameter.name for parameter in single if parameter.default is inspect.Parameter.empty]
        self._any_name = inspect.Parameter.VAR_KEYWORD in kinds
        positional = sum(parameter.kind in by_position for parameter in parameters)
        self._most = None if inspect.Parameter.VAR_POSITIONAL in kinds else positional

    def __str__(self) -> str:
        return f"forward({', '.join(self._names)}) of {self._model}"

    def batch(self, collated: Any, samples: int) -> Batch:
        """Decide what of a batch the model is called with, and what its outputs are compared with."""
        if isinstance(collated, Mapping):
            return self._by_name(dict(collated), samples)
        if isinstance(collated, tuple | list) and len(collated) > 1:
            return self._by_position(tuple(collated), samples)
        return Batch((collated,), {}, collated, samples, own_loss=not self._has_loss)

    def _by_position(self, values: tuple[Any, ...], samples: int) -> Batch:
        *inputs, targets = values
        if self._one_argument:
            return Batch((inputs[0] if len(inputs) == 1 else tuple(inputs),), {}, targets, samples)
        takes_targets = len(self._required) >= len(values) or ("targets" in self._names and not self._has_loss)
        arguments = values if takes_targets else tuple(inputs)
        if len(self._required) > len(arguments) or (self._most is not None and len(arguments) > self._most):
            raise DataError(
                f"a sample has {len(values)} values, of which the last is the target, and {self} takes "
                f"{len(self._required)} of them: return as many from the data, or dicts with these names"
            )
        return Batch(arguments, {}, targets, samples, own_loss=takes_targets and not self._has_loss)

    def _by_name(self, values: dict[str, Any], samples: int) -> Batch:
        target = next((name for name in TARGETS if name in values), None)
        if self._one_argument:
            inputs = {name: value for name, value in values.items() if name != target}
            return Batch((inputs,), {}, values if target is None else values[target], samples)
        named = {name: value for name, value in values.items() if self._any_name or name in self._names}
        if not named and len(self._required) == 1:  # it takes the whole batch
            return Batch((values,), {}, values.get(target or "", values), samples, own_loss=not self._has_loss)
        missing = [name for name in self._required if name not in named]
        if missing or not named:
            raise DataError(
                f"{self} needs {', '.join(map(repr, missing or self._names))}, and the samples have "
                f"{', '.join(map(repr, values))}: give a sample the names of its arguments"
            )
        left = [name for name in values if name not in named]
        own_loss = not self._has_loss and (not left if target is None else target in named)
        if target is None and len(left) == 1 and not own_loss:
            target = left[0]
        return Batch((), named, values if target is None else values[target], samples, own_loss)


# ── a model and its loss ────────────────────────────────────────────────────────────────────────────────────────────


class ModelWithLoss(nn.Module):
    """A model that is called with a `Batch`, and returns the loss: what every strategy trains.

    Args:
        model: any model.
        loss_fn: the mean loss of outputs and targets, or (sum, count); None for what fits the targets.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction | None) -> None:
        super().__init__()
        self.model = model
        self.loss_fn: LossFunction = loss_fn or fitting_loss

    def forward(self, batch: Batch, _targets: Any = None) -> Loss:
        """The loss of a batch, in which the targets are."""
        return self.loss(self.outputs(batch), batch)

    def __call__(self, batch: Batch, targets: Any = None) -> Loss:
        """Call `forward` without torch's hooks: what is recorded as a forward is the model inside, by its own name."""
        return self.forward(batch, targets)

    def outputs(self, batch: Batch) -> Any:
        """What the model returns."""
        return self.model(*batch.arguments, **batch.named)

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        """The loss of these outputs."""
        if batch.own_loss:
            return own_loss(outputs, type(self.model).__name__)
        return self.loss_fn(outputs, batch.targets)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's own, without a prefix: errors call a parameter what its owner does."""
        return self.model.named_parameters(prefix, recurse, remove_duplicate)


def own_loss(outputs: Any, model: str) -> Loss:
    """Find the loss in what a model returned: a number, an object or dict with `loss`, or a tuple that begins with it.

    A tuple of two numbers is (sum, count).
    """
    found = outputs
    if isinstance(outputs, Mapping):
        found = outputs.get("loss")
    elif isinstance(outputs, tuple | list) and outputs and not hasattr(outputs, "loss"):
        if len(outputs) == 2 and all(_is_number(one) for one in outputs):
            return outputs[0], outputs[1]
        found = outputs[0]
    elif not isinstance(outputs, torch.Tensor):
        found = getattr(outputs, "loss", None)
    if not (isinstance(found, torch.Tensor) and found.numel() == 1):
        what = describe(outputs) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
        raise UsageError(
            f"{model} was given all of a sample, targets too, and returned {what} without a loss: return the loss, "
            "an object with .loss or a dict with 'loss', or name a loss of its outputs with --loss"
        )
    return found.reshape(())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def fitting_loss(outputs: Any, targets: Any) -> torch.Tensor:
    """Cross-entropy for whole-number targets, and the mean squared error for real ones."""
    if not (isinstance(outputs, torch.Tensor) and isinstance(targets, torch.Tensor)):
        raise UsageError(
            f"the model returned {type(outputs).__name__} and the targets are {type(targets).__name__}: name a loss "
            "that compares them with --loss my_module:my_loss, or let forward take the targets and return the loss"
        )
    return (mean_squared_error if targets.is_floating_point() else cross_entropy)(outputs, targets)
