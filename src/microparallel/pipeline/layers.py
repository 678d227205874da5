"""A model as a list of layers, each of which takes what the one before it returned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from microparallel.errors import PartitionError
from microparallel.torch_private import children_of


@dataclass(frozen=True)
class NamedLayer:
    """A layer and its name in the whole model: `layers.3` holds the parameter `layers.3.weight`."""

    name: str
    module: nn.Module

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the layer's parameters under the names they have in the whole model, tied ones under each."""
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            yield self.whole_name(name), parameter

    def whole_name(self, name: str) -> str:
        """What a parameter or buffer of the layer is called in the whole model; a layer without a name is the model."""
        return f"{self.name}.{name}" if self.name else name


def layers_of(model: nn.Module | Sequence[nn.Module]) -> list[NamedLayer]:
    """List the layers of a model in order, each of which takes what the one before it returned.

    ```
    nn.Sequential, nn.ModuleList, a list or tuple    its modules               "0", "1", …
    a module with a method pipeline_layers()         what the method returns   their names in the module
    ```

    The method is for a model whose `forward` runs its layers one after the other and does nothing else to what they
    pass on.
    """
    if isinstance(model, nn.Module):
        layers = _layers_of_module(model)
        _check_nothing_is_left_out(model, layers)
    elif isinstance(model, list | tuple):
        layers = [_checked(str(index), module) for index, module in enumerate(model)]
    else:
        raise _uncuttable(model)
    if not layers:
        raise PartitionError(f"this {type(model).__name__} has no layers: a pipeline needs at least 1")
    return layers


def _layers_of_module(model: nn.Module) -> list[NamedLayer]:
    if callable(getattr(model, "pipeline_layers", None)):
        return _layers_it_names(model)
    # A subclass with a forward of its own may do more than run its children in order.
    plain = isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
    if not plain and not isinstance(model, nn.ModuleList):
        raise _uncuttable(model)
    # named_children() would leave out the second of two equal modules.
    return [_checked(name, module) for name, module in children_of(model).items()]


def _layers_it_names(model: Any) -> list[NamedLayer]:
    names = {id(module): name for name, module in model.named_modules() if name}
    layers = []
    for index, module in enumerate(model.pipeline_layers()):
        if id(module) not in names:
            raise PartitionError(
                f"{type(model).__name__}.pipeline_layers() returned a {type(module).__name__} at {index} that is not "
                "one of its submodules: assign it, as an nn.Module, to an attribute in __init__"
            )
        layers.append(NamedLayer(names[id(module)], module))
    return layers


def _checked(name: str, module: object) -> NamedLayer:
    if not isinstance(module, nn.Module):
        raise PartitionError(f"layer {name} is a {type(module).__name__}, not an nn.Module: wrap it in one")
    return NamedLayer(name, module)


def _uncuttable(model: object) -> PartitionError:
    return PartitionError(
        f"cannot tell where to cut a {type(model).__name__}: pass an nn.Sequential or a list of layers, "
        "or give it a method pipeline_layers() that returns its layers in order"
    )


def _check_nothing_is_left_out(model: nn.Module, layers: Sequence[NamedLayer]) -> None:
    """Refuse a model with a parameter or buffer of no layer: no stage would hold it."""
    held = {id(tensor) for layer in layers for _, tensor in named_tensors(layer.module)}
    for name, tensor in named_tensors(model):
        if id(tensor) not in held:
            raise PartitionError(
                f"{name} of this {type(model).__name__} is in none of its {len(layers)} layers, so no stage would "
                "hold it: move it into the layer that uses it"
            )


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer of a module, by name."""
    yield from module.named_parameters()
    yield from module.named_buffers()
