"""What each rank of a collective holds after each of its operations, found by walking the program on symbols.

Drawn is whose contributions a slice holds: `{0: 1, 2: 1}` is "what rank 0 and rank 2 had, once each". Nothing is judged
here (that is `mp.verify`): a wrong program can be drawn too, and then shows what went wrong.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from microparallel.errors import ProgramError, UsageError
from microparallel.program import Add, Collective, Op, Part, Program, Recv, Send, Slices, Walk, symbols
from microparallel.program.rules import written
from microparallel.simulator import Costs, simulate
from microparallel.trace import Trace

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
    if isinstance(value, Slices):
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
        if isinstance(value, Slices) and value.stop > goal.slices:
            raise ProgramError(f"rank {rank} does {op}, and the tensor has {goal.slices} slices")


# A collective hop by hop: who sends what to whom, and what everybody holds afterwards.
#
# A hop is a tick of a clock by which every message takes one tick, and everything else no time. So hops are a property
# of
# the program, whatever its messages cost on some machine.


@dataclass(frozen=True, slots=True)
class Message:
    """One transfer of a hop."""

    sender: int
    receiver: int
    send: Send
    receive: Recv


@dataclass(frozen=True, slots=True)
class Hop:
    """What happens in one tick: each rank's operations, the messages, and what each rank holds when it has passed."""

    ops: list[list[Op]]
    messages: list[Message]
    held: list[Held]


@dataclass(frozen=True, slots=True)
class Walkthrough:
    """A collective from beginning to end."""

    program: Program
    goal: Collective
    start: list[Held]
    hops: list[Hop]


def hops_of(program: Program) -> Walkthrough:
    """Walk through a collective, one hop after another."""
    goal = program.goal
    if not isinstance(goal, Collective):
        raise UsageError(f"{program.name} ({goal}) has no hops; try the timeline or the clock view")
    trace = simulate(program, Costs(latency=1))
    ticks = _ticks(trace)
    ops: list[list[list[Op]]] = [[[] for _ in program.ranks] for _ in range(round(trace.makespan))]
    held: list[list[Held]] = [[] for _ in range(len(ops) + 1)]
    for rank, states in enumerate(held_after_each(program, goal)):
        after = {0: states[0]}
        for op, state, tick in zip(program.ranks[rank], states[1:], ticks[rank], strict=False):
            if tick is not None:
                ops[tick][rank].append(op)
                after[tick + 1] = state if not isinstance(op, Send) else after.get(tick + 1, state)
        for tick, at in enumerate(held):
            at.append(after[tick] if tick in after else held[tick - 1][rank])
    hops = [Hop(here, _messages(here), then) for here, then in zip(ops, held[1:], strict=True)]
    return Walkthrough(program, goal, held[0], hops)


def _ticks(trace: Trace) -> list[list[int | None]]:
    """For each operation of each rank: the tick in which it happens; None if it never does."""
    begun: dict[tuple[int, Op], deque[int]] = defaultdict(deque)  # of a rank's equal operations, in their order
    for event in sorted(trace.events, key=lambda event: event.start):
        begun[event.rank, event.operation].append(round(event.start))
    last = max(0, round(trace.makespan) - 1)
    ticks: list[list[int | None]] = []
    for rank, ops in enumerate(trace.followed.ranks):
        mine: list[int | None] = []
        at = 0
        for op in ops:
            if isinstance(op, Send | Recv):
                tick = begun[rank, op].popleft() if begun[rank, op] else None
                at = tick if isinstance(op, Recv) and tick is not None else at
                mine.append(tick)
            else:
                mine.append(min(at, last) if trace.makespan else None)  # it belongs to the message it follows
        ticks.append(mine)
    return ticks


def _messages(ops: list[list[Op]]) -> list[Message]:
    """Within a hop a rank receives from another at most once, so sends and receives find each other by rank."""
    receives = {(op.source, rank): op for rank, mine in enumerate(ops) for op in mine if isinstance(op, Recv)}
    return [
        Message(rank, op.to, op, receives[rank, op.to])
        for rank, mine in enumerate(ops)
        for op in mine
        if isinstance(op, Send) and (rank, op.to) in receives
    ]
