"""What each rank of a collective holds after each of its operations, found by walking the program on symbols.

Drawn is whose contributions a slice holds: `{0: 1, 2: 1}` is "what rank 0 and rank 2 had, once each". Nothing is judged
here (that is `mp.verify`): a wrong program can be drawn too, and then shows what went wrong.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from microparallel.errors import ProgramError
from microparallel.program import Add, Chunk, Collective, Op, Part, Program, Recv, Walk, symbols
from microparallel.program.rules import written

Symbol = Mapping[int, int]  # contributing rank → how many times; never changed once made


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds at one moment: its tensor, slice by slice, and whose whole contributions it keeps apart."""

    slices: tuple[Symbol, ...]
    parts: frozenset[int] = frozenset()


def complete(goal: Collective, ranks: int, index: int, symbol: Symbol) -> bool:
    """Whether a slice is as it should be at the end, wherever that is."""
    return symbol == _whose(symbols.whole(goal, ranks, index))


def held_after_each(program: Program, goal: Collective) -> list[list[Held]]:
    """For each rank: what it holds at first, and after each of its operations."""
    contents = [symbols.Contents(goal, rank) for rank in range(program.world_size)]
    states = [[Held(tuple(map(_whose, mine.slices)))] for mine in contents]
    for cursor in Walk(program):
        op, mine, held = cursor.op, contents[cursor.rank], states[cursor.rank][-1]
        _require_slices(cursor.rank, op, goal)
        with contextlib.suppress(ProgramError):  # it reads what is not there: then nothing is written either
            mine.do(op, cursor.message)
        if isinstance(op, Recv | Add):
            held = _written(held, op, mine)
        states[cursor.rank].append(held)
    return states


def _written(held: Held, op: Recv | Add, contents: symbols.Contents) -> Held:
    """What is held now that an operation has written its value; all the rest stays as it is."""
    value = written(op)
    if isinstance(value, Chunk):
        new = map(_whose, contents.slices[value.start : value.stop])
        return replace(held, slices=(*held.slices[: value.start], *new, *held.slices[value.stop :]))
    return replace(held, parts=held.parts | {value.rank}) if isinstance(value, Part) else held


def _whose(symbol: symbols.Symbol) -> Symbol:
    counts: Counter[int] = Counter()
    for (rank, _), times in symbol.items():
        counts[rank] += times
    return dict(sorted(counts.items()))


def _require_slices(rank: int, op: Op, goal: Collective) -> None:
    for value in (getattr(op, "value", None), getattr(op, "into", None)):
        if isinstance(value, Chunk) and value.stop > goal.slices:
            raise ProgramError(f"rank {rank} does {op}, and the tensor has {goal.slices} slices")
