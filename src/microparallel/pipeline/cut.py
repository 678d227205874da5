"""How a model is cut into pipeline stages: a list of layers, what each costs, and the evenest contiguous runs of them.

```
layers_of(model)       layers.0   layers.1   layers.2   layers.3   layers.4
what each costs              90         10         10         30         60
best_partition(…, 3)   └ stage 0┘ └─────────── stage 1 ─────────┘ └ stage 2┘
                             90                50                       60     → sizes [1, 3, 1]
```

A pipeline runs at the pace of its slowest stage, so the best cut is the one whose largest stage is smallest.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import nn

from microparallel.comms import Comms
from microparallel.comms.wire import gather_json
from microparallel.data_parallel.deferred import require_contents
from microparallel.data_parallel.replicate import require_same_model
from microparallel.data_parallel.wrapper import require_plain
from microparallel.errors import PartitionError, UsageError
from microparallel.pipeline.layers import NamedLayer, layer_times, layers_of
from microparallel.pipeline.parts import Part, joined

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
        example: for `"time"`, a micro-batch to measure with. No two measurements agree, so several ranks use
            `cut_together`, where one measures for all.
    """
    layers = layers_of(model)
    sizes = _sizes(layers, stages, balance, example)
    ends = list(accumulate(sizes))
    return [_joined(layers[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def _joined(layers: list[NamedLayer]) -> list[NamedLayer]:
    """A stage's layers, where those that are neighbouring parts of one model are one."""
    if not any(isinstance(layer.module, Part) for layer in layers):
        return layers
    names = {layer.module: layer.name for layer in layers}
    return [NamedLayer(names.get(module, ""), module) for module in joined([layer.module for layer in layers])]


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


def cut_together(
    model: nn.Module | Sequence[nn.Module],
    stages: int,
    balance: str | Sequence[int],
    example: Any,
    comms: Comms,
    *settings: str,
) -> list[list[NamedLayer]]:
    """Cut a model in the same places on all ranks, or raise on all of them; where layers are timed, rank 0 does it.

    They also raise if ranks have other settings of the pipeline, given as texts, than rank 0.
    """
    layers = layers_of(model)
    modules = nn.ModuleList(layer.module for layer in layers)
    require_contents(modules, "Pipeline")
    require_plain(modules, "Pipeline")
    if comms.world_size > 1:
        require_same_model(modules, comms, *settings)
    if balance != "time" or comms.world_size == 1:
        return cut(model, stages, balance, example)
    found: list[int] | str = []
    if comms.rank == 0:
        try:
            found = _sizes(layers, stages, balance, example)
        except UsageError as error:
            found = str(error)
    measured: list[int] | str = gather_json(found, comms)[0]
    if isinstance(measured, str):
        raise PartitionError(measured)
    return cut(model, stages, measured)


def shared_parameters(stages: Sequence[Sequence[NamedLayer]]) -> list[tuple[nn.Parameter, list[tuple[int, str]]]]:
    """List the parameters that more than one stage uses, each with the stages and its names there.

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


def warn_of_whole_models(stages: Sequence[Sequence[NamedLayer]]) -> None:
    """Warn if every stage holds most of the model: then a pipeline saves no memory, and sums most gradients."""
    if len(stages) == 1:
        return
    held = [{parameter for layer in stage for parameter in layer.module.parameters()} for stage in stages]
    of_all = sum(parameter.numel() for parameter in set.intersection(*held))
    of_any = sum(parameter.numel() for parameter in set.union(*held))
    if 2 * of_all > of_any:
        warnings.warn(
            f"each of the {len(stages)} stages holds {of_all} of the model's {of_any} parameters, so every rank keeps "
            "nearly the whole model: do the layers hold the model they come from? mp.pipeline_layers(model) cuts one",
            stacklevel=3,
        )


# ── the evenest partition ───────────────────────────────────────────────────────────────────────────────────────────


def best_partition(costs: Sequence[float], stages: int) -> list[int]:
    """Cut layers into contiguous runs so that the most costly run costs as little as possible; return their lengths.

    Of several such cuts, take the one with the smallest sum of squares, which spreads the rest evenly; of several of
    those, the one whose early runs are longer.

    >>> best_partition([90, 10, 10, 30, 60], 3)
    [1, 3, 1]
    """
    check_enough_layers(len(costs), stages)
    before = list(accumulate(_as_integers(costs), initial=0))  # before[i]: what layers 0 … i - 1 cost together
    limit = _smallest_limit(before, stages)
    return _evenest_within(before, stages, limit)


def check_enough_layers(layers: int, stages: int) -> None:
    """Refuse more stages than there are layers."""
    if stages < 1:
        raise PartitionError(f"stages={stages}: a pipeline has at least 1 stage")
    if stages > layers:
        raise PartitionError(
            f"{stages} stages need at least {stages} layers, and this model has {layers}; "
            "use fewer ranks or stages a rank, or a deeper model"
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
