"""What a group's operation costs: its algorithm's program, simulated on the links between the group's ranks.

In a mesh several groups do the same operation beside each other: its rows. Where they share ports, their programs are
simulated together, as if all began at the same time.

```
2 nodes of 2 ranks, mesh: replica 2, dp 2        node 0    node 1
*U0/@replica: two groups, and one port a node      0 ──────── 2
                                                   1 ──────── 3
```
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from microparallel.collectives import (
    GroupKind,
    compressed_traffic,
    group_kind,
    is_compressed,
    payload,
    program_of,
    program_of_round,
    resolve,
    sent_by,
)
from microparallel.program import (
    Broadcast,
    Collective,
    Goal,
    GroupOp,
    MeetingOp,
    Observed,
    Op,
    Program,
    Recv,
    Send,
    Shard,
    Slices,
    Value,
)
from microparallel.simulator.costs import Costs
from microparallel.topology import Link, Port
from microparallel.topology.hosts import among
from microparallel.trace import Event

Group = tuple[int, ...]


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
        program: the whole program.
        run: simulates a program.
    """

    def __init__(self, costs: Costs, program: Program, run: Callable[[Program, Costs], list[Event]]) -> None:
        self._costs = costs
        self._program = program
        self._run = run
        self._known: dict[tuple[object, ...], list[float]] = {}
        self._only_link = functools.cache(self._find_only_link)

    def shares(self, op: MeetingOp, ranks: Group) -> list[Share]:
        """The share of each rank when all begin at the same time."""
        found = self._observed(op, ranks) if isinstance(op, Observed) else self._by_algorithm(op, ranks)
        known = [self._costs.traffic(op, rank) for rank in ranks]
        both = zip(found, known, strict=True)
        return [share if sent is None else Share(share.seconds, *sent) for share, sent in both]

    def bytes(self, op: MeetingOp, rank: int) -> float:
        """How many bytes a rank contributes."""
        if isinstance(op, Observed) or not isinstance(op.value, Shard):
            return self._costs.bytes(op, self._program.goal, rank)
        shards = len(self._shared_by.get((rank, op.value.of.index), (rank,)))
        return self._costs.bytes(op, self._program.goal, rank, shards)

    @functools.cached_property
    def _shared_by(self) -> dict[tuple[int, int], Group]:
        return self._program.shared_by()

    @functools.cached_property
    def _rows(self) -> dict[MeetingOp, tuple[Group, ...]]:
        """For each operation, all groups that do it."""
        rows: dict[MeetingOp, dict[Group, None]] = defaultdict(dict)
        for (_, op), ranks in self._program.groups().items():
            rows[op][ranks] = None
        return {op: tuple(groups) for op, groups in rows.items()}

    def _observed(self, op: Observed, ranks: Group) -> list[Share]:
        """An observed collective takes as long as was measured; by which algorithm it ran is not known."""
        return [Share(self._costs.together(op, rank) or 0, 0, 0) for rank in ranks]

    def _by_algorithm(self, op: GroupOp, ranks: Group) -> list[Share]:
        size = self.bytes(op, ranks[0])
        kind = group_kind(op)
        algorithm = resolve(kind, op.algorithm, len(ranks), size, among(self._costs.transport, ranks))
        measured = [self._costs.together(op, rank) for rank in ranks] if len(ranks) > 1 else [0.0]
        known = [seconds for seconds in measured if seconds is not None]
        rows = tuple(row for row in self._rows[op] if len(row) == len(ranks)) if self._costs.shares_ports else (ranks,)
        if is_compressed(algorithm):
            return self._compressed(algorithm, ranks, rows, size, known)
        if not known and algorithm == "ring" and (link := self._only_link(ranks, rows)) is not None:
            return [self._ring(kind, len(ranks), size, link)] * len(ranks)
        shape = _shape(kind, algorithm, len(ranks), ranks.index(op.root) if isinstance(op, Broadcast) else None)
        seconds = known or self._simulated(shape, ranks, rows, size)
        return [Share(end, messages, part * size) for end, (messages, part) in zip(seconds, shape.sent, strict=True)]

    def _compressed(
        self, algorithm: str, ranks: Group, rows: tuple[Group, ...], size: float, known: list[float]
    ) -> list[Share]:
        """The rounds of a compressed all-reduce, one after another, each with its payload; all ranks begin together."""
        seconds, begin, transport = [0.0] * len(ranks), 0.0, among(self._costs.transport, ranks)
        for one in () if known else payload(algorithm, size):
            shape = _shape("all-reduce", program_of_round(one.kind, transport), len(ranks), None)
            seconds = [begin + end for end in self._simulated(shape, ranks, rows, one.bytes)]
            begin = max(seconds)
        sent = compressed_traffic(algorithm, len(ranks), size, transport)
        return [Share(end, *counts) for end, counts in zip(known or seconds, sent, strict=True)]

    def _find_only_link(self, ranks: Group, rows: tuple[Group, ...]) -> Link | None:
        """How neighbours in a ring are connected, if all are in the same way and none waits for another's port."""
        links = {self._costs.link(*pair) for pair in _neighbours(ranks)}
        ports = [port for row in rows for pair in _neighbours(row) for port in self._costs.ports(*pair)]
        return links.pop() if len(links) == 1 and len(set(ports)) == len(ports) else None

    def _ring(self, kind: GroupKind, count: int, size: float, link: Link) -> Share:
        """Where all links are alike, all ranks do each step at the same time. So one rank's steps are enough.

        A simulation would be slow: a ring of a thousand ranks has millions of operations.
        """
        messages = (count - 1) * (2 if kind == "all-reduce" else 1)
        adding = 0.0 if kind == "all-gather" else (count - 1) * size / count * self._costs.add_seconds_per_byte
        return Share(messages * link.seconds(size / count) + adding, messages, messages * size / count)

    def _simulated(self, shape: _Shape, ranks: Group, rows: tuple[Group, ...], size: float) -> list[float]:
        """When each rank of a group is done, while the groups beside it use the ports, too."""
        if not any(self._costs.ports(ranks[sender], ranks[receiver]) for sender, receiver in shape.channels):
            rows = (ranks,)
        channels = [(row[sender], row[receiver]) for row in rows for sender, receiver in shape.channels]
        links = tuple((self._costs.link(*channel), self._costs.ports(*channel)) for channel in channels)
        key = (id(shape), links, size)
        if key not in self._known:
            everyone = tuple(itertools.chain(*rows))
            ends: list[float] = [0] * len(everyone)
            self._known[key] = ends
            program = _beside_each_other(shape.program, len(rows))
            for event in self._run(program, _Within(costs=self._costs, ranks=everyone, whole=size)):
                ends[event.rank] = max(ends[event.rank], event.end)
        first = rows.index(ranks) * len(ranks)
        return self._known[key][first : first + len(ranks)]


def _neighbours(ranks: Group) -> list[tuple[int, int]]:
    """Who sends to whom in a ring."""
    return list(itertools.pairwise((*ranks, ranks[0]))) if len(ranks) > 1 else []


def _beside_each_other(program: Program, times: int) -> Program:
    """The program of a collective several times, each on ranks of its own."""
    count = program.world_size
    ranks = [tuple(_moved(op, copy * count) for op in ops) for copy in range(times) for ops in program.ranks]
    return program if times == 1 else replace(program, ranks=tuple(ranks))


def _moved(op: Op, ranks: int) -> Op:
    if isinstance(op, Send):
        return replace(op, to=op.to + ranks)
    return replace(op, source=op.source + ranks) if isinstance(op, Recv) else op


@functools.cache
def _shape(kind: GroupKind, algorithm: str, ranks: int, root: int | None) -> _Shape:
    program = program_of(kind, algorithm, ranks, root)
    sends = ((rank, op.to) for rank, ops in enumerate(program.ranks) for op in ops if isinstance(op, Send))
    return _Shape(program, list(dict.fromkeys(sends)), sent_by(kind, algorithm, ranks, root))


@dataclass(frozen=True, kw_only=True)
class _Within(Costs):
    """The costs of a whole program, as they are among the ranks of one group."""

    costs: Costs
    ranks: Group
    whole: float  # bytes of the value

    def __post_init__(self) -> None:
        object.__setattr__(self, "add_seconds_per_byte", self.costs.add_seconds_per_byte)

    def size(self, value: Value, goal: Goal, shards: int = 1) -> float:  # noqa: ARG002
        """How many bytes a slice of the group's value has."""
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
