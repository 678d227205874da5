"""ZeRO: data parallelism in which each rank keeps only its part of the optimizer's state, of the gradients, ….

Every rank computes with the whole model on its own share of the batch, as in `data_parallel.py`. An all-reduce is a
reduce-scatter and then an all-gather. ZeRO puts the optimizer between the two: after the reduce-scatter each rank has
its part of the gradients, updates its part of the parameters with it, and the all-gather carries new parameters instead
of gradients. So no rank needs the optimizer's state for the parts of the others, and as many bytes travel as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from microparallel.errors import UsageError
from microparallel.program import (
    AUTO,
    AllGather,
    Backward,
    Bucket,
    Delta,
    Forward,
    Free,
    Op,
    OptimizerStep,
    Parameters,
    Program,
    ReduceScatter,
    TrainingStep,
)
from microparallel.schedules.data_parallel import bucket_ranges

Gather = Literal["after", "before"]
LEVELS = (1, 2)


def zero(
    level: int,
    layers: int,
    ranks: int,
    microbatches: int = 1,
    *,
    buckets: int | None = None,
    gather: Gather = "after",
    algorithm: str = AUTO,
) -> Program:
    """One step of ZeRO: each rank updates its part of the parameters, and then gathers the others'.

    ```
    level 1, 2 layers, 2 buckets, 2 micro-batches a rank: gradients are summed up on each rank, then leave once
    rank 0: F0.0 F1.0 B1.0 B0.0 F0.2 F1.2 B1.2 %U0@dp B0.2 %U1@dp S ~T1@dp ~T0@dp

    level 2: a micro-batch's gradients leave at once and are let go; a rank keeps only its part of the sum
    rank 0: F0.0 F1.0 B1.0 %U0.0@dp !D1.0 B0.0 %U1.0@dp !D0.0 F0.2 … B0.2 %U1.1@dp !D0.2 S ~T1@dp ~T0@dp
    ```

    With `gather="before"` the gathers stand at the beginning of the next step, where a layer's forward hides the gather
    of the next layers' parameters. Between steps a rank then has only its own part up to date (a `sharded` goal).

    ```
    level 1, gather before, 2 layers, 2 buckets, 1 micro-batch
    compute           F0   F1   B1   B0             S
    comm     [~T1][~T0]            [%U0][%U1]
    ```

    The first layer's bucket is gathered first, since its forward is the first to need it; gradients are there in the
    opposite order. Micro-batch j of rank r is j × ranks + r.

    Args:
        level: 1: the optimizer's state is in parts; 2: the gradients, too.
        layers: of the model.
        ranks: how many replicas there are.
        microbatches: how many each rank has in a step.
        buckets: into which the layers are put, neighbours together; without it a bucket for each layer.
        gather: whether new parameters are gathered after the update, or before the next forward.
        algorithm: of the reduce-scatters and all-gathers.
    """
    buckets = layers if buckets is None else buckets
    _require(level, layers, ranks, microbatches, buckets, gather)
    ranges = bucket_ranges(layers, buckets)
    gathers = [AllGather(Parameters(index), "dp", algorithm) for index in reversed(range(buckets))]

    def operations(rank: int) -> Iterator[Op]:
        if gather == "before":
            yield from gathers
        for turn in range(microbatches):
            microbatch = turn * ranks + rank
            yield from (Forward(layer, microbatch) for layer in range(layers))
            for index, (start, stop) in enumerate(ranges):
                mine = list(reversed(range(start, stop)))
                yield from (Backward(layer, microbatch) for layer in mine)
                if level == 2:
                    yield ReduceScatter(Bucket(index, turn), "dp", algorithm)
                    yield from (Free(Delta(layer, microbatch)) for layer in mine)
                elif turn == microbatches - 1:
                    yield ReduceScatter(Bucket(index), "dp", algorithm)
        yield OptimizerStep()
        if gather == "after":
            yield from gathers

    goal = TrainingStep(layers, ranks * microbatches, ranges, sharded=gather == "before")
    return Program(f"zero-{level}", goal, tuple(tuple(operations(rank)) for rank in range(ranks)))


def _require(level: int, layers: int, ranks: int, microbatches: int, buckets: int, gather: str) -> None:
    """Raise `UsageError` unless these make a step."""
    if level not in LEVELS:
        raise UsageError(f"level={level!r}: choose 1 (optimizer state in parts) or 2 (gradients, too)")
    if min(layers, ranks, microbatches) < 1:
        raise UsageError(f"layers={layers}, ranks={ranks}, microbatches={microbatches}: at least 1 each is needed")
    if not 1 <= buckets <= layers:
        raise UsageError(f"buckets={buckets}: {layers} layers can be put into 1 to {layers} buckets")
    if gather not in ("after", "before"):
        raise UsageError(f"gather={gather!r}: choose after (the update) or before (the next forward)")
