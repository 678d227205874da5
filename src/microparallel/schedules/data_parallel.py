"""One step of data parallelism: every rank has all layers and its own share of the batch.

A layer is a stage here, and rank r's share of the batch is micro-batch r.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from microparallel.collectives import is_compressed
from microparallel.errors import UsageError
from microparallel.program import (
    AUTO,
    BUFFERS,
    LOSS,
    NORM,
    ORDER,
    SAMPLES,
    WEIGHTS,
    AllGather,
    AllReduce,
    Backward,
    Broadcast,
    Bucket,
    Delta,
    Forward,
    ForwardStages,
    Free,
    Join,
    Named,
    Op,
    OptimizerStep,
    Parameters,
    Program,
    ReduceScatter,
    TrainingStep,
    overflow,
    presence,
)

Ranges = tuple[tuple[int, int], ...]


def ddp(layers: int, buckets: int, ranks: int, algorithm: str = AUTO) -> Program:
    """All-reduce each bucket as soon as its layers have their gradients, while earlier layers still compute.

    ```
    4 layers, 2 buckets
    compute  F0 F1 F2 F3 B3 B2 B1 B0                             S
    comm                       [all-reduce 3, 2][all-reduce 1, 0]
    ```

    Backward begins at the last layer, so the first bucket holds the last layers.
    """
    if not 1 <= buckets <= layers:
        raise UsageError(f"buckets={buckets}: {layers} layers can be put into 1 to {layers} buckets")
    ranges = bucket_ranges(layers, buckets)

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
    ranges = bucket_ranges(layers, layers)

    def backward(rank: int) -> list[Op]:
        ops: list[Op] = [Backward(layer, rank) for layer in reversed(range(layers))]
        return [*ops, Join(), *(AllReduce(Bucket(index), "dp", algorithm) for index in range(layers))]

    return _program("ddp-naive", layers, ranks, ranges, backward)


def data_parallel_step(
    buckets: int,
    ranks: int,
    microbatches: int | Sequence[int] = 1,
    *,
    overlap: bool = True,
    sums: bool = True,
    buffers: bool = False,
    weights: bool = False,
    order: bool = False,
    samples: bool = False,
    loss: bool = False,
    joining: bool = False,
    gone: Collection[int] = (),
    norms: Sequence[Sequence[Named]] = (),
    level: int = 0,
    at_once: bool = True,
    norm: bool = False,
    overflow: bool = False,
    algorithms: str | Sequence[str] = AUTO,
) -> Program:
    """The step that `DataParallel` follows: stages are buckets of gradients, and backward is as many operations.

    ```
    2 buckets; rank 0 has 2 micro-batches, rank 1 has 1, rank 2 sits out: it has none, and takes part in the sums
    rank 0: F0:2.0 B1.0 B0.0 F0:2.3 B1.3 *U0@dp B0.3 *U1@dp S
    rank 1: F0:2.1                  B1.1 *U0@dp B0.1 *U1@dp S
    rank 2:                              *U0@dp      *U1@dp S
    ```

    Gradients are summed when those of a rank's last micro-batch have been added. Micro-batch j of rank r is
    j × ranks + r. What else the ranks share stands in its place:

    ```
    rank 0: *:samples@dp = ^:buffers@dp/0 = F0:1.0 *:weights@dp = B0.0 *U0@dp ^:order@dp/0 *:loss@dp S
    ```

    While ranks may run out of data (`joining`), buffers are copied after the sums, since a rank that is `gone` comes to
    no forward. Such a rank takes part in the sums, adds nothing, and does not update its weights. The order and the
    buffers are those of the first rank that is not gone:

    ```
    rank 0:        *:weights@dp =      *U0@dp ^:order@dp/1 ^:buffers@dp/1
    rank 1: F0:1.1 *:weights@dp = B0.1 *U0@dp ^:order@dp/1 ^:buffers@dp/1 S
    ```

    Layers that normalise over all ranks (`SyncBatchNorm`) sum inside of a forward and of a backward. These sums stand
    before the operation that they are inside of, which waits for them; the program does not say where inside:

    ```
    rank 0: *:moments0@dp F0:2.0 B1.0 *U0@dp *:moments0.gradient@dp B0.0 *U1@dp S
    ```

    With ZeRO (`level`), each rank keeps its part of a bucket's sum, updates its part of the parameters, and gathers the
    others'. Which gradients a rank has goes to all ranks in a message of its own. To clip gradients, the ranks sum up
    the norm of their parts. At level 2 the gradients of a micro-batch leave at once and are let go; a rank that has
    fewer micro-batches takes part in the last sums without one:

    ```
    level 1    rank 0: F0:1.0 B0.0 %U0@dp *:presence0@dp = *:norm@dp = S ~T0@dp
    level 2    rank 0: F0:1.0 B0.0 %U0.0@dp !D0.0 *:presence0@dp = F0:1.2 B0.2 %U0.1@dp !D0.2 *:presence1@dp = S ~T0@dp
               rank 1: F0:1.1 B0.1 %U0.0@dp !D0.1 *:presence0@dp =             %U0.1@dp       *:presence1@dp = S ~T0@dp
    ```

    In float16 a step with gradients that are not finite is not taken. Where each rank sees its part of them only, the
    ranks tell each other after each pass (`overflow`); then parameters are gathered as ever, and nothing has changed:

    ```
    level 1    rank 0: F0:1.0 B0.0 %U0@dp *:presence0@dp = *:overflow0@dp = S ~T0@dp
    ```

    Buckets that are compressed name how (`algorithms`). Which gradients a rank has goes in a message of its own, too:

    ```
    rank 0: F0:1.0 B0.0 *U0@dp:topk-0.01 *:presence0@dp = S
    ```

    Args:
        buckets: how many buckets there are.
        ranks: how many replicas there are.
        microbatches: how many each rank has, or a list with one number for each rank; a rank with none sits out.
        overlap: whether backward goes on while a bucket is summed; otherwise it waits for each.
        sums: whether buckets are summed; a single rank need not.
        buffers: whether one rank's buffers are copied to all: rank 0's, before the last forward, unless `joining`.
        weights: whether the ranks first share which of them take part, and how much each one's gradients count.
        order: whether one rank's order of gradients is copied to all, as after the first backward.
        samples: whether the ranks sum up how many samples they have.
        loss: whether the ranks sum the loss.
        joining: whether ranks may run out of data.
        gone: the ranks that have run out.
        norms: what layers sum in every micro-batch: in its forward; in the backward of each bucket; after the last one.
        level: 0: every rank has everything; 1: the optimizer's state is in parts; 2: the gradients, too.
        at_once: at level 2, whether the gradients of each micro-batch leave at once; otherwise, as inside of
            `no_sync()`, they add up on the rank first.
        norm: whether the ranks sum the norm of their parts of the gradients.
        overflow: with ZeRO, whether the ranks tell each other if their parts of the gradients are finite.
        algorithms: of the buckets' all-reduces, one for each bucket, or one for all.
    """
    each = microbatches
    if isinstance(each, int):
        each = [0 if rank in gone else each for rank in range(ranks)]
    _require_step(buckets, ranks, each, sums)
    if not all(joining and 0 <= rank < ranks and not each[rank] for rank in gone):
        raise UsageError(f"gone={sorted(gone)}: only while joining, and only ranks without micro-batches")
    if norms and (joining or len(set(each)) > 1):
        raise UsageError(
            f"microbatches={list(each)}: a SyncBatchNorm needs every rank in every micro-batch; give all equally many"
        )
    if level not in (0, 1, 2) or (level and (joining or not sums)):
        raise UsageError(f"level={level!r}: choose 0, 1 or 2; from 1 on ranks cannot run out of data (joining)")
    of_buckets = (algorithms,) * buckets if isinstance(algorithms, str) else tuple(algorithms)
    if len(of_buckets) != buckets or (level and set(of_buckets) != {AUTO}):
        raise UsageError(
            f"algorithms={algorithms!r}: level 0 takes a name for each of {buckets} buckets, or one for all"
        )
    in_forward, *in_backward = norms or ((),) * (buckets + 2)
    passes = _Passes(
        *(buckets, level, in_forward, in_backward, overlap, sums, weights, buffers and not joining),
        overflow=overflow,
        algorithms=of_buckets,
    )
    first = next(rank for rank in range(ranks) if rank not in gone)
    mine = [[number * ranks + rank for number in range(count)] for rank, count in enumerate(each)]

    def operations(rank: int) -> Iterator[Op]:
        if samples:
            yield from (AllReduce(SAMPLES, "dp"), Join())
        yield from passes.at_once(mine[rank], max(each)) if level > 1 and at_once else passes.accumulated(mine[rank])
        if order:
            yield Broadcast(ORDER, "dp", first)
        if buffers and joining:
            yield Broadcast(BUFFERS, "dp", first)
        if loss:
            yield AllReduce(LOSS, "dp")
        if level and norm:
            yield from (AllReduce(NORM, "dp"), Join())
        if rank not in gone:
            yield OptimizerStep()
        if level:
            yield from (AllGather(Parameters(bucket), "dp") for bucket in reversed(range(buckets)))

    ranges = tuple((buckets - 1 - bucket, buckets - bucket) for bucket in range(buckets)) if sums else ()
    goal = TrainingStep.of(buckets, set(itertools.chain(*mine)), ranges)
    name = f"zero-{level}" if level else "ddp"
    return Program(name, goal, tuple(tuple(operations(rank)) for rank in range(ranks)))


@dataclass(frozen=True)
class _Passes:
    """The forwards and backwards of one rank in a step, with the sums that belong to them."""

    buckets: int
    level: int
    in_forward: Sequence[Named]
    in_backward: Sequence[Sequence[Named]]
    overlap: bool
    sums: bool
    weights: bool
    buffers: bool
    overflow: bool
    algorithms: Sequence[str]

    def accumulated(self, microbatches: Sequence[int]) -> Iterator[Op]:
        """Gradients add up on the rank and are summed after its last micro-batch; also if it has none."""
        for microbatch in microbatches[:-1]:
            yield from self._local(microbatch)
        yield from self._summed(microbatches[-1:], freed=microbatches)

    def at_once(self, microbatches: Sequence[int], turns: int) -> Iterator[Op]:
        """The gradients of each micro-batch are summed at once; a rank that has no more still takes part."""
        for turn in range(turns):
            mine = microbatches[turn : turn + 1]
            yield from self._summed(mine, turn, freed=mine)

    def _local(self, microbatch: int) -> Iterator[Op]:
        yield from _sums(self.in_forward)
        yield ForwardStages(0, self.buckets, microbatch)
        for stage, values in zip(reversed(range(self.buckets)), self.in_backward, strict=False):
            yield from _sums(values)
            yield Backward(stage, microbatch)
        yield from _sums(self.in_backward[-1])

    def _summed(self, microbatch: Sequence[int], turn: int | None = None, *, freed: Sequence[int]) -> Iterator[Op]:
        """Forward and backward of a micro-batch, if there is one, and the sums over the ranks.

        Args:
            microbatch: that one, or nothing.
            turn: which of the sums these are, where each micro-batch has sums of its own.
            freed: the micro-batches whose gradients are let go at level 2, bucket by bucket.
        """
        if self.buffers:
            yield from (Broadcast(BUFFERS, "dp", 0), Join())
        yield from _sums(self.in_forward)
        yield from (ForwardStages(0, self.buckets, one) for one in microbatch)
        if self.weights:
            yield from (AllReduce(WEIGHTS, "dp"), Join())
        for bucket in range(self.buckets):
            yield from _sums(self.in_backward[bucket])
            yield from (Backward(self.buckets - 1 - bucket, one) for one in microbatch)
            if self.sums:
                yield self._sum(bucket, turn)
                yield from () if self.overlap else (Join(),)
                if self.level > 1:
                    yield from (Free(Delta(self.buckets - 1 - bucket, one)) for one in freed)
        yield from _sums(self.in_backward[-1])
        if self.level or (self.sums and any(map(is_compressed, self.algorithms))):
            yield from (AllReduce(presence(turn or 0), "dp"), Join())
            if self.overflow:
                yield from (AllReduce(overflow(turn or 0), "dp"), Join())

    def _sum(self, bucket: int, turn: int | None) -> Op:
        if self.level:
            return ReduceScatter(Bucket(bucket, turn), "dp")
        return AllReduce(Bucket(bucket), "dp", self.algorithms[bucket])


def _sums(values: Iterable[Named]) -> Iterator[AllReduce]:
    return (AllReduce(value, "dp") for value in values)


def _require_step(buckets: int, ranks: int, each: Sequence[int], sums: bool) -> None:
    """Raise `UsageError` unless these numbers make a step."""
    if min(buckets, ranks) < 1:
        raise UsageError(f"buckets={buckets}, ranks={ranks}: at least 1 each is needed")
    if len(each) != ranks or min(each) < 0:
        raise UsageError(f"microbatches={list(each)}: {ranks} ranks need as many numbers, from 0")
    if not any(each):
        raise UsageError(f"microbatches={list(each)}: at least 1 rank needs a micro-batch")
    if not sums and ranks > 1:
        raise UsageError(f"sums=False: {ranks} ranks with gradients of their own would drift apart")


def _program(name: str, layers: int, ranks: int, ranges: Ranges, backward: Callable[[int], list[Op]]) -> Program:
    orders = [
        (*(Forward(layer, rank) for layer in range(layers)), *backward(rank), OptimizerStep()) for rank in range(ranks)
    ]
    return Program(name, TrainingStep(layers, ranks, ranges), tuple(orders))


def bucket_ranges(layers: int, buckets: int) -> Ranges:
    """Cut the layers into buckets of neighbours, as evenly as possible, from the last layer to the first."""
    bounds = [layers - index * layers // buckets for index in range(buckets + 1)]
    return tuple((start, stop) for stop, start in itertools.pairwise(bounds))
