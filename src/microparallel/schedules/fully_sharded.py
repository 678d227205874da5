"""The step that `FullyShardedDataParallel` follows: ZeRO-3 with everything that its ranks share.

`zero(3, …)` is the step as it is taught. This one has what a model of a user's own may bring along: ranks with fewer
micro-batches, units that are used more than once, buffers, weights, a norm.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from microparallel.errors import UsageError
from microparallel.program import (
    AUTO,
    BUFFERS,
    LOSS,
    NORM,
    ORDER,
    SAMPLES,
    WEIGHTS,
    WORLD,
    AllGather,
    AllReduce,
    Backward,
    Broadcast,
    Bucket,
    Delta,
    Forward,
    Free,
    Join,
    Op,
    OptimizerStep,
    Parameters,
    Program,
    ReduceScatter,
    Shard,
    TrainingStep,
    announced,
    presence,
)
from microparallel.program import overflow as overflow_of


def fully_sharded_step(
    units: int,
    ranks: int,
    microbatches: int | Sequence[int] = 1,
    *,
    last: Sequence[int] = (),
    prefetch: int = 1,
    reshard_after_forward: bool = True,
    replicas: int = 1,
    overlap: bool = True,
    buffers: bool = False,
    weights: bool = False,
    order: bool = False,
    samples: bool = False,
    loss: bool = False,
    at_once: bool = True,
    norm: bool = False,
    algorithm: str = AUTO,
    overflow: bool = False,
) -> Program:
    """One step in which a unit's parameters are whole only while they are used; a unit is a stage and a bucket.

    ```
    3 units, prefetch 1
    rank 0: ~T2 ~T1 F0.0 !T2 ~T0 F1.0 !T1 F2.0 !T0                                        forward
            ~T0 ~T1 B2.0 %U0.0 !D2.0 !T0 ~T2 B1.0 %U1.0 !D1.0 !T1 B0.0 %U2.0 !D0.0 !T2    backward
            *:presence0 = S
    ```

    Stages are numbered in the order in which a forward first uses them, buckets in the opposite order, as gradients
    come. A unit that is used again by a later stage stays whole until then: an embedding whose weights are the head's,
    too, or parameters that the model itself has beside its layers:

    ```
    3 units, prefetch 0, last=(2, 1, 2): the last stage uses the first unit again
    rank 0: ~T2 F0.0 ~T1 F1.0 !T1 ~T0 F2.0 !T2 !T0   ~T0 ~T2 B2.0 %U0.0 !D2.0 !T0 ~T1 B1.0 %U1.0 !D1.0 !T1 B0.0 …
    ```

    A rank that has fewer micro-batches than another, or none, still gathers with the others and sums with them:

    ```
    rank 1: ~T2 ~T1 !T2 ~T0 !T1 !T0   ~T0 ~T1 %U0.0 !T0 ~T2 %U1.0 !T1 %U2.0 !T2   *:presence0 = S
    ```

    In the first step (`order`) the others tell such a rank what they gather, and it lets that go at once:

    ```
    rank 1: *:announced0 = *:announced1 = ~T2 = !T2 *:announced2 = ~T1 = !T1 … *:announced4 = *:order = ~T0 ~T1 %U0.0 …
    ```

    With `replicas`, the ranks are as many groups, each of which keeps all parts; a part's sum over a group (`dp`) is
    summed over the groups (`replica`): `%U0.0@dp *U0.0/@replica`.

    Args:
        units: how many there are.
        ranks: how many replicas of the model compute.
        microbatches: how many each rank has, or a list with one number for each rank; a rank with none sits out.
        last: for each stage, the stage that uses its unit for the last time in a forward; without it, itself.
        prefetch: how many stages ahead units are gathered.
        reshard_after_forward: whether units are let go after their last use in a forward, and gathered again.
        replicas: how many groups of ranks keep all parts.
        overlap: whether computation goes on during a gather or a sum; otherwise it waits for each.
        buffers: whether rank 0's buffers are copied to all before a forward.
        weights: whether the ranks first share which of them take part, and how much each one's gradients count.
        order: whether the ranks share which of them have samples, and in which order they use the units, as in the
            first step.
        samples: whether the ranks sum up how many samples they have.
        loss: whether the ranks sum the loss.
        at_once: whether the gradients of each micro-batch leave at once; otherwise, as inside of `no_sync()`, they add
            up on the rank first.
        norm: whether the ranks sum the norm of their parts of the gradients.
        algorithm: by which gradients are summed.
        overflow: whether the ranks tell each other after each pass if their parts of the gradients are finite
            (`*:overflow0`): in float16 a step in which some are not is not taken.
    """
    each = [microbatches] * ranks if isinstance(microbatches, int) else list(microbatches)
    last = tuple(last) or tuple(range(units))
    _require(units, ranks, each, last, prefetch, replicas)
    everywhere = WORLD if replicas > 1 else "dp"
    gathering = _Gathering(units, last, prefetch, reshard_after_forward, overlap)

    def summed(bucket: Bucket) -> Iterator[Op]:
        """Sum the gradients of a unit over the ranks; each keeps its part."""
        yield ReduceScatter(bucket, "dp", algorithm)
        if replicas > 1:
            yield AllReduce(Shard(bucket), "replica", algorithm)
        yield from () if overlap else (Join(),)

    def turn(number: int, mine: Sequence[int], local: bool, earlier: Sequence[int]) -> Iterator[Op]:
        """A forward and a backward of all ranks; `mine` has this rank's micro-batch, if it has one in this turn."""
        if buffers and not local:
            yield from (Broadcast(BUFFERS, everywhere, 0), Join())
        first = order and not number
        yield from (AllReduce(announced(), everywhere), Join()) if first else ()
        for op in gathering.announced(everywhere, bool(mine)) if first and not all(each) else gathering.forward():
            yield from (Forward(op, one) for one in mine) if isinstance(op, int) else (op,)
        if not local and weights:
            yield from (AllReduce(WEIGHTS, everywhere), Join())
        yield from (AllReduce(ORDER, everywhere), Join()) if first else ()
        for op in gathering.backward():
            if not isinstance(op, int):
                yield op
                continue
            yield from (Backward(op, one) for one in mine)
            if not local:
                yield from summed(Bucket(units - 1 - op, number if at_once else None))
                yield from (Free(Delta(op, one)) for one in (*earlier, *mine))
        if not local:
            told_after = (presence, overflow_of) if overflow else (presence,)
            for value in told_after:
                yield from (AllReduce(value(number if at_once else 0), everywhere), Join())

    turns = max(each)
    numbers = [[number * ranks + rank for number in range(count)] for rank, count in enumerate(each)]

    def operations(rank: int) -> Iterator[Op]:
        mine = numbers[rank]
        if samples:
            yield from (AllReduce(SAMPLES, everywhere), Join())
        for number in range(turns):
            local = not at_once and number < turns - 1
            earlier = [] if at_once else mine[:number]
            yield from turn(number, mine[number : number + 1], local, earlier)
        if loss:
            yield AllReduce(LOSS, everywhere)
        if norm:
            yield from (AllReduce(NORM, "dp"), Join())  # every group has all parts
        yield OptimizerStep()

    buckets = tuple((units - 1 - bucket, units - bucket) for bucket in range(units))
    of_all = TrainingStep.of(units, set(itertools.chain(*numbers)), buckets)
    goal = TrainingStep(units, of_all.microbatches, buckets, of_all.skipped, sharded=True)
    mesh = (("replica", replicas), ("dp", ranks // replicas)) if replicas > 1 else ()
    return Program("zero-3", goal, tuple(tuple(operations(rank)) for rank in range(ranks)), mesh)


@dataclass(frozen=True)
class _Gathering:
    """When units are gathered and let go: in what it yields, a number stands for the computation of that stage."""

    units: int
    last: Sequence[int]
    prefetch: int
    reshard: bool
    overlap: bool

    def forward(self) -> Iterator[Op | int]:
        """From the first stage to the last."""
        stages = range(self.units)
        used_last = [[unit for unit in stages if self.last[unit] == stage] for stage in stages]
        yield from self._use([[stage] for stage in stages], used_last if self.reshard else [[]] * self.units, stages)

    def announced(self, axis: str, computes: bool) -> Iterator[Op | int]:
        """A forward in which ranks tell those without samples what they gather, and in the end that it was all."""
        number = 1
        for op in self.forward():
            if isinstance(op, AllGather):
                yield from (AllReduce(announced(number), axis), Join(), op, Join())
                yield from () if computes or not self.reshard else (Free(op.value),)
                number += 1
            elif computes and not isinstance(op, Join):
                yield op
        yield from (AllReduce(announced(number), axis), Join())

    def backward(self) -> Iterator[Op | int]:
        """From the last stage to the first: a unit is needed from the stage that used it last, down to its own."""
        stages = range(self.units)[::-1]
        needed = [[unit for unit in stages if self.last[unit] == stage] for stage in stages]
        yield from self._use(needed if self.reshard else [[]] * self.units, [[stage] for stage in stages], stages)

    def _use(
        self, needed: Sequence[Sequence[int]], freed: Sequence[Sequence[int]], stages: Sequence[int]
    ) -> Iterator[Op | int]:
        """Gather what the stages need, each `prefetch` stages ahead; compute; free what is freed after each."""
        gathered = 0
        for place, stage in enumerate(stages):
            while gathered < min(place + self.prefetch + 1, len(stages)):
                for unit in needed[gathered]:
                    yield AllGather(Parameters(self.units - 1 - unit), "dp")
                    yield from () if self.overlap else (Join(),)
                gathered += 1
            yield stage
            yield from (Free(Parameters(self.units - 1 - unit)) for unit in freed[place])


def _require(units: int, ranks: int, each: Sequence[int], last: Sequence[int], prefetch: int, replicas: int) -> None:
    """Raise `UsageError` unless these make a step."""
    if min(units, ranks) < 1:
        raise UsageError(f"units={units}, ranks={ranks}: at least 1 each is needed")
    if len(each) != ranks or min(each) < 0 or not any(each):
        raise UsageError(f"microbatches={each}: {ranks} ranks need as many numbers, from 0, and one above 0")
    if len(last) != units or not all(stage <= used < units for stage, used in enumerate(last)):
        raise UsageError(f"last={list(last)}: for each of {units} stages, that stage or a later one")
    if prefetch < 0:
        raise UsageError(f"prefetch={prefetch}: units are gathered 0 or more stages ahead")
    if replicas < 1 or ranks % replicas:
        raise UsageError(f"replicas={replicas}: {ranks} ranks cannot be cut into as many equal groups")
