"""Every rank sends its whole tensor to every other: one hop in theory, p(p−1) messages in practice."""

from __future__ import annotations

from microparallel.program import Add, Collective, Op, Part, Program, Recv, Send, Slices

_ALL = Slices(0, 1)


def gather_add_all_reduce(ranks: int) -> Program:
    """Each rank collects all contributions, keeps them apart, and adds them in rank order.

    ```
    rank 0: >C0@1 >C0@2 <P2@2 <P1@1 C0+=P1 C0+=P2
    rank 1: >C0@2 >C0@0 <P0@0 <P2@2 C0+=P0 C0+=P2
    rank 2: >C0@0 >C0@1 <P1@1 <P0@0 P0+=P1 C0+=P0
    ```

    Floating-point addition is not associative: adding in the order of arrival would leave different bits on different
    ranks. So every rank computes ((0 + 1) + 2) + …, with its own contribution where it belongs.
    """
    return Program("gather-add", Collective("all-reduce", 1), tuple(_ops(rank, ranks) for rank in range(ranks)))


def _ops(rank: int, ranks: int) -> tuple[Op, ...]:
    away = range(1, ranks)
    ops: list[Op] = [Send(_ALL, (rank + distance) % ranks) for distance in away]
    ops += [Recv(Part((rank - distance) % ranks), (rank - distance) % ranks) for distance in away]
    return (*ops, *adds(rank, ranks))


def adds(rank: int, ranks: int) -> tuple[Op, ...]:
    """What a rank does when it has all contributions: add them up in rank order."""
    ops: list[Op] = [Add(Part(lower), Part(0)) for lower in range(1, rank)]  # the sum of all before this rank,
    ops += [Add(Part(0), _ALL)] if rank > 0 else []  # then its own,
    ops += [Add(Part(higher), _ALL) for higher in range(rank + 1, ranks)]  # then the rest
    return tuple(ops)
