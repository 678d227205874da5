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

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import nn

from microparallel.errors import PartitionError, UsageError
from microparallel.pipeline.layer_times import layer_times
from microparallel.pipeline.layers import NamedLayer, layers_of
from microparallel.pipeline.partition import best_partition, check_enough_layers

BALANCES = ("auto", "parameters", "time")


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
    check_enough_layers(len(layers), stages)  # before minutes of measuring, not after
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
