"""Only the forwards of a training step: what a pipeline does to measure, or to answer."""

from __future__ import annotations

from dataclasses import replace

from microparallel.program import Forward, Program, halves
from microparallel.schedules.lowering import lower


def forwards_only(program: Program) -> Program:
    """Keep a step's forwards in their order, with the messages and frees that they need.

    A forward waits for forwards alone, so whatever order was right with the backwards is right without them.
    """
    orders = [tuple(half for op in ops for half in halves(op) if isinstance(half, Forward)) for ops in program.ranks]
    return lower(replace(program, name=f"{program.name}, forwards only", ranks=tuple(orders)))
