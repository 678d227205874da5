"""All-to-all: every rank has a slice for every other rank, and sends it there directly."""

from __future__ import annotations

from microparallel.program import Collective, Op, Program, Recv, Send, Slices


def all_to_all(ranks: int) -> Program:
    """Rank s hands each rank r what it has for it; there is a slice for each pair, and C(s·p + r) goes from s to r.

    ```
    rank 0: >C2@2 >C1@1 <C3@1 <C6@2
    rank 1: >C3@0 >C5@2 <C7@2 <C1@0
    rank 2: >C7@1 >C6@0 <C2@0 <C5@1
    ```

    So a rank begins with a row of a square, and ends with a column: the ranks transpose it. At hop k each rank
    receives from the rank k places further on, so no rank sends to two at once.
    """
    ops = tuple(_ops(rank, ranks) for rank in range(ranks))
    return Program("all-to-all", Collective("all-to-all", ranks * ranks), ops)


def _ops(rank: int, ranks: int) -> tuple[Op, ...]:
    readers = [(rank - distance) % ranks for distance in range(1, ranks)]
    read = [(rank + distance) % ranks for distance in range(1, ranks)]
    sends: list[Op] = [Send(_slice(rank, reader, ranks), reader) for reader in readers]
    return (*sends, *(Recv(_slice(source, rank, ranks), source) for source in read))


def _slice(source: int, to: int, ranks: int) -> Slices:
    return Slices(source * ranks + to, source * ranks + to + 1)
