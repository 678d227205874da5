"""How a model is cut into pipeline stages: a list of layers, what each costs, and the evenest contiguous runs of them.

```
layers_of(model)       layers.0   layers.1   layers.2   layers.3   layers.4
what each costs              90         10         10         30         60
best_partition(…, 3)   └ stage 0┘ └─────────── stage 1 ─────────┘ └ stage 2┘
                             90                    50                   60      → sizes [1, 3, 1]
```

A pipeline runs at the pace of its slowest stage, so the best cut is the one whose largest stage is smallest.
"""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from microparallel.errors import PartitionError, UsageError

BALANCES = ("auto", "parameters", "time")


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


# ── a model's layers ────────────────────────────────────────────────────────────────────────────────────────────────


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
    return [_checked(name, module) for name, module in model._modules.items()]


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
    held = {id(tensor) for layer in layers for _, tensor in _named_tensors(layer.module)}
    for name, tensor in _named_tensors(model):
        if id(tensor) not in held:
            raise PartitionError(
                f"{name} of this {type(model).__name__} is in none of its {len(layers)} layers, so no stage would "
                "hold it: move it into the layer that uses it"
            )


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


# ── where to cut ────────────────────────────────────────────────────────────────────────────────────────────────────


def cut(
    model: nn.Module | Sequence[nn.Module], stages: int, balance: str | Sequence[int] = "auto", example: Any = None
) -> list[list[NamedLayer]]:
    """Cut a model into stages, each a contiguous run of its layers.

    Args:
        model: what `layers_of` takes.
        stages: how many.
        balance: `"parameters"` evens out their number, `"time"` the measured time of each layer, and `[3, 4, 5, 4]`
            is a number of layers for each stage, by hand. `"auto"` is `"parameters"`.
        example: for `"time"`, a micro-batch to measure with. No two measurements agree, so where several ranks have to
            cut alike, one measures for all.
    """
    layers = layers_of(model)
    sizes = _sizes(layers, stages, balance, example)
    ends = list(accumulate(sizes))
    return [layers[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _sizes(layers: Sequence[NamedLayer], stages: int, balance: str | Sequence[int], example: Any) -> list[int]:
    if not isinstance(balance, str):
        return _sizes_by_hand(len(layers), stages, list(balance))
    if balance not in BALANCES:
        choices = ", ".join(f'"{choice}"' for choice in BALANCES)
        raise UsageError(f'balance="{balance}": choose one of {choices}, or give a number of layers for each stage')
    if balance != "time":
        return best_partition(_parameter_counts(layers), stages)
    if example is None:
        raise UsageError('balance="time" measures the layers on a micro-batch: pass one as example=')
    _check_enough_layers(len(layers), stages)  # before minutes of measuring, not after
    return best_partition(layer_times(layers, example), stages)


def _sizes_by_hand(layers: int, stages: int, balance: list[int]) -> list[int]:
    if len(balance) != stages:
        raise PartitionError(f"balance={balance} is for {len(balance)} stages, and there are {stages}: one number each")
    for stage, size in enumerate(balance):
        if not isinstance(size, int) or size < 1:
            raise PartitionError(f"balance={balance}: stage {stage} has {size} layers, and needs at least 1")
    if sum(balance) != layers:
        raise PartitionError(f"balance={balance} adds up to {sum(balance)} layers, and this model has {layers}")
    return balance


def _parameter_counts(layers: Sequence[NamedLayer]) -> list[int]:
    """Count each layer's parameters; a model that has none at all is cut into equal numbers of layers."""
    counts = [sum(parameter.numel() for parameter in layer.module.parameters()) for layer in layers]
    return counts if any(counts) else [1] * len(counts)


def best_partition(costs: Sequence[float], stages: int) -> list[int]:
    """Cut layers into contiguous runs so that the most costly run costs as little as possible; return their lengths.

    Of several such cuts, take the one with the smallest sum of squares, which spreads the rest evenly; of several of
    those, the one whose early runs are longer.

    >>> best_partition([90, 10, 10, 30, 60], 3)
    [1, 3, 1]
    """
    _check_enough_layers(len(costs), stages)
    before = list(accumulate(_as_integers(costs), initial=0))  # before[i]: what layers 0 … i - 1 cost together
    limit = _smallest_limit(before, stages)
    return _evenest_within(before, stages, limit)


def _check_enough_layers(layers: int, stages: int) -> None:
    if stages < 1:
        raise PartitionError(f"stages={stages}: a pipeline has at least 1 stage")
    if stages > layers:
        raise PartitionError(
            f"{stages} stages need at least {stages} layers, and this model has {layers}; "
            "use fewer ranks or chunks, or a deeper model"
        )


def _as_integers(costs: Sequence[float]) -> list[int]:
    """Scale the costs to whole numbers, so that their sums are exact and equal cuts compare equal."""
    for layer, cost in enumerate(costs):
        if not 0 <= cost < math.inf:
            raise UsageError(f"layer {layer} costs {cost}: a cost is a finite number of at least 0")
    ratios = [cost.as_integer_ratio() for cost in costs]
    scale = math.lcm(*(denominator for _, denominator in ratios))
    return [numerator * (scale // denominator) for numerator, denominator in ratios]


def _smallest_limit(before: list[int], stages: int) -> int:
    """Find the least cost that no run of the best partition exceeds, by bisection."""
    too_low, enough = -1, before[-1]
    while enough - too_low > 1:
        middle = (too_low + enough) // 2
        if _fits(before, stages, middle):
            enough = middle
        else:
            too_low = middle
    return enough


def _fits(before: list[int], stages: int, limit: int) -> bool:
    """Say whether that many runs within the limit hold all layers, by making each as long as it may be.

    Fewer runs than stages are fine: a run can always be cut again, and its parts cost no more than it did.
    """
    start, layers = 0, len(before) - 1
    for _ in range(stages):
        start = bisect_right(before, before[start] + limit) - 1
    return start == layers


def _evenest_within(before: list[int], stages: int, limit: int) -> list[int]:
    """Find the cut within the limit with the smallest sum of squares, by dynamic programming from the right.

    `squares[i]` is the least sum for layers i, i + 1, … in the runs placed so far, and `ends` holds, for each number
    of runs, where the first of them then ends.
    """
    layers = len(before) - 1
    squares, first, ends = {layers: 0}, layers, []
    for runs in range(1, stages + 1):
        # The layers at which that many runs may begin: near enough for the limit, and leaving every run a layer.
        first = max(stages - runs, bisect_left(before, before[first] - limit))
        squares, run_ends = _prepend_run(before, limit, squares, range(first, layers - runs + 1))
        ends.append(run_ends)
    sizes, start = [], 0
    for run_ends in reversed(ends):
        sizes.append(run_ends[start] - start)
        start = run_ends[start]
    return sizes


def _prepend_run(
    before: list[int], limit: int, squares: dict[int, int], starts: range
) -> tuple[dict[int, int], dict[int, int]]:
    """Put one more run before the others: for each start, the least sum of squares and the end of the run in it.

    A later start never has an earlier best end (squares grow ever faster), so the best end of the middle start halves
    the search on both sides: n log n steps instead of n².
    """
    lowest, highest = min(squares), max(squares)
    best: dict[int, int] = {}
    run_ends: dict[int, int] = {}
    open_spans = [(starts.start, starts.stop - 1, lowest, highest)]
    while open_spans:
        left, right, low, high = open_spans.pop()
        if left > right:
            continue
        start = (left + right) // 2
        reach = bisect_right(before, before[start] + limit) - 1
        ends = range(max(low, start + 1), min(high, reach) + 1)
        # Of equal sums, the later end: longer runs first.
        best[start], later = min(((before[end] - before[start]) ** 2 + squares[end], -end) for end in ends)
        run_ends[start] = -later
        open_spans += [(left, start - 1, low, run_ends[start]), (start + 1, right, run_ends[start], high)]
    return best, run_ends


# ── what a layer costs in time ──────────────────────────────────────────────────────────────────────────────────────


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
    tensors += [tensor for layer in layers for _, tensor in _named_tensors(layer.module)]
    return list(dict.fromkeys(tensor.device for tensor in tensors if tensor.is_cuda))


@contextmanager
def _left_as_found(layers: Sequence[NamedLayer]) -> Iterator[None]:
    """Take the gradients away, and put them and the buffers back at the end."""
    gradients = {parameter: parameter.grad for layer in layers for parameter in layer.module.parameters()}
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for layer in layers
        for module in layer.module.modules()
        for name, buffer in module._buffers.items()
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


# ── what stages share ───────────────────────────────────────────────────────────────────────────────────────────────


def shared_parameters(stages: Sequence[Sequence[NamedLayer]]) -> list[tuple[nn.Parameter, list[tuple[int, str]]]]:
    """List the parameters of more than one stage, each with the stage and name of every place it has.

    A pipeline sums their gradients over these stages.
    """
    places: dict[nn.Parameter, list[tuple[int, str]]] = {}
    for stage, layers in enumerate(stages):
        for layer in layers:
            for name, parameter in layer.named_parameters():
                known = places.setdefault(parameter, [])
                if (stage, name) not in known:
                    known.append((stage, name))
    return [(parameter, known) for parameter, known in places.items() if known[0][0] != known[-1][0]]
