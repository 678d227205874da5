"""A model as a list of layers, each of which takes what the one before it returned, and what each costs in time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from microparallel.errors import PartitionError, UsageError
from microparallel.pipeline.parts import Part
from microparallel.torch_private import buffers_of, children_of, has_forward_hooks, pytree


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
    mp.pipeline_layers(model)                        parts of the model        their parameters have the model's names
    a module with a method pipeline_layers()         what the method returns   their names in the module; or it returns
                                                                               mp.pipeline_layers(self, at=[…])
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


def has_layers(model: nn.Module) -> bool:
    """Whether a module says what its layers are; one with a `forward` of its own needs `mp.pipeline_layers`."""
    # A subclass with a forward of its own may do more than run its children in order.
    plain = isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
    return plain or isinstance(model, nn.ModuleList) or callable(getattr(model, "pipeline_layers", None))


def _layers_of_module(model: nn.Module) -> list[NamedLayer]:
    if not has_layers(model):
        raise _uncuttable(model)
    if callable(getattr(model, "pipeline_layers", None)):
        return _layers_it_names(model)
    # named_children() would leave out the second of two equal modules.
    return [_checked(name, module) for name, module in children_of(model).items()]


def _layers_it_names(model: Any) -> list[NamedLayer]:
    names = {id(module): name for name, module in model.named_modules() if name}
    layers = []
    for index, module in enumerate(model.pipeline_layers()):
        if isinstance(module, Part):  # the method called mp.pipeline_layers, to say where to cut
            layers.append(_checked(str(index), module))
            continue
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
    return NamedLayer("" if isinstance(module, Part) else name, module)


def _uncuttable(model: object) -> PartitionError:
    return PartitionError(
        f"cannot tell where to cut a {type(model).__name__}: pass an nn.Sequential or a list of layers, "
        "mp.pipeline_layers(model), or give it a method pipeline_layers() that returns its layers in order"
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


# ── random numbers ──────────────────────────────────────────────────────────────────────────────────────────────────

# Layers of torch that are known to draw none, and what holds them. Seeding generators takes as long as a small layer.
_DRAW_NOTHING = (
    *(nn.Identity, nn.Flatten, nn.Unflatten, nn.Linear, nn.Bilinear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus),
    *(
        nn.Softmax,
        nn.LogSoftmax,
        nn.LayerNorm,
        nn.GroupNorm,
        nn.RMSNorm,
        nn.BatchNorm1d,
        nn.BatchNorm2d,
        nn.BatchNorm3d,
    ),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Sequential, nn.ModuleList),
)


def may_draw(layer: nn.Module) -> bool:
    """Whether a layer may draw random numbers; one of another class than torch's, or ours, or with hooks, may."""
    return any(
        (type(module) not in _DRAW_NOTHING and not type(module).__module__.startswith("microparallel.models."))
        or has_forward_hooks(module)
        for module in layer.modules()
    )


# ── what each layer costs ───────────────────────────────────────────────────────────────────────────────────────────


def layer_times(layers: Sequence[NamedLayer], example: Any, repeats: int = 5) -> list[float]:
    """Measure the seconds of forward and backward of each layer (the median), on what the layer before it returned.

    Afterwards gradients, buffers (such as the running statistics of a BatchNorm) and random numbers are as before.
    """
    if repeats < 1:
        raise UsageError(f"repeats={repeats}: each layer is measured at least once")
    devices = _cuda_devices(layers, example)
    times, passed_on = [], example
    with torch.random.fork_rng(devices), torch.enable_grad(), left_as_found([layer.module for layer in layers]):
        for layer in layers:
            try:
                seconds, passed_on = _layer_time(layer.module, passed_on, repeats, devices)
            except Exception as error:
                error.add_note(f"while layer {layer.name} ({type(layer.module).__name__}) was timed on the example")
                raise
            times.append(seconds)
    return times


def _layer_time(module: nn.Module, passed_on: Any, repeats: int, devices: Sequence[torch.device]) -> tuple[float, Any]:
    seconds = []
    for _ in range(1 + repeats):  # the first warms up: it allocates memory and chooses kernels
        module.zero_grad(set_to_none=True)
        inputs = pytree.tree_map_only(torch.Tensor, _as_received, passed_on)
        forward, outputs = _timed(devices, module, inputs)
        roots = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        gradients = [torch.ones_like(root) for root in roots]
        backward, _ = _timed(devices, _backward, roots, gradients)
        seconds.append(forward + backward)
    module.zero_grad(set_to_none=True)
    return statistics.median(seconds[1:]), pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)


def _as_received(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as a stage would receive it; a copy, since a layer may change its input in place, but no leaf."""
    received = tensor.detach()
    if received.is_floating_point() or received.is_complex():
        received.requires_grad_()
    return received.clone()


def _backward(roots: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
    if roots:
        torch.autograd.backward(roots, gradients)


def _timed(devices: Sequence[torch.device], work: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    _synchronise(devices)
    started = time.perf_counter()
    result = work(*arguments)
    _synchronise(devices)
    return time.perf_counter() - started, result


def _synchronise(devices: Sequence[torch.device]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)


def _cuda_devices(layers: Sequence[NamedLayer], example: Any) -> list[torch.device]:
    tensors = [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, torch.Tensor)]
    tensors += [tensor for layer in layers for _, tensor in named_tensors(layer.module)]
    return list(dict.fromkeys(tensor.device for tensor in tensors if tensor.is_cuda))


@contextmanager
def left_as_found(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Remove the gradients; at the end restore them and the buffers."""
    gradients = {parameter: parameter.grad for layer in layers for parameter in layer.parameters()}
    for parameter in gradients:
        parameter.grad = None
    with buffers_left_as_found(layers):
        try:
            yield
        finally:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient


@contextmanager
def buffers_left_as_found(layers: Sequence[nn.Module]) -> Iterator[None]:
    """At the end restore the buffers, such as the running statistics of a BatchNorm; autograd does not notice."""
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for layer in layers
        for module in layer.modules()
        for name, buffer in buffers_of(module).items()
    ]
    try:
        yield
    finally:
        for module, name, buffer, contents in buffers:
            if buffer is not None and contents is not None:
                buffer.data.copy_(contents)
            setattr(module, name, buffer)  # a layer may also have put another tensor in its place
