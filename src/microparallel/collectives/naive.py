"""All ranks send to rank 0, which sends the sum back: the all-reduce one would write first, and the slowest."""

from __future__ import annotations

from microparallel.program import Collective, Op, Program, Recv, Send, Slices

_ALL = Slices(0, 1)


def naive_all_reduce(ranks: int) -> Program:
    """Rank 0 adds up what the other ranks send, one after another, and sends the sum to each.

    ```
    rank 0: <+C0@1 <+C0@2 >C0@1 >C0@2
    rank 1: >C0@0 <C0@0
    rank 2: >C0@0 <C0@0
    ```
    """
    others = range(1, ranks)
    root: list[Op] = [Recv(_ALL, rank, reduce=True) for rank in others]
    root += [Send(_ALL, rank) for rank in others]
    leaves: list[tuple[Op, ...]] = [(Send(_ALL, 0), Recv(_ALL, 0)) for _ in others]
    return Program("naive", Collective("all-reduce", 1), (tuple(root), *leaves))
