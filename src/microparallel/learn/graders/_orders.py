"""The order in which ranks computed, held against a schedule's program."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from microparallel.learn.verdict import Wrong
from microparallel.program import Program, halves

_AROUND = 4


def tokens(program: Program, rank: int) -> list[str]:
    """What a rank computes, in text."""
    return [str(op) for op in program.ranks[rank] if halves(op)]


def show(order: Sequence[str], place: int) -> str:
    """A few operations around a place, with that one in brackets."""
    first, last = max(0, place - _AROUND), place + _AROUND + 1
    words = [f"[{word}]" if first + at == place else word for at, word in enumerate(order[first:last])]
    if place >= len(order):
        words.append("[nothing more]")
    return f"{'… ' * (first > 0)}{' '.join(words)}{' …' * (last < len(order))}"


def compare(found: Sequence[str], expected: Sequence[str], name: str) -> str:
    """Two lines that show where they part; nothing if they do not."""
    pairs = enumerate(itertools.zip_longest(found, expected))
    place = next((place for place, (mine, wanted) in pairs if mine != wanted), None)
    if place is None:
        return ""
    width = max(len("yours"), len(name))
    return f"\n  {'yours':<{width}}  {show(found, place)}\n  {name:<{width}}  {show(expected, place)}"


def require_freed(rank: int, most_kept: int) -> None:
    """Refuse outputs that are held after their backward; one or two may still have a name in some function."""
    if most_kept > 2:
        raise Wrong(
            f"rank {rank} still holds what {most_kept} micro-batches left although their backward is done: take it out "
            "where you keep it (pop); memory is what a pipeline is for"
        )
