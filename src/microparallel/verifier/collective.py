"""Does a collective really do what it says? Run it on symbols instead of numbers (`program/symbols.py`)."""

from __future__ import annotations

from microparallel.errors import ProgramError
from microparallel.program import Add, Collective, Join, Program, Recv, Send, Walk
from microparallel.program.symbols import Contents, Symbol, promised, whole
from microparallel.verifier.findings import Unreached


def check_collective(program: Program, goal: Collective) -> None:
    """Raise `ProgramError` unless every rank ends with what the goal promises, naming the rank and the slice."""
    if goal.root is not None and goal.root >= program.world_size:
        raise ProgramError(f"the goal's root is rank {goal.root}, and there are ranks 0 to {program.world_size - 1}")
    ranks = [Contents(goal, rank) for rank in range(program.world_size)]
    for cursor in Walk(program):
        op = cursor.op
        if not isinstance(op, Send | Recv | Add | Join):
            raise ProgramError(f"rank {cursor.rank} does {op}, which is no operation of a collective")
        ranks[cursor.rank].do(op, cursor.message)
    wanted = [whole(goal, program.world_size, index) for index in range(goal.slices)]
    for rank, contents in enumerate(ranks):
        for index, symbol in enumerate(contents.slices):
            if promised(goal, rank, index) and symbol != wanted[index]:
                found, right = _words(symbol, index), _words(wanted[index], index)
                words = f"rank {rank} ends with {found} in slice {index}, and should have {right}"
                raise Unreached(words, rank, index, symbol, wanted[index])


def _words(symbol: Symbol, index: int) -> str:
    parts = []
    for (rank, origin), times in sorted(symbol.items()):
        misplaced = f" of slice {origin}" if origin != index else ""
        parts.append(f"rank {rank}'s part{misplaced}" + (f" {times} times" if times > 1 else ""))
    return " + ".join(parts) or "nothing"
