"""What each rank of a collective holds after each of its operations, found by walking the program on symbols.

A slice holds contributions: `{0: 1, 2: 1}` is "what rank 0 and rank 2 had, once each". Nothing is judged here (that is
`mp.verify`): a wrong program can be drawn too, and then shows what went wrong.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

from microparallel.errors import ProgramError
from microparallel.program import Add, Chunk, Collective, Part, Program, Recv, Send, Value

Symbol = Mapping[int, int]  # contributing rank → how many times; never changed once made
Content = tuple[Symbol, ...]  # one symbol for each slice


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds at one moment: its tensor, slice by slice, and whole contributions kept apart."""

    slices: Content
    parts: Mapping[int, Content]

    def read(self, value: Value) -> Content:
        """What stands under a name; nothing, if it was never received."""
        if isinstance(value, Part):
            return self.parts.get(value.rank, ())
        return self.slices[value.start : value.stop] if isinstance(value, Chunk) else ()

    def written(self, value: Value, content: Content, *, add: bool) -> Held:
        """What is held once this content was put, or added, under a name."""
        new = _sum(self.read(value), content) if add else content
        if isinstance(value, Part):
            return Held(self.slices, {**self.parts, value.rank: new})
        if not isinstance(value, Chunk):
            return self
        kept = new[: len(value)]
        return Held((*self.slices[: value.start], *kept, *self.slices[value.start + len(kept) :]), self.parts)


def at_first(goal: Collective, rank: int) -> Held:
    """What a rank brings along."""
    mine: Symbol = {rank: 1}
    if goal.kind in ("all-gather", "gather"):
        return Held(tuple(mine if index == rank else {} for index in range(goal.slices)), {})
    if goal.kind == "all-to-all":
        return Held(tuple(mine if index // goal.per_rank == rank else {} for index in range(goal.slices)), {})
    if goal.kind in ("broadcast", "scatter") and rank != goal.root:
        return Held(({},) * goal.slices, {})
    return Held((mine,) * goal.slices, {})


def complete(goal: Collective, ranks: int, index: int, symbol: Symbol) -> bool:
    """Whether a slice is as it should be at the end, wherever that is."""
    if goal.kind in ("all-gather", "gather"):
        return symbol == {index: 1}
    if goal.kind == "all-to-all":
        return symbol == {index // goal.per_rank: 1}
    if goal.kind in ("broadcast", "scatter"):
        return symbol == {goal.root: 1}
    return symbol == dict.fromkeys(range(ranks), 1)


def walk(program: Program, goal: Collective) -> list[list[Held]]:
    """For each rank: what it holds at first, and after each of its operations."""
    states = [[at_first(goal, rank)] for rank in range(program.world_size)]
    channels: dict[tuple[int, int], deque[Content]] = defaultdict(deque)
    waiting = deque(range(program.world_size))
    while waiting:
        rank = waiting.popleft()
        for op in program.ranks[rank][len(states[rank]) - 1 :]:
            held = states[rank][-1]
            _require_slices(rank, op, goal)
            if isinstance(op, Send):
                channels[rank, op.to].append(held.read(op.value))
                waiting.append(op.to)  # it may have waited for this
            elif isinstance(op, Recv):
                if not channels[op.source, rank]:
                    break
                held = held.written(op.value, channels[op.source, rank].popleft(), add=op.reduce)
            elif isinstance(op, Add):
                held = held.written(op.into, held.read(op.value), add=True)
            states[rank].append(held)
    return states


def _sum(mine: Content, other: Content) -> Content:
    return tuple(
        {rank: one.get(rank, 0) + two.get(rank, 0) for rank in sorted(one.keys() | two.keys())}
        for one, two in zip(mine, other, strict=False)
    )


def _require_slices(rank: int, op: object, goal: Collective) -> None:
    for value in (getattr(op, "value", None), getattr(op, "into", None)):
        if isinstance(value, Chunk) and value.stop > goal.slices:
            raise ProgramError(f"rank {rank} does {op}, and the tensor has {goal.slices} slices")
