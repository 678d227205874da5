"""Exchange everything with a partner twice as far away each time: the fewest hops there can be."""

from __future__ import annotations

from microparallel.collectives.folding import folded
from microparallel.program import Collective, Op, Program, Recv, Send, Slices

_ALL = Slices(0, 1)


def recursive_doubling_all_reduce(ranks: int) -> Program:
    """After hop k, groups of 2^k ranks hold the same sum.

    ```
    rank 0: >C0@1 <+C0@1 >C0@2 <+C0@2
    rank 1: >C0@0 <+C0@0 >C0@3 <+C0@3
    rank 2: >C0@3 <+C0@3 >C0@0 <+C0@0
    rank 3: >C0@2 <+C0@2 >C0@1 <+C0@1
    ```
    """
    return Program("recursive-doubling", Collective("all-reduce", 1), folded(ranks, _ALL, exchanges))


def exchanges(position: int, ranks: list[int]) -> list[Op]:
    """What the rank at a position does; how many ranks there are is a power of two."""
    ops: list[Op] = []
    distance = 1
    while distance < len(ranks):
        partner = ranks[position ^ distance]
        ops += [Send(_ALL, partner), Recv(_ALL, partner, reduce=True)]
        distance *= 2
    return ops
