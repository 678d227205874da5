"""Straight from every peer: each rank adds up its own slice from all others, then everybody fetches all sums."""

from __future__ import annotations

from microparallel.program import Chunk, Collective, Op, Program, Recv, Send


def direct_all_reduce(ranks: int) -> Program:
    """As many bytes as a ring, but no hop waits for the one before: made for shared memory.

    ```
    rank 0: >C2@2 <+C0@1 >C1@1 <+C0@2 | >C0@2 <C1@1 >C0@1 <C2@2
    rank 1: >C0@0 <+C1@2 >C2@2 <+C1@0 | >C1@0 <C2@2 >C1@2 <C0@0
    rank 2: >C1@1 <+C2@0 >C0@0 <+C2@1 | >C2@1 <C0@0 >C2@0 <C1@1
    ```

    At step k everybody reads from the rank k places further on, so that nobody is read by two at once.
    """
    ops = [(*_reduce_mine(rank, ranks), *_fetch_others(rank, ranks)) for rank in range(ranks)]
    return Program("direct", Collective("all-reduce", ranks), tuple(ops))


def _reduce_mine(rank: int, ranks: int) -> list[Op]:
    ops: list[Op] = []
    for distance in range(1, ranks):
        reader, read = (rank - distance) % ranks, (rank + distance) % ranks
        ops += [Send(Chunk(reader, reader + 1), reader), Recv(Chunk(rank, rank + 1), read, reduce=True)]
    return ops


def _fetch_others(rank: int, ranks: int) -> list[Op]:
    ops: list[Op] = []
    for distance in range(1, ranks):
        reader, read = (rank - distance) % ranks, (rank + distance) % ranks
        ops += [Send(Chunk(rank, rank + 1), reader), Recv(Chunk(read, read + 1), read)]
    return ops
