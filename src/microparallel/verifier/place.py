"""Show a place in a program: a few operations of a rank, with the one that matters in brackets."""

from __future__ import annotations

from microparallel.program import Program

_AROUND = 3


def show_place(program: Program, rank: int, place: int) -> str:
    """For example `rank 2: … F2.1 [>A2.1@3] <G2.0@3 B2.0 …`."""
    ops = program.ranks[rank]
    first, last = max(0, place - _AROUND), min(len(ops), place + _AROUND + 1)
    words = [f"[{ops[index]}]" if index == place else str(ops[index]) for index in range(first, last)]
    return f"rank {rank}: {'… ' * (first > 0)}{' '.join(words)}{' …' * (last < len(ops))}"
