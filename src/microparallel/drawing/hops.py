"""A collective hop by hop: who sends what to whom, and what everybody holds afterwards.

A hop is a tick of a clock by which every message takes one tick, and everything else no time. So hops are a property of
the program, whatever its messages cost on some machine.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

from microparallel.drawing.holdings import Held, held_after_each
from microparallel.errors import UsageError
from microparallel.program import Collective, Op, Program, Recv, Send
from microparallel.simulator import Costs, simulate
from microparallel.trace import Trace


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
