"""Round the ring: every link carries a slice at every hop, so no byte travels further than it must."""

from __future__ import annotations

from microparallel.program import Collective, Op, Program, Recv, Send, Slices


def ring_all_reduce(ranks: int) -> Program:
    """Scatter-reduce, then all-gather: 2(p−1) hops, in each of which every rank passes one slice to the next.

    ```
    rank 0: >C0@1 <+C2@2 >C2@1 <+C1@2 | >C1@1 <C0@2 >C0@1 <C2@2
    rank 1: >C1@2 <+C0@0 >C0@2 <+C2@0 | >C2@2 <C1@0 >C1@2 <C0@0
    rank 2: >C2@0 <+C1@1 >C1@0 <+C0@1 | >C0@0 <C2@1 >C2@0 <C1@1
    ```

    After the first half, rank r holds the whole sum of slice r + 1; the second half passes the sums on.
    """
    ops = [(*_pass_on(rank, ranks, 0, reduce=True), *_pass_on(rank, ranks, 1, reduce=False)) for rank in range(ranks)]
    return Program("ring", Collective("all-reduce", ranks), tuple(ops))


def ring_reduce_scatter(ranks: int) -> Program:
    """The first half of the ring, turned so that rank r ends with slice r."""
    ops = [tuple(_pass_on(rank, ranks, -1, reduce=True)) for rank in range(ranks)]
    return Program("ring-reduce-scatter", Collective("reduce-scatter", ranks), tuple(ops))


def ring_all_gather(ranks: int) -> Program:
    """The second half of the ring, begun with rank r holding slice r."""
    ops = [tuple(_pass_on(rank, ranks, 0, reduce=False)) for rank in range(ranks)]
    return Program("ring-all-gather", Collective("all-gather", ranks), tuple(ops))


def _pass_on(rank: int, ranks: int, first: int, *, reduce: bool) -> list[Op]:
    """Pass slices to the next rank, beginning with slice rank + `first`; with `reduce`, add this rank's own to each."""
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    ops: list[Op] = []
    for hop in range(ranks - 1):
        ops += [Send(_slice(rank + first - hop, ranks), after)]
        ops += [Recv(_slice(rank + first - hop - 1, ranks), before, reduce=reduce)]
    return ops


def _slice(number: int, ranks: int) -> Slices:
    number %= ranks
    return Slices(number, number + 1)
