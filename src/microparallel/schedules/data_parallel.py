"""One step of data parallelism: every rank has all layers and its own share of the batch.

A layer is a stage here, and rank r's share of the batch is micro-batch r.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from microparallel.errors import UsageError
from microparallel.program import (
    AUTO,
    AllReduce,
    Backward,
    Bucket,
    Forward,
    Join,
    Op,
    OptimizerStep,
    Program,
    TrainingStep,
)

Ranges = tuple[tuple[int, int], ...]


def ddp(layers: int, buckets: int, ranks: int, algorithm: str = AUTO) -> Program:
    """All-reduce each bucket as soon as its layers have their gradients, while earlier layers still compute.

    ```
    4 layers, 2 buckets
    compute  F0 F1 F2 F3 B3 B2 B1 B0          S
    comm                       [all-reduce 3, 2][all-reduce 1, 0]
    ```

    Backward begins at the last layer, so the first bucket holds the last layers.
    """
    if not 1 <= buckets <= layers:
        raise UsageError(f"buckets={buckets}: {layers} layers can be put into 1 to {layers} buckets")
    ranges = _ranges(layers, buckets)

    def backward(rank: int) -> list[Op]:
        ops: list[Op] = []
        for index, (start, stop) in enumerate(ranges):
            ops += [Backward(layer, rank) for layer in reversed(range(start, stop))]
            ops.append(AllReduce(Bucket(index), "dp", algorithm))
        return ops

    return _program("ddp", layers, ranks, ranges, backward)


def ddp_naive(layers: int, ranks: int, algorithm: str = AUTO) -> Program:
    """First the whole backward, then one all-reduce after another, a layer each; nothing overlaps.

    ```
    compute  F0 F1 F2 F3 B3 B2 B1 B0                     S
    comm                            [3]  [2]  [1]  [0]
    ```
    """
    ranges = _ranges(layers, layers)

    def backward(rank: int) -> list[Op]:
        ops: list[Op] = [Backward(layer, rank) for layer in reversed(range(layers))]
        return [*ops, Join(), *(AllReduce(Bucket(index), "dp", algorithm) for index in range(layers))]

    return _program("ddp-naive", layers, ranks, ranges, backward)


def _program(name: str, layers: int, ranks: int, ranges: Ranges, backward: Callable[[int], list[Op]]) -> Program:
    orders = [
        (*(Forward(layer, rank) for layer in range(layers)), *backward(rank), OptimizerStep()) for rank in range(ranks)
    ]
    return Program(name, TrainingStep(layers, ranks, ranges), tuple(orders))


def _ranges(layers: int, buckets: int) -> Ranges:
    """Neighbouring layers, as evenly as possible, beginning at the end."""
    bounds = [layers - index * layers // buckets for index in range(buckets + 1)]
    return tuple((start, stop) for stop, start in itertools.pairwise(bounds))
