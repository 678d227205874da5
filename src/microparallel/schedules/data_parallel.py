"""One step of data parallelism: every rank has all layers and its own share of the batch.

A layer is a stage here, and rank r's share of the batch is micro-batch r.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from microparallel.errors import UsageError
from microparallel.program import (
    AUTO,
    AllReduce,
    Backward,
    Broadcast,
    Bucket,
    Forward,
    ForwardStages,
    Join,
    Named,
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


def data_parallel_step(
    buckets: int,
    ranks: int,
    microbatches: int = 1,
    *,
    overlap: bool = True,
    buffers: bool = False,
    weights: bool = False,
    order: bool = False,
    samples: bool = False,
    loss: bool = False,
) -> Program:
    """The step that `DataParallel` follows: stages are buckets of gradients, and backward is as many operations.

    ```
    2 buckets, 2 micro-batches on each of 2 ranks: gradients are summed when those of the last have been added
    rank 0: F0:2.0 B1.0 B0.0 F0:2.2 B1.2 *U0@dp B0.2 *U1@dp S
    rank 1: F0:2.1 B1.1 B0.1 F0:2.3 B1.3 *U0@dp B0.3 *U1@dp S
    ```

    Micro-batch j of rank r is j × ranks + r. What else the ranks share stands where it is shared:

    ```
    rank 0: *:samples@dp = ^:buffers@dp/0 = F0:1.0 *:weights@dp = B0.0 *U0@dp ^:order@dp/0 *:loss@dp S
    ```

    Args:
        buckets: how many there are.
        ranks: how many replicas.
        microbatches: of each rank.
        overlap: whether backward goes on while a bucket travels; otherwise it waits for each.
        buffers: whether rank 0's buffers are copied to all before the last forward.
        weights: whether the ranks first tell each other who is there, and how much each counts.
        order: whether they share the order in which gradients came, as after the first backward.
        samples: whether they count the samples of all.
        loss: whether they sum the loss.
    """
    if min(buckets, ranks, microbatches) < 1:
        raise UsageError(f"buckets={buckets}, ranks={ranks}, microbatches={microbatches}: at least 1 each is needed")

    def operations(rank: int) -> Iterator[Op]:
        if samples:
            yield from (AllReduce(Named("samples"), "dp"), Join())
        for number in range(microbatches):
            last = number == microbatches - 1
            microbatch = number * ranks + rank
            if last and buffers:
                yield from (Broadcast(Named("buffers"), "dp", 0), Join())
            yield ForwardStages(0, buckets, microbatch)
            if last and weights:
                yield from (AllReduce(Named("weights"), "dp"), Join())
            for bucket in range(buckets):
                yield Backward(buckets - 1 - bucket, microbatch)
                if last:
                    yield AllReduce(Bucket(bucket), "dp")
                    yield from () if overlap else (Join(),)
        if order:
            yield Broadcast(Named("order"), "dp", 0)
        if loss:
            yield AllReduce(Named("loss"), "dp")
        yield OptimizerStep()

    ranges = tuple((buckets - 1 - bucket, buckets - bucket) for bucket in range(buckets))
    goal = TrainingStep(buckets, ranks * microbatches, ranges)
    return Program("ddp", goal, tuple(tuple(operations(rank)) for rank in range(ranks)))


def _program(name: str, layers: int, ranks: int, ranges: Ranges, backward: Callable[[int], list[Op]]) -> Program:
    orders = [
        (*(Forward(layer, rank) for layer in range(layers)), *backward(rank), OptimizerStep()) for rank in range(ranks)
    ]
    return Program(name, TrainingStep(layers, ranks, ranges), tuple(orders))


def _ranges(layers: int, buckets: int) -> Ranges:
    """Neighbouring layers, as evenly as possible, beginning at the end."""
    bounds = [layers - index * layers // buckets for index in range(buckets + 1)]
    return tuple((start, stop) for stop, start in itertools.pairwise(bounds))
