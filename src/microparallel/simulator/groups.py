"""What the ranks of a group do together: its algorithm's program, run on the links between them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from microparallel.collectives import GroupKind, program_of, resolve
from microparallel.program import AllReduce, Chunk, Collective, Goal, GroupOp, Program, Send, Value
from microparallel.simulator.costs import Costs
from microparallel.topology import Link
from microparallel.trace import Event


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's share of what its group does: how long it takes part, and what it sends."""

    seconds: float
    messages: int
    bytes: float


class Groups:
    """Finds out what AllReduces and Broadcasts cost; simulates their programs, and what is alike only once.

    Args:
        costs: of the whole program.
        goal: of the whole program.
        run: simulates a program.
    """

    def __init__(self, costs: Costs, goal: Goal, run: Callable[[Program, Costs], list[Event]]) -> None:
        self._costs = costs
        self._goal = goal
        self._run = run
        self._known: dict[tuple[type[GroupOp], str, int | None, tuple[int, ...], float], list[float]] = {}

    def shares(self, op: GroupOp, ranks: tuple[int, ...]) -> list[Share]:
        """The share of each rank when all begin at the same time."""
        size = self._costs.size(op.value, self._goal)
        kind: GroupKind = "all-reduce" if isinstance(op, AllReduce) else "broadcast"
        root = None if isinstance(op, AllReduce) else ranks.index(op.root)
        algorithm = resolve(kind, op.algorithm, len(ranks), size, self._costs.transport)
        sent = _sent(kind, algorithm, len(ranks), root)
        measured = self._costs.together(op) if len(ranks) > 1 else 0
        if measured is not None:
            seconds = [measured] * len(ranks)
        else:
            key = (type(op), algorithm, root, ranks, size)
            if key not in self._known:
                program = program_of(kind, algorithm, len(ranks), root)
                self._known[key] = self._seconds(program, ranks, size)
            seconds = self._known[key]
        return [
            Share(end, messages, slices * size / of) for end, (messages, slices, of) in zip(seconds, sent, strict=True)
        ]

    def _seconds(self, program: Program, ranks: tuple[int, ...], size: float) -> list[float]:
        ends: list[float] = [0] * len(ranks)
        for event in self._run(program, _Within(costs=self._costs, ranks=ranks, whole=size)):
            ends[event.rank] = max(ends[event.rank], event.end)
        return ends


@functools.cache
def _sent(kind: GroupKind, algorithm: str, ranks: int, root: int | None) -> list[tuple[int, int, int]]:
    """For each rank: how many messages it sends, how many slices they hold, and how many the tensor has."""
    program = program_of(kind, algorithm, ranks, root)
    assert isinstance(program.goal, Collective)
    slices = program.goal.slices
    sent = [[op.value for op in ops if isinstance(op, Send)] for ops in program.ranks]
    return [
        (len(values), sum(len(value) if isinstance(value, Chunk) else slices for value in values), slices)
        for values in sent
    ]


@dataclass(frozen=True, kw_only=True)
class _Within(Costs):
    """The costs of a whole program, as they are among the ranks of one group."""

    costs: Costs
    ranks: tuple[int, ...]
    whole: float  # bytes of the value

    def __post_init__(self) -> None:
        object.__setattr__(self, "add_seconds_per_byte", self.costs.add_seconds_per_byte)

    def size(self, value: Value, goal: Goal) -> float:
        """How many bytes a part of the group's value has."""
        assert isinstance(goal, Collective)
        return self.whole * len(value) / goal.slices if isinstance(value, Chunk) else self.whole

    def link(self, sender: int, receiver: int) -> Link:
        """The connection between two ranks of the group."""
        return self.costs.link(self.ranks[sender], self.ranks[receiver])
