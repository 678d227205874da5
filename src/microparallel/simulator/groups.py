"""What a group's operation costs: its algorithm's program, simulated on the links between the group's ranks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from microparallel.collectives import GroupKind, group_kind, program_of, resolve, sent_by
from microparallel.program import (
    Broadcast,
    Collective,
    Goal,
    GroupOp,
    MeetingOp,
    Observed,
    Program,
    Send,
    Slices,
    Value,
)
from microparallel.simulator.costs import Costs
from microparallel.topology import Link, Port
from microparallel.trace import Event


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's share of what its group does: how long it takes part, and what it sends."""

    seconds: float
    messages: int
    bytes: float


@dataclass(frozen=True, slots=True)
class _Shape:
    """What can be said of an algorithm's program without costs."""

    program: Program
    channels: list[tuple[int, int]]  # (sender, receiver)
    sent: tuple[tuple[int, float], ...]  # for each rank: how many messages, and how much of the whole tensor


class GroupCosts:
    """What AllReduces, AllGathers and the like cost: their programs are simulated, equal ones only once.

    Args:
        costs: of the whole program.
        goal: of the whole program.
        run: simulates a program.
    """

    def __init__(self, costs: Costs, goal: Goal, run: Callable[[Program, Costs], list[Event]]) -> None:
        self._costs = costs
        self._goal = goal
        self._run = run
        self._known: dict[tuple[object, ...], list[float]] = {}

    def shares(self, op: MeetingOp, ranks: tuple[int, ...]) -> list[Share]:
        """The share of each rank when all begin at the same time."""
        found = self._observed(op, ranks) if isinstance(op, Observed) else self._by_algorithm(op, ranks)
        known = [self._costs.traffic(op, rank) for rank in ranks]
        both = zip(found, known, strict=True)
        return [share if sent is None else Share(share.seconds, *sent) for share, sent in both]

    def _observed(self, op: Observed, ranks: tuple[int, ...]) -> list[Share]:
        """An observed collective takes as long as was measured; by which algorithm it ran is not known."""
        return [Share(self._costs.together(op, rank) or 0, 0, 0) for rank in ranks]

    def _by_algorithm(self, op: GroupOp, ranks: tuple[int, ...]) -> list[Share]:
        size = self._costs.bytes(op, self._goal, ranks[0])
        kind = group_kind(op)
        algorithm = resolve(kind, op.algorithm, len(ranks), size, self._costs.transport)
        measured = [self._costs.together(op, rank) for rank in ranks] if len(ranks) > 1 else [0.0]
        known = [seconds for seconds in measured if seconds is not None]
        if not known and algorithm == "ring" and (link := self._only_link(ranks)) is not None:
            return [self._ring(kind, len(ranks), size, link)] * len(ranks)
        shape = _shape(kind, algorithm, len(ranks), ranks.index(op.root) if isinstance(op, Broadcast) else None)
        seconds = known or self._simulated(shape, ranks, size)
        return [Share(end, messages, part * size) for end, (messages, part) in zip(seconds, shape.sent, strict=True)]

    def _only_link(self, ranks: tuple[int, ...]) -> Link | None:
        """How neighbours in a ring are connected, if all are in the same way and none waits for another's port."""
        pairs = list(itertools.pairwise((*ranks, ranks[0]))) if len(ranks) > 1 else []
        links = {self._costs.link(*pair) for pair in pairs}
        ports = [port for pair in pairs for port in self._costs.ports(*pair)]
        return links.pop() if len(links) == 1 and len(set(ports)) == len(ports) else None

    def _ring(self, kind: GroupKind, count: int, size: float, link: Link) -> Share:
        """Where all links are alike, all ranks do each step at the same time. So one rank's steps are enough.

        A simulation would be slow: a ring of a thousand ranks has millions of operations.
        """
        messages = (count - 1) * (2 if kind == "all-reduce" else 1)
        adding = 0.0 if kind == "all-gather" else (count - 1) * size / count * self._costs.add_seconds_per_byte
        return Share(messages * link.seconds(size / count) + adding, messages, messages * size / count)

    def _simulated(self, shape: _Shape, ranks: tuple[int, ...], size: float) -> list[float]:
        channels = [(ranks[sender], ranks[receiver]) for sender, receiver in shape.channels]
        links = tuple((self._costs.link(*channel), self._costs.ports(*channel)) for channel in channels)
        key = (id(shape), links, size)
        if key not in self._known:
            ends: list[float] = [0] * len(ranks)
            self._known[key] = ends
            for event in self._run(shape.program, _Within(costs=self._costs, ranks=ranks, whole=size)):
                ends[event.rank] = max(ends[event.rank], event.end)
        return self._known[key]


@functools.cache
def _shape(kind: GroupKind, algorithm: str, ranks: int, root: int | None) -> _Shape:
    program = program_of(kind, algorithm, ranks, root)
    sends = ((rank, op.to) for rank, ops in enumerate(program.ranks) for op in ops if isinstance(op, Send))
    return _Shape(program, list(dict.fromkeys(sends)), sent_by(kind, algorithm, ranks, root))


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
        return self.whole * len(value) / goal.slices if isinstance(value, Slices) else self.whole

    def link(self, sender: int, receiver: int) -> Link:
        """The connection between two ranks of the group."""
        return self.costs.link(self.ranks[sender], self.ranks[receiver])

    @property
    def shares_ports(self) -> bool:
        """Whether messages of different ranks may wait for the same port."""
        return self.costs.shares_ports

    def ports(self, sender: int, receiver: int) -> tuple[Port, ...]:
        """The ports that a message between two ranks of the group passes."""
        return self.costs.ports(self.ranks[sender], self.ranks[receiver])
