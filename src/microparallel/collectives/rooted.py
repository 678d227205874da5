"""Scatter and gather: messages between the root and each other rank directly."""

from __future__ import annotations

from microparallel.program import Collective, Op, Program, Recv, Send, Slices


def scatter(ranks: int, root: int = 0) -> Program:
    """The root hands slice r to rank r.

    ```
    rank 0: >C1@1 >C2@2
    rank 1: <C1@0
    rank 2: <C2@0
    ```
    """
    ops: list[tuple[Op, ...]] = [(Recv(_slice(rank), root),) for rank in range(ranks)]
    ops[root] = tuple(Send(_slice(rank), rank) for rank in range(ranks) if rank != root)
    return Program("scatter", Collective("scatter", ranks, root=root), tuple(ops))


def gather(ranks: int, root: int = 0) -> Program:
    """The root collects slice r from rank r.

    ```
    rank 0: <C1@1 <C2@2
    rank 1: >C1@0
    rank 2: >C2@0
    ```
    """
    ops: list[tuple[Op, ...]] = [(Send(_slice(rank), root),) for rank in range(ranks)]
    ops[root] = tuple(Recv(_slice(rank), rank) for rank in range(ranks) if rank != root)
    return Program("gather", Collective("gather", ranks, root=root), tuple(ops))


def _slice(rank: int) -> Slices:
    return Slices(rank, rank + 1)
