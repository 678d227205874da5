"""Does a collective really do what it says? Run it on symbols instead of numbers.

A slice holds a count of contributions: `{(0, 3): 1, (2, 3): 1}` is "what rank 0 and rank 2 had in slice 3, once each".
A sum merges counts, so a contribution that was forgotten, added twice or put in the wrong place cannot hide.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque

from microparallel.errors import ProgramError
from microparallel.program import Add, Chunk, Collective, Join, Op, Part, Program, Recv, Send, Value
from microparallel.verifier.execution import Execution
from microparallel.verifier.findings import Unreached

Symbol = Counter[tuple[int, int]]  # (contributing rank, slice) → how many times
Content = list[Symbol]  # one for each slice


def check_collective(program: Program, goal: Collective) -> None:
    """Raise `ProgramError` unless every rank ends with what the goal promises, naming the rank and the slice."""
    if goal.root is not None and goal.root >= program.world_size:
        raise ProgramError(f"the goal's root is rank {goal.root}, and there are ranks 0 to {program.world_size - 1}")
    memories = [_Memory(rank, program, goal) for rank in range(program.world_size)]
    channels: dict[tuple[int, int], deque[Content]] = defaultdict(deque)

    def visit(rank: int, _place: int, op: Op) -> None:
        memory = memories[rank]
        if isinstance(op, Send):
            channels[rank, op.to].append([symbol.copy() for symbol in memory.read(op.value)])
        elif isinstance(op, Recv):
            memory.write(op.value, channels[op.source, rank].popleft(), add=op.reduce)
        elif isinstance(op, Add):
            memory.write(op.into, memory.read(op.value), add=True)
        elif not isinstance(op, Join):
            raise ProgramError(f"rank {rank} does {op}, which is no operation of a collective")

    Execution(program, "buffered").run(visit)
    for memory in memories:
        memory.check()


class _Memory:
    """What one rank holds, by slices; and the whole contributions it keeps apart."""

    def __init__(self, rank: int, program: Program, goal: Collective) -> None:
        self._rank = rank
        self._goal = goal
        self._ranks = range(program.world_size)
        self._slices: Content = [self._at_first(index) for index in range(goal.slices)]
        self._parts: dict[Part, Content] = {}

    def read(self, value: Value) -> Content:
        if isinstance(value, Chunk):
            if value.stop > self._goal.slices:
                raise ProgramError(f"rank {self._rank} names {value}, and the tensor has {self._goal.slices} slices")
            return self._slices[value.start : value.stop]
        if isinstance(value, Part):
            if value not in self._parts:
                raise ProgramError(f"rank {self._rank} reads {value}, which it has not received")
            return self._parts[value]
        raise ProgramError(f"rank {self._rank} names {value}, which is no value of a collective")

    def write(self, value: Value, content: Content, *, add: bool) -> None:
        if isinstance(value, Part) and not add:
            self._parts[value] = content
            return
        mine = self.read(value)
        if len(mine) != len(content):
            raise ProgramError(f"rank {self._rank} puts {len(content)} slices into {value}, which has {len(mine)}")
        for symbol, other in zip(mine, content, strict=True):
            if not add:
                symbol.clear()
            symbol.update(other)

    def check(self) -> None:
        for index, symbol in enumerate(self._slices):
            wanted = self._at_the_end(index)
            if wanted is not None and symbol != wanted:
                found, promised = _words(symbol, index), _words(wanted, index)
                words = f"rank {self._rank} ends with {found} in slice {index}, and should have {promised}"
                raise Unreached(words, self._rank, index, symbol, wanted)

    def _at_first(self, index: int) -> Symbol:
        kind, root = self._goal.kind, self._goal.root
        holds = True
        if kind in ("all-gather", "gather"):
            holds = index == self._rank
        elif kind in ("broadcast", "scatter"):
            holds = self._rank == root
        return Counter({(self._rank, index): 1} if holds else {})

    def _at_the_end(self, index: int) -> Symbol | None:
        """What a slice must hold; None where the goal promises nothing."""
        kind, root = self._goal.kind, self._goal.root
        here = {
            "all-reduce": True,
            "all-gather": True,
            "broadcast": True,
            "reduce": self._rank == root,
            "gather": self._rank == root,
            "reduce-scatter": index == self._rank,
            "scatter": index == self._rank,
        }[kind]
        if not here:
            return None
        if kind in ("all-reduce", "reduce", "reduce-scatter"):
            return Counter({(rank, index): 1 for rank in self._ranks})
        source = index if root is None or kind == "gather" else root
        return Counter({(source, index): 1})


def _words(symbol: Symbol, index: int) -> str:
    parts = []
    for (rank, origin), times in sorted(symbol.items()):
        misplaced = f" of slice {origin}" if origin != index else ""
        parts.append(f"rank {rank}'s part{misplaced}" + (f" {times} times" if times > 1 else ""))
    return " + ".join(parts) or "nothing"
