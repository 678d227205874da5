"""Rabenseifner's algorithm: the few hops of a tree, and the few bytes of a ring."""

from __future__ import annotations

from microparallel.collectives.folding import folded
from microparallel.program import Collective, Op, Program, Recv, Send, Slices


def halving_doubling_all_reduce(ranks: int) -> Program:
    """Halve: exchange half of the slices still to be summed. Double: exchange the sums, in the opposite order.

    ```
    rank 0: >C2:4@2 <+C0:2@2 >C1@1 <+C0@1 | >C0@1 <C1@1 >C0:2@2 <C2:4@2
    rank 1: >C2:4@3 <+C0:2@3 >C0@0 <+C1@0 | >C1@0 <C0@0 >C0:2@3 <C2:4@3
    rank 2: >C0:2@0 <+C2:4@0 >C3@3 <+C2@3 | >C2@3 <C3@3 >C2:4@0 <C0:2@0
    rank 3: >C0:2@1 <+C2:4@1 >C2@2 <+C3@2 | >C3@2 <C2@2 >C2:4@1 <C0:2@1
    ```
    """
    slices = 1 << (ranks.bit_length() - 1)
    goal = Collective("all-reduce", slices)
    return Program("halving-doubling", goal, folded(ranks, Slices(0, slices), _halve_then_double))


def _halve_then_double(position: int, ranks: list[int]) -> list[Op]:
    halving: list[Op] = []
    doubling: list[Op] = []
    start, stop = 0, len(ranks)
    while stop - start > 1:
        distance = (stop - start) // 2
        middle = start + distance
        partner = ranks[position ^ distance]
        lower, upper = Slices(start, middle), Slices(middle, stop)
        mine, theirs = (upper, lower) if position & distance else (lower, upper)
        halving += [Send(theirs, partner), Recv(mine, partner, reduce=True)]
        doubling = [Send(mine, partner), Recv(theirs, partner), *doubling]
        start, stop = mine.start, mine.stop
    return halving + doubling
