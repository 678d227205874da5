"""ZeRO: data parallelism in which each rank keeps only its part of the optimizer's state, of the gradients, ….

Every rank computes with the whole model on its own share of the batch, as in `data_parallel.py`. An all-reduce is a
reduce-scatter and then an all-gather. ZeRO puts the optimizer between the two: after the reduce-scatter each rank has
its part of the gradients, updates its part of the parameters with it, and the all-gather carries new parameters instead
of gradients. So no rank needs the optimizer's state for the parts of the others, and as many bytes travel as before.

At level 3 a rank keeps only its part of the parameters, too. The layers of a bucket are then a *unit*: its parameters
are gathered just before they are used, and let go after.

Ranks on several nodes need not share one copy among all of them. With *hybrid* sharding the ranks of each node share a
copy of their own, and the nodes are replicas. Parameters then travel inside a node only; between nodes, ranks that keep
the same part sum up their gradients of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from microparallel.errors import UsageError
from microparallel.program import (
    AUTO,
    AllGather,
    AllReduce,
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
    Shard,
    TrainingStep,
)
from microparallel.schedules.data_parallel import Ranges, bucket_ranges

Gather = Literal["after", "before"]
LEVELS = (1, 2, 3)


def zero(
    level: int,
    layers: int,
    ranks: int,
    microbatches: int = 1,
    *,
    buckets: int | None = None,
    gather: Gather | None = None,
    prefetch: int | None = None,
    reshard_after_forward: bool | None = None,
    replicas: int = 1,
    algorithm: str = AUTO,
) -> Program:
    """One step of ZeRO: each rank updates its part of the parameters, and gathers the others'.

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

    At level 3 nothing is gathered for longer than it is used. The gather of a unit begins `prefetch` units before it is
    used, so that the units before it hide it; no more than `prefetch` + 1 units are whole at a time. After its forward
    a unit is let go and gathered again for its backward, unless it is kept (`reshard_after_forward=False`).

    ```
    level 3, 3 units of a layer each, prefetch 1, 1 micro-batch
    rank 0: ~T2 ~T1 F0 !T2 ~T0 F1 !T1 F2 !T0   ~T0 ~T1 B2 %U0 !D2 !T0 ~T2 B1 %U1 !D1 !T1 B0 %U2 !D0 !T2   S
    ```

    With `replicas`, each replica has a copy of the parameters, in as many parts as it has ranks (axis `dp`). It gathers
    and reduce-scatters by itself. Then ranks that keep the same part, one of each replica, sum up their parts of the
    gradients (axis `replica`). The ranks of a replica are neighbours, as those of a node are.

    ```
    level 3, 1 layer, 4 ranks, 2 replicas      mesh: replica 2, dp 2
    rank 0: ~T0@dp F0.0 !T0 ~T0@dp B0.0 %U0.0@dp *U0.0/@replica !D0.0 !T0 S      part 0 of 2, with rank 1
    rank 1: ~T0@dp F0.1 !T0 ~T0@dp B0.1 %U0.0@dp *U0.0/@replica !D0.1 !T0 S      part 1
    rank 2: ~T0@dp F0.2 !T0 ~T0@dp B0.2 %U0.0@dp *U0.0/@replica !D0.2 !T0 S      part 0 of 2, with rank 3
    rank 3: ~T0@dp F0.3 !T0 ~T0@dp B0.3 %U0.0@dp *U0.0/@replica !D0.3 !T0 S      part 1
    ```

    The first layer's bucket is gathered first, since its forward is the first to need it; gradients are there in the
    opposite order. Micro-batch j of rank r is j × ranks + r.

    Args:
        level: 1: the optimizer's state is in parts; 2: the gradients, too; 3: the parameters, too.
        layers: of the model.
        ranks: how many there are; each computes with the whole model.
        microbatches: how many each rank has in a step.
        buckets: into which the layers are put, neighbours together; without it a bucket for each layer.
        gather: whether new parameters are gathered after the update, or before the next forward; not at level 3.
        prefetch: how many units ahead parameters are gathered; 1 unless something else is said. Only at level 3.
        reshard_after_forward: whether a unit's parameters are let go between its forward and its backward; they are
            unless something else is said. Only at level 3.
        replicas: how many copies of the parameters there are, each in parts on ranks / replicas ranks. Only at level 3.
        algorithm: of the reduce-scatters, the all-gathers, and the all-reduces over replicas.
    """
    buckets = layers if buckets is None else buckets
    _require(level, layers, ranks, microbatches, buckets)
    _require_options(level, gather, prefetch, reshard_after_forward)
    _require_replicas(level, ranks, replicas)
    ranges = bucket_ranges(layers, buckets)
    gathers = [AllGather(Parameters(index), "dp", algorithm) for index in reversed(range(buckets))]
    units = _Units(ranges, 1 if prefetch is None else prefetch, reshard_after_forward is not False, algorithm)

    def backward(index: int, microbatch: int, turn: int | None) -> Iterator[Op]:
        """Backward through the layers of a bucket, and its reduce-scatter: of one micro-batch, if there is a turn."""
        mine = list(reversed(range(*ranges[index])))
        yield from (Backward(layer, microbatch) for layer in mine)
        if turn is not None:
            yield ReduceScatter(Bucket(index, turn), "dp", algorithm)
            if replicas > 1:
                yield AllReduce(Shard(Bucket(index, turn)), "replica", algorithm)
            yield from (Free(Delta(layer, microbatch)) for layer in mine)

    def operations(rank: int) -> Iterator[Op]:
        if gather == "before":
            yield from gathers
        for turn in range(microbatches):
            microbatch = turn * ranks + rank
            if level == 3:
                yield from units.forward(microbatch)
                yield from units.backward(lambda index: backward(index, microbatch, turn))  # noqa: B023
                continue
            yield from (Forward(layer, microbatch) for layer in range(layers))
            for index in range(buckets):
                yield from backward(index, microbatch, turn if level == 2 else None)
                if level == 1 and turn == microbatches - 1:
                    yield ReduceScatter(Bucket(index), "dp", algorithm)
        yield OptimizerStep()
        if level < 3 and gather != "before":
            yield from gathers

    goal = TrainingStep(layers, ranks * microbatches, ranges, sharded=level == 3 or gather == "before")
    orders = tuple(tuple(operations(rank)) for rank in range(ranks))
    if replicas == 1:
        return Program(f"zero-{level}", goal, orders)
    return Program(f"zero-{level} × {replicas}", goal, orders, mesh=(("replica", replicas), ("dp", ranks // replicas)))


@dataclass(frozen=True)
class _Units:
    """When the parameters of each unit are gathered and let go."""

    ranges: Ranges
    prefetch: int
    reshard: bool
    algorithm: str

    def forward(self, microbatch: int) -> Iterator[Op]:
        """From the first layers' unit to the last layers'."""
        return self._use(
            list(reversed(range(len(self.ranges)))),
            lambda index: (Forward(layer, microbatch) for layer in range(*self.ranges[index])),
            gathers=True,
            frees=self.reshard,
        )

    def backward(self, compute: Callable[[int], Iterator[Op]]) -> Iterator[Op]:
        """From the last layers' unit to the first layers'."""
        return self._use(list(range(len(self.ranges))), compute, gathers=self.reshard, frees=True)

    def _use(
        self, order: list[int], compute: Callable[[int], Iterator[Op]], *, gathers: bool, frees: bool
    ) -> Iterator[Op]:
        """Compute with one unit after another; each is gathered when the unit `prefetch` places before it begins."""
        gathered = 0
        for place, index in enumerate(order):
            while gathers and gathered < min(place + self.prefetch + 1, len(order)):
                yield AllGather(Parameters(order[gathered]), "dp", self.algorithm)
                gathered += 1
            yield from compute(index)
            if frees:
                yield Free(Parameters(index))


def _require(level: int, layers: int, ranks: int, microbatches: int, buckets: int) -> None:
    """Raise `UsageError` unless these make a step."""
    if level not in LEVELS:
        raise UsageError(
            f"level={level!r}: choose 1 (optimizer state in parts), 2 (gradients, too) or 3 (parameters, too)"
        )
    if min(layers, ranks, microbatches) < 1:
        raise UsageError(f"layers={layers}, ranks={ranks}, microbatches={microbatches}: at least 1 each is needed")
    if not 1 <= buckets <= layers:
        raise UsageError(f"buckets={buckets}: {layers} layers can be put into 1 to {layers} buckets")


def _require_replicas(level: int, ranks: int, replicas: int) -> None:
    """Raise `UsageError` unless each replica has equally many ranks, and parts of the parameters to keep on them."""
    if replicas < 1 or ranks % replicas:
        raise UsageError(
            f"replicas={replicas}: {ranks} ranks do not make so many equal groups; choose a divisor of {ranks}"
        )
    if level < 3 and replicas > 1:
        raise UsageError(f"replicas={replicas}: only at level 3 does a replica keep its parameters in parts; {level=}")


def _require_options(level: int, gather: str | None, prefetch: int | None, reshard_after_forward: bool | None) -> None:
    """Raise `UsageError` for options that mean nothing at this level."""
    if gather not in (None, "after", "before"):
        raise UsageError(f"gather={gather!r}: choose after (the update) or before (the next forward)")
    if prefetch is not None and prefetch < 0:
        raise UsageError(f"prefetch={prefetch}: parameters are gathered 0 or more units ahead")
    if level == 3 and gather is not None:
        raise UsageError(f"gather={gather!r}: at level 3 parameters are gathered where they are used")
    if level < 3 and (prefetch is not None or reshard_after_forward is not None):
        raise UsageError(
            f"prefetch and reshard_after_forward are for level 3, where parameters are gathered; level={level}"
        )
