"""Scatter and gather, straight between the root and the others."""

from __future__ import annotations

from microparallel.program import Chunk, Collective, Op, Program, Recv, Send


def scatter(ranks: int) -> Program:
    """Rank 0 hands slice r to rank r.

    ```
    rank 0: >C1@1 >C2@2
    rank 1: <C1@0
    rank 2: <C2@0
    ```
    """
    root: tuple[Op, ...] = tuple(Send(Chunk(rank, rank + 1), rank) for rank in range(1, ranks))
    leaves: list[tuple[Op, ...]] = [(Recv(Chunk(rank, rank + 1), 0),) for rank in range(1, ranks)]
    return Program("scatter", Collective("scatter", ranks, root=0), (root, *leaves))


def gather(ranks: int) -> Program:
    """Rank 0 collects slice r from rank r.

    ```
    rank 0: <C1@1 <C2@2
    rank 1: >C1@0
    rank 2: >C2@0
    ```
    """
    root: tuple[Op, ...] = tuple(Recv(Chunk(rank, rank + 1), rank) for rank in range(1, ranks))
    leaves: list[tuple[Op, ...]] = [(Send(Chunk(rank, rank + 1), 0),) for rank in range(1, ranks)]
    return Program("gather", Collective("gather", ranks, root=0), (root, *leaves))
