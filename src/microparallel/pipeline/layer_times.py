"""What each layer costs in time: forward and backward, measured one layer after another."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from microparallel.errors import UsageError
from microparallel.pipeline.layers import NamedLayer, named_tensors
from microparallel.torch_private import buffers_of, pytree


def layer_times(layers: Sequence[NamedLayer], example: Any, repeats: int = 5) -> list[float]:
    """Measure the seconds of forward and backward of each layer (the median), on what the layer before it returned.

    Gradients, buffers (such as the running statistics of a BatchNorm) and random numbers are as before afterwards.
    """
    if repeats < 1:
        raise UsageError(f"repeats={repeats}: measuring takes at least 1")
    devices = _cuda_devices(layers, example)
    times, passed_on = [], example
    with torch.random.fork_rng(devices), torch.enable_grad(), _left_as_found(layers):
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
    """Make of a tensor what a stage would receive; a copy, because a layer may work in place (not on a leaf)."""
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
def _left_as_found(layers: Sequence[NamedLayer]) -> Iterator[None]:
    """Take the gradients away, and put them and the buffers back at the end."""
    gradients = {parameter: parameter.grad for layer in layers for parameter in layer.module.parameters()}
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for layer in layers
        for module in layer.module.modules()
        for name, buffer in buffers_of(module).items()
    ]
    for parameter in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for module, name, buffer, contents in buffers:
            if buffer is not None and contents is not None:
                buffer.detach().copy_(contents)
            setattr(module, name, buffer)  # a layer may also have put another tensor in its place
