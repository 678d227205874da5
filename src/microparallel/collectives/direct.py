"""Directly between any two ranks: made for shared memory, where each rank can read every other's tensor."""

from __future__ import annotations

from microparallel.program import Collective, Op, Program, Recv, Send, Slices

_ALL = Slices(0, 1)


def direct_all_reduce(ranks: int) -> Program:
    """Each rank adds up its own slice from all others, then fetches the other sums.

    ```
    rank 0: >C2@2 >C1@1 <+C0@1 <+C0@2 | >C0@2 >C0@1 <C1@1 <C2@2
    rank 1: >C0@0 >C2@2 <+C1@2 <+C1@0 | >C1@0 >C1@2 <C2@2 <C0@0
    rank 2: >C1@1 >C0@0 <+C2@0 <+C2@1 | >C2@1 >C2@0 <C0@0 <C1@1
    ```

    As many bytes as a ring, but no hop waits for the one before. At hop k each rank receives from the rank k
    places further on, so no rank sends to two at once.
    """
    ops = [(*_reduce_mine(rank, ranks), *_fetch_others(rank, ranks)) for rank in range(ranks)]
    return Program("direct", Collective("all-reduce", ranks), tuple(ops))


def direct_reduce_scatter(ranks: int) -> Program:
    """The first half: rank r ends with slice r."""
    ops = [tuple(_reduce_mine(rank, ranks)) for rank in range(ranks)]
    return Program("direct-reduce-scatter", Collective("reduce-scatter", ranks), tuple(ops))


def direct_all_gather(ranks: int) -> Program:
    """The second half: every rank fetches slice r from rank r."""
    ops = [tuple(_fetch_others(rank, ranks)) for rank in range(ranks)]
    return Program("direct-all-gather", Collective("all-gather", ranks), tuple(ops))


def direct_broadcast(ranks: int, root: int = 0) -> Program:
    """Every other rank receives from the root.

    ```
    rank 0: >C0@1 >C0@2
    rank 1: <C0@0
    rank 2: <C0@0
    ```
    """
    others = [rank for rank in range(ranks) if rank != root]
    ops: list[tuple[Op, ...]] = [(Recv(_ALL, root),) for _ in range(ranks)]
    ops[root] = tuple(Send(_ALL, rank) for rank in others)
    return Program("direct-broadcast", Collective("broadcast", 1, root=root), tuple(ops))


def direct_reduce(ranks: int, root: int = 0) -> Program:
    """The root receives from every other rank, and adds up.

    ```
    rank 0: <+C0@1 <+C0@2
    rank 1: >C0@0
    rank 2: >C0@0
    ```
    """
    others = [rank for rank in range(ranks) if rank != root]
    ops: list[tuple[Op, ...]] = [(Send(_ALL, root),) for _ in range(ranks)]
    ops[root] = tuple(Recv(_ALL, rank, reduce=True) for rank in others)
    return Program("direct-reduce", Collective("reduce", 1, root=root), tuple(ops))


def _reduce_mine(rank: int, ranks: int) -> list[Op]:
    readers, read = _neighbours(rank, ranks)
    sends: list[Op] = [Send(Slices(reader, reader + 1), reader) for reader in readers]
    return sends + [Recv(Slices(rank, rank + 1), peer, reduce=True) for peer in read]


def _fetch_others(rank: int, ranks: int) -> list[Op]:
    readers, read = _neighbours(rank, ranks)
    sends: list[Op] = [Send(Slices(rank, rank + 1), reader) for reader in readers]
    return sends + [Recv(Slices(peer, peer + 1), peer) for peer in read]


def _neighbours(rank: int, ranks: int) -> tuple[list[int], list[int]]:
    """The ranks that receive from this one, and those it receives from, hop by hop."""
    distances = range(1, ranks)
    return [(rank - distance) % ranks for distance in distances], [(rank + distance) % ranks for distance in distances]
