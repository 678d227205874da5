"""Programs of collectives as one rank performs them again and again: built once, and cut into rounds once."""

from __future__ import annotations

import functools

from microparallel.collectives import build
from microparallel.comms.interpreter import Round, rounds, slices_of
from microparallel.program import Recv


class Plan:
    """One rank's part of a program."""

    def __init__(self, name: str, slices: int, steps: tuple[Round, ...], *, all_meet: bool = False) -> None:
        self.name = name
        self.slices = slices
        self.rounds = steps
        self.all_meet = all_meet  # whether every rank hears from every other


@functools.lru_cache(maxsize=1024)
def plan_of(name: str, ranks: int, rank: int, root: int | None = None) -> Plan:
    """One rank's part of a program by its name."""
    program = build(name, ranks) if root is None else build(name, ranks, root=root)
    heard = [{op.source for op in ops if isinstance(op, Recv)} for ops in program.ranks]
    all_meet = all(sources == set(range(ranks)) - {own} for own, sources in enumerate(heard))
    return Plan(name, slices_of(program), tuple(rounds(program.ranks[rank])), all_meet=all_meet)
