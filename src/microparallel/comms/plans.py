"""Programs of collectives as one rank performs them again and again: built once, and cut into rounds once."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from microparallel.collectives import GroupKind, program_of
from microparallel.comms.interpreter import Round, rounds, slices_of
from microparallel.program import Add, Chunk, Op, Recv


class Plan:
    """One rank's part of a program."""

    def __init__(self, name: str, slices: int, ops: Sequence[Op], *, all_meet: bool = False) -> None:
        self.name = name
        self.slices = slices
        self.rounds: tuple[Round, ...] = tuple(rounds(ops))
        self.all_meet = all_meet  # whether every rank hears from every other
        written = [op.value if isinstance(op, Recv) else op.into for op in ops if isinstance(op, Recv | Add)]
        # The slices of this rank's tensor that are changed.
        self.written = frozenset(index for value in written if isinstance(value, Chunk) for index in value.slices)


@functools.lru_cache(maxsize=1024)
def plan_of(collective: GroupKind, algorithm: str, ranks: int, rank: int, root: int | None = None) -> Plan:
    """One rank's part of a collective by one of its algorithms."""
    program = program_of(collective, algorithm, ranks, root)
    heard = [{op.source for op in ops if isinstance(op, Recv)} for ops in program.ranks]
    all_meet = all(sources == set(range(ranks)) - {own} for own, sources in enumerate(heard))
    return Plan(program.name, slices_of(program), program.ranks[rank], all_meet=all_meet)
