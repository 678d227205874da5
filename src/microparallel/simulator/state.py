"""Where a simulation stands: each rank's lanes and clocks, and the messages between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from microparallel.program import Chunk, Free, GroupOp, Join, Lane, Op, Program, Rules, Send, Value, lane


@dataclass(slots=True, eq=False)
class Message:
    """One transfer: when each side was ready for it, and when it ended."""

    sender: int
    receiver: int
    send: Send | None = None
    offered: float | None = None
    posted: float | None = None
    issued: float = 0  # when its rank came to the Send
    start: float = 0
    end: float | None = None
    number: int = 0  # of its Send, among all
    index: int = 0  # among those of its channel


@dataclass(slots=True, eq=False)
class Rank:
    """Where one rank stands: a clock and a place in the list for each lane."""

    number: int
    rules: Rules
    compute: list[Op]
    comm: list[Op]
    compute_at: int = 0
    comm_at: int = 0
    compute_free: float = 0
    comm_free: float = 0
    port_free: float = 0
    ready: dict[Value, float] = field(default_factory=dict)  # when each value was made
    unmade: dict[Value, list[Message]] = field(default_factory=dict)  # to be sent as soon as the value is made
    sending: dict[object, list[Message]] = field(default_factory=dict)  # by slice: what is under way, or waits to be
    receiving: Message | None = None
    missing: Value | None = None  # what the compute lane waits for
    met: Counter[GroupOp] = field(default_factory=Counter)  # how often it has done what a group does
    held_up: bool = False  # it waits to overwrite what it sends


def prepare(number: int, ops: tuple[Op, ...], program: Program) -> Rank:
    """Deal a rank's operations to its lanes. A Free takes no time, and a Join stands on both."""
    rank = Rank(number, Rules(program.goal, ops), [], [])
    for op in ops:
        if isinstance(op, Join):
            rank.compute.append(op)
            rank.comm.append(op)
        elif not isinstance(op, Free):
            (rank.comm if lane(op) is Lane.COMM else rank.compute).append(op)
    return rank


def places_of(value: Value) -> Iterable[object]:
    """The pieces of memory a value stands for, so that overlapping chunks are found without comparing all."""
    if not isinstance(value, Chunk):
        return (value,)
    return (value.start,) if value.stop == value.start + 1 else value.slices
