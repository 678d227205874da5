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
    ranks = contents_after(program, goal)
    wanted = [whole(goal, program.world_size, index) for index in range(goal.slices)]
    for rank, contents in enumerate(ranks):
        for index, symbol in enumerate(contents.slices):
            if promised(goal, rank, index) and symbol != wanted[index]:
                found, right = _words(symbol, index), _words(wanted[index], index)
                words = f"rank {rank} ends with {found} in slice {index}, and should have {right}"
                raise Unreached(words, rank, index, symbol, wanted[index])


def contents_after(program: Program, goal: Collective) -> list[Contents]:
    """What each rank holds when all of them have come to their end."""
    ranks = [Contents(goal, rank) for rank in range(program.world_size)]
    for cursor in Walk(program):
        op = cursor.op
        if not isinstance(op, Send | Recv | Add | Join):
            raise ProgramError(f"rank {cursor.rank} does {op}, which is no operation of a collective")
        ranks[cursor.rank].do(op, cursor.message)
    return ranks


def check_sums_so_far(program: Program, goal: Collective) -> None:
    """Raise `ProgramError` if the goal is out of reach, whatever else is sent.

    A program that is not finished may leave a slice partial. But sums are never taken apart again, so no slice may hold
    a contribution twice or out of place; and what no rank holds any more is lost.
    """
    ranks = contents_after(program, goal)
    for index in range(goal.slices):
        right = whole(goal, program.world_size, index)
        for rank, contents in enumerate(ranks):
            symbol = contents.slices[index]
            if any(times > right.get(key, 0) for key, times in symbol.items()):
                words = f"rank {rank} would hold {_words(symbol, index)} in slice {index}; a sum has each part once"
                raise Unreached(words, rank, index, symbol, right)
        for key in right:
            if not any(key in contents.slices[index] for contents in ranks):
                raise ProgramError(
                    f"no rank would hold rank {key[0]}'s part of slice {index} any more; it would be lost"
                )


def _words(symbol: Symbol, index: int) -> str:
    parts = []
    for (rank, origin), times in sorted(symbol.items()):
        misplaced = f" of slice {origin}" if origin != index else ""
        parts.append(f"rank {rank}'s part{misplaced}" + (f" {times} times" if times > 1 else ""))
    return " + ".join(parts) or "nothing"
