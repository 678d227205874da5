"""Up a binomial tree and down again: few hops, but the whole tensor in each."""

from __future__ import annotations

from collections.abc import Callable

from microparallel.program import Collective, Op, Program, Recv, Send, Slices

_ALL = Slices(0, 1)


def tree_reduce(ranks: int, root: int = 0) -> Program:
    """Bring the sum to the root: in each hop, half of the ranks that are left send to the other half and drop out.

    ```
    rank 0: <+C0@1 <+C0@2        hop 1: 1 → 0, 3 → 2
    rank 1: >C0@0                hop 2: 2 → 0
    rank 2: <+C0@3 >C0@0
    rank 3: >C0@2
    ```
    """
    return Program("tree-reduce", Collective("reduce", 1, root=root), _rooted(up, ranks, root))


def tree_broadcast(ranks: int, root: int = 0) -> Program:
    """Bring the root's tensor to all: the same tree, walked the other way."""
    return Program("tree-broadcast", Collective("broadcast", 1, root=root), _rooted(down, ranks, root))


def tree_all_reduce(ranks: int) -> Program:
    """Reduce to rank 0 up a binomial tree, then broadcast down it."""
    ops = [(*up(rank, ranks), *down(rank, ranks)) for rank in range(ranks)]
    return Program("tree", Collective("all-reduce", 1), tuple(ops))


def _rooted(walk: Callable[[int, int], list[Send | Recv]], ranks: int, root: int) -> tuple[tuple[Op, ...], ...]:
    """The operations of all ranks in a tree with this root: each plays the part of the rank `root` places before it."""
    parts = (walk((rank - root) % ranks, ranks) for rank in range(ranks))
    return tuple(tuple(_moved(op, root, ranks) for op in part) for part in parts)


def up(rank: int, ranks: int) -> list[Send | Recv]:
    """What a rank does for the sum to come to rank 0."""
    ops: list[Send | Recv] = []
    distance = 1
    while distance < ranks:
        if rank & distance:
            return [*ops, Send(_ALL, rank - distance)]
        if rank + distance < ranks:
            ops.append(Recv(_ALL, rank + distance, reduce=True))
        distance *= 2
    return ops


def _moved(op: Send | Recv, by: int, ranks: int) -> Op:
    """The same message between the ranks `by` places further on."""
    if isinstance(op, Send):
        return Send(op.value, (op.to + by) % ranks)
    return Recv(op.value, (op.source + by) % ranks, reduce=op.reduce)


def down(rank: int, ranks: int) -> list[Send | Recv]:
    """What a rank does for rank 0's tensor to come to all: `up` backwards, each message turned round."""
    return [Recv(_ALL, op.to) if isinstance(op, Send) else Send(_ALL, op.source) for op in reversed(up(rank, ranks))]
