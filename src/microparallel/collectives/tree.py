"""Up a binomial tree and down again: few steps, but the whole tensor in each."""

from __future__ import annotations

from microparallel.program import Chunk, Collective, Op, Program, Recv, Send

_ALL = Chunk(0, 1)


def tree_reduce(ranks: int) -> Program:
    """Bring the sum to rank 0: each round, half of the ranks that are left send to the other half and drop out.

    ```
    rank 0: <+C0@1 <+C0@2        round 1: 1 → 0, 3 → 2
    rank 1: >C0@0                round 2: 2 → 0
    rank 2: <+C0@3 >C0@0
    rank 3: >C0@2
    ```
    """
    goal = Collective("reduce", 1, root=0)
    return Program("tree-reduce", goal, tuple(tuple(_up(rank, ranks)) for rank in range(ranks)))


def tree_broadcast(ranks: int, root: int = 0) -> Program:
    """Bring the root's tensor to all: the same tree, walked the other way, with the root in rank 0's place."""
    goal = Collective("broadcast", 1, root=root)
    ops = (_down((rank - root) % ranks, ranks) for rank in range(ranks))
    return Program("tree-broadcast", goal, tuple(tuple(_moved(op, root, ranks) for op in mine) for mine in ops))


def tree_all_reduce(ranks: int) -> Program:
    """Reduce to rank 0 up a binomial tree, then broadcast down it."""
    ops = [(*_up(rank, ranks), *_down(rank, ranks)) for rank in range(ranks)]
    return Program("tree", Collective("all-reduce", 1), tuple(ops))


def _up(rank: int, ranks: int) -> list[Op]:
    ops: list[Op] = []
    distance = 1
    while distance < ranks:
        if rank & distance:
            return [*ops, Send(_ALL, rank - distance)]
        if rank + distance < ranks:
            ops.append(Recv(_ALL, rank + distance, reduce=True))
        distance *= 2
    return ops


def _moved(op: Send | Recv, by: int, ranks: int) -> Op:
    """The same message, each rank played by one some places further on."""
    return Send(_ALL, (op.to + by) % ranks) if isinstance(op, Send) else Recv(_ALL, (op.source + by) % ranks)


def _down(rank: int, ranks: int) -> list[Send | Recv]:
    """What `_up` does, backwards, each message turned round."""
    return [
        Recv(_ALL, op.to) if isinstance(op, Send) else Send(_ALL, op.source)
        for op in reversed(_up(rank, ranks))
        if isinstance(op, Send | Recv)
    ]
