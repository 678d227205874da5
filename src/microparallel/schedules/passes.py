"""Passes: from a program to another. A builder gives the order of computation; passes add messages and frees."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import replace

from microparallel.program import (
    Act,
    Forward,
    ForwardBackward,
    Free,
    Grad,
    Observed,
    Op,
    Program,
    Recv,
    Rest,
    Rules,
    Send,
    TrainingStep,
    Value,
    halves,
)

Channel = tuple[int, int]  # sender, receiver


def lower(program: Program) -> Program:
    """Make a compute-only program runnable: insert sends and receives, then free what is dead."""
    return free_dead_values(insert_sends(program))


def complete(program: Program) -> Program:
    """Add what a schedule may leave out: if it says only what to compute, its sends, receives and frees.

    ```
    rank 0: F0.0 B0.0           rank 0: F0.0 >A0.0@1 <G0.0@1 B0.0 …
    rank 1: F1.0 B1.0     →     rank 1: <A0.0@0 F1.0 B1.0 >G0.0@0 …
    ```

    Any other program is returned as it is: a collective, one with a message or a Free of its own, and one whose ranks
    need nothing from each other.
    """
    if not isinstance(program.goal, TrainingStep) or _has(program, (Send, Recv, Free, Observed)):
        return program
    lowered = lower(program)
    return lowered if _has(lowered, (Send,)) else program


def _has(program: Program, kinds: tuple[type[Op], ...]) -> bool:
    return any(isinstance(op, kinds) for ops in program.ranks for op in ops)


def insert_sends(program: Program) -> Program:
    """Send each value to the ranks that need it as soon as it is made, and receive it just before it is needed.

    ```
    rank 0: F0.0                rank 0: F0.0 >A0.0@1
    rank 1: F1.0        →       rank 1: <A0.0@0 F1.0
    ```

    Messages from one rank to another arrive in the order they were sent, so a receive takes the earlier ones first.
    What no rank makes is not sent: the verifier names the operation that lacks it.
    """
    rules = [Rules(program.goal, ops) for ops in program.ranks]
    foreign = _foreign_values(program, rules)
    channels: dict[Channel, deque[Value]] = defaultdict(deque)
    with_sends: list[list[Op]] = []
    for rank, ops in enumerate(program.ranks):
        mine: list[Op] = []
        for op in ops:
            mine.append(op)
            for value in rules[rank].makes(op):
                for receiver in foreign.get(value, ()):
                    mine.append(Send(value, receiver))
                    channels[rank, receiver].append(value)
        with_sends.append(mine)
    sources = {(value, receiver): sender for (sender, receiver), values in channels.items() for value in values}
    ranks = [_with_receives(rank, ops, rules[rank], channels, sources) for rank, ops in enumerate(with_sends)]
    return replace(program, ranks=tuple(ranks))


def _foreign_values(program: Program, rules: list[Rules]) -> dict[Value, list[int]]:
    """For each activation or gradient, the ranks that need it and do not make it themselves."""
    foreign: dict[Value, list[int]] = defaultdict(list)
    for rank, ops in enumerate(program.ranks):
        made = {value for op in ops for value in rules[rank].makes(op)}
        for op in ops:
            for value in rules[rank].needs(op):
                if isinstance(value, Act | Grad) and value not in made and rank not in foreign[value]:
                    foreign[value].append(rank)
    return foreign


def _with_receives(
    rank: int,
    ops: list[Op],
    rules: Rules,
    channels: dict[Channel, deque[Value]],
    sources: dict[tuple[Value, int], int],
) -> tuple[Op, ...]:
    result: list[Op] = []
    here: set[Value] = set()
    for op in ops:
        for value in rules.needs(op):
            source = sources.get((value, rank))
            while source is not None and value not in here:
                arrived = channels[source, rank].popleft()
                result.append(Recv(arrived, source))
                here.add(arrived)
        result.append(op)
    return tuple(result)


def free_dead_values(program: Program) -> Program:
    """Free each activation, gradient and rest after the last operation that touches it."""
    return replace(program, ranks=tuple(_with_frees(ops, Rules(program.goal, ops)) for ops in program.ranks))


def _with_frees(ops: tuple[Op, ...], rules: Rules) -> tuple[Op, ...]:
    last_use: dict[Value, int] = {}
    for index, op in enumerate(ops):
        for value in (*rules.needs(op), *rules.makes(op)):
            if isinstance(value, Act | Grad | Rest):
                last_use[value] = index
    dead: dict[int, list[Value]] = defaultdict(list)
    for value, index in last_use.items():
        dead[index].append(value)
    result: list[Op] = []
    for index, op in enumerate(ops):
        result.append(op)
        result += [Free(value) for value in dead.get(index, ())]
    return tuple(result)


# ── only a part of a step ───────────────────────────────────────────────────────────────────────────────────────────


def forwards_only(program: Program) -> Program:
    """Keep a step's forwards in their order, with the messages and frees that they need: for evaluation.

    A forward waits for forwards alone, so whatever order was right with the backwards is right without them.
    """
    orders = [tuple(half for op in ops for half in halves(op) if isinstance(half, Forward)) for ops in program.ranks]
    return lower(replace(program, name=f"{program.name}, forwards only", ranks=tuple(orders)))


def first_microbatches(ops: Iterable[Op], microbatches: int) -> tuple[Op, ...]:
    """Keep the operations of the first micro-batches; a pair that loses one half becomes its other half.

    Some builders write whole rounds of micro-batches and then cut off the rest. Micro-batches depend on each other only
    through the order of a rank's operations, so what is left is still right.
    """
    kept: list[Op] = []
    for op in ops:
        wanted = [half for half in halves(op) if half.microbatch < microbatches]
        if isinstance(op, ForwardBackward) and len(wanted) == 2:
            kept.append(op)
        else:
            kept.extend(wanted)
    return tuple(kept)
