"""What a value holds, in symbols instead of numbers: which ranks' contributions, of which slice, and how often.

A slice of a collective's tensor holds a count of contributions: `{(0, 3): 1, (2, 3): 1}` is "what rank 0 and rank 2 had
in slice 3, once each". A sum merges counts, so a contribution that was forgotten, added twice or put in the wrong place
cannot hide: a slice is *whole* when it holds just what the goal promises, and *partial* before.
"""

from __future__ import annotations

from collections.abc import Mapping

from microparallel.errors import ProgramError
from microparallel.program.ops import Add, Op, Recv, Send
from microparallel.program.program import Collective
from microparallel.program.values import Part, Slices, Value
from microparallel.program.walk import Message

Symbol = Mapping[tuple[int, int], int]  # (contributing rank, slice) → how many times; never changed once made
Content = tuple[Symbol, ...]  # one for each slice


def at_first(goal: Collective, rank: int, index: int) -> Symbol:
    """What a rank brings along in a slice."""
    holds = True
    if goal.kind in ("all-gather", "gather"):
        holds = index == rank
    elif goal.kind in ("broadcast", "scatter"):
        holds = rank == goal.root
    elif goal.kind == "all-to-all":
        holds = index // goal.per_rank == rank
    return {(rank, index): 1} if holds else {}


def whole(goal: Collective, ranks: int, index: int) -> Symbol:
    """What a slice holds when it is as the goal promises, on any rank that is promised it."""
    if goal.kind in ("all-reduce", "reduce", "reduce-scatter"):
        return {(rank, index): 1 for rank in range(ranks)}
    source = index if goal.root is None or goal.kind == "gather" else goal.root
    if goal.kind == "all-to-all":
        source = index // goal.per_rank
    return {(source, index): 1}


def promised(goal: Collective, rank: int, index: int) -> bool:
    """Whether the goal promises a rank that it will have a whole slice."""
    if goal.kind in ("reduce", "gather"):
        return rank == goal.root
    if goal.kind == "all-to-all":
        return index % goal.per_rank == rank
    return goal.kind not in ("reduce-scatter", "scatter") or index == rank


class Contents:
    """What one rank holds: its tensor, slice by slice, and whole contributions of others that it keeps apart."""

    def __init__(self, goal: Collective, rank: int) -> None:
        self.slices = [at_first(goal, rank, index) for index in range(goal.slices)]
        self.parts: dict[Part, Content] = {}
        self._rank = rank

    def do(self, op: Op, message: Message | None) -> None:
        """The effect of an operation: a Send leaves what it carries with its message, a Recv takes it from there."""
        if isinstance(op, Send) and message is not None:
            message.content = self.read(op.value)
        elif isinstance(op, Recv) and message is not None:
            self.write(op.value, message.content, add=op.reduce)
        elif isinstance(op, Add):
            self.write(op.into, self.read(op.value), add=True)

    def read(self, value: Value) -> Content:
        """What stands under a name."""
        if isinstance(value, Slices):
            if value.stop > len(self.slices):
                raise ProgramError(f"rank {self._rank} names {value}, and the tensor has {len(self.slices)} slices")
            return tuple(self.slices[value.start : value.stop])
        if isinstance(value, Part):
            if value not in self.parts:
                raise ProgramError(f"rank {self._rank} reads {value}, which it has not received")
            return self.parts[value]
        raise ProgramError(f"rank {self._rank} names {value}, which is no value of a collective")

    def write(self, value: Value, content: Content, *, add: bool) -> None:
        """Put a content under a name, or add it to what stands there."""
        if isinstance(value, Part) and not add:
            self.parts[value] = content
            return
        mine = self.read(value)
        if len(mine) != len(content):
            raise ProgramError(f"rank {self._rank} puts {len(content)} slices into {value}, which has {len(mine)}")
        new = tuple(map(_sum, mine, content)) if add else content
        if isinstance(value, Part):
            self.parts[value] = new
        elif isinstance(value, Slices):
            self.slices[value.start : value.stop] = new


def _sum(mine: Symbol, other: Symbol) -> Symbol:
    if mine.keys().isdisjoint(other.keys()):
        return {**mine, **other}
    return {key: mine.get(key, 0) + other.get(key, 0) for key in {**mine, **other}}
