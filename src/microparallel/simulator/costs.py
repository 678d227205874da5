"""Costs: how long each operation takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from microparallel.errors import UsageError
from microparallel.program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Bucket,
    Collective,
    Forward,
    ForwardBackward,
    ForwardStages,
    Goal,
    MeetingOp,
    Named,
    Observed,
    Op,
    OptimizerStep,
    Parameters,
    Program,
    Send,
    Shard,
    Slices,
    TrainingStep,
    Value,
    halves,
)
from microparallel.text import count
from microparallel.topology import Cluster, Link, Port
from microparallel.trace import Sizes

PerStage = float | Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """How long operations take, in any unit of time; one number for all stages, or a list with one for each.

    Args:
        forward: a stage's forward (with several stages a rank, one stage's).
        backward_input: the half of its backward that gives the gradient of its input.
        backward_weight: the half that gives the gradients of its weights. A full backward takes both halves' time.
        forward_backward: a forward and a backward that run as one operation; their times together, if None.
        optimizer: the update of the weights.
        latency: what each message costs, however small; as long, it keeps its sender's and its receiver's port busy.
        seconds_per_byte: what each of its bytes costs.
        add_seconds_per_byte: what it costs to add a received byte to the rank's own.
        bytes_per_value: the size of a rank's whole tensor in a collective, of a stage's output, or of a layer's
            gradients or parameters; or a function from a value to its size. Without a function, named values (`:loss`)
            have none. Of a value that p ranks share, a rank's part (`U0/`) has 1/p of its size.
        transport: what carries the messages; it decides by which algorithm a group's operation runs that names
            none (`collectives.resolve`).
        links: connections that differ from the others, by (sender, receiver); what a `Link` leaves out is as usual.
        topology: the nodes on which the ranks are; `Costs.cluster` gives it.
        sizes: how many bytes the parameters of a stage take, and what goes with them (`microparallel.trace.Sizes`);
            `Trace.memory` adds them up. None: not known, and then neither is the memory.

    Example:
        ```python
        costs = mp.Costs(forward=1, backward_input=1, backward_weight=1, latency=0.1)
        slow = mp.Costs(latency=0.1, links={(2, 3): mp.Link(latency=5)})
        ```
    """

    forward: PerStage = 1
    backward_input: PerStage = 1
    backward_weight: PerStage = 1
    forward_backward: PerStage | None = None
    optimizer: float = 0
    latency: float = 0
    seconds_per_byte: float = 0
    add_seconds_per_byte: float = 0
    bytes_per_value: float | Callable[[Value], float] = 1
    transport: str = "gloo"
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    topology: Cluster | None = None
    sizes: Sizes | None = field(default_factory=Sizes)

    @classmethod
    def cluster(
        cls, *, nodes: int, per_node: int, inside: Link, between: Link, shared_nic: bool = True, **costs: Any
    ) -> Costs:
        """The costs on a cluster: fast links inside a node, slower ones between nodes, and one network port a node.

        A message between two nodes holds its sender's port, the port through which its node sends, and the port
        through which the other node receives, for latency + bytes × seconds per byte. So messages that leave a node
        go one after another, and so do messages that enter it; of those that wait, the one that can begin first is
        next. Sending does not hold up receiving. Messages inside a node do not use the network port.

        What a group does together in a training step (an AllReduce, say) is simulated on these links and ports, and
        with it the groups that do the same operation beside it, as if all of them began at the same time. It does not
        contend with what else is sent at that time.

        Args:
            nodes: how many there are.
            per_node: how many ranks each has; they are numbered node by node.
            inside: the link between two ranks of a node.
            between: the link between ranks of different nodes; what either leaves out is as `costs` says.
            shared_nic: whether the ranks of a node share one network port; if not, each has its own.
            costs: everything else that `Costs` takes.

        Example:
            ```python
            nvlink, ethernet = mp.Link(5e-6, 1 / 300e9), mp.Link(20e-6, 1 / 12.5e9)
            costs = mp.Costs.cluster(nodes=2, per_node=4, inside=nvlink, between=ethernet, bytes_per_value=100e6)
            print(mp.simulate(mp.collectives.build("hierarchical", 8, ranks_per_node=4), costs).makespan)
            ```
        """
        return cls(topology=Cluster(nodes, per_node, inside, between, shared_nic), **costs)

    def __post_init__(self) -> None:
        for name, value in _numbers(self):
            if not isinstance(value, Real) or not 0 <= float(value) < math.inf:
                raise UsageError(f"Costs: {name}={value!r} is no time or size; it must be a number, 0 or more")

    def check(self, program: Program) -> None:
        """Raise `UsageError` unless these costs belong to this program."""
        for sender, receiver in self.links:
            if not (0 <= sender < program.world_size and 0 <= receiver < program.world_size and sender != receiver):
                raise UsageError(f"Costs: there is no link {sender} → {receiver} among {program.world_size} ranks")
        nodes = self.topology
        if nodes is not None and nodes.ranks != program.world_size:
            raise UsageError(
                f"{count(nodes.nodes, 'node')} of {count(nodes.per_node, 'rank')} are "
                f"{count(nodes.ranks, 'rank')}, and program {program.name!r} has {program.world_size}"
            )
        if isinstance(program.goal, Collective):
            return
        stages = program.goal.stages
        for name in ("forward", "backward_input", "backward_weight", "forward_backward"):
            value = getattr(self, name)
            if isinstance(value, Sequence) and len(value) != stages:
                raise UsageError(f"Costs: {name} has {len(value)} numbers, and the program has {stages} stages")

    def of(self, op: Op, rank: int = 0) -> float:
        """How long a computation takes on a rank; here all ranks are alike."""
        match op:
            case Forward(stage):
                return _at(self.forward, stage)
            case ForwardStages():
                return sum(self.of(forward, rank) for forward in halves(op))
            case BackwardInput(stage):
                return _at(self.backward_input, stage)
            case BackwardWeight(stage):
                return _at(self.backward_weight, stage)
            case Backward(stage):
                return _at(self.backward_input, stage) + _at(self.backward_weight, stage)
            case ForwardBackward(forward, backward):
                if self.forward_backward is not None:
                    return _at(self.forward_backward, forward.stage)
                return self.of(forward, rank) + self.of(backward, rank)
            case OptimizerStep():
                return self.optimizer
        return 0

    def transfer(self, send: Send, rank: int) -> float | None:  # noqa: ARG002
        """How long a rank's message takes where that was measured; else its size and its link say so."""
        return None

    def together(self, op: MeetingOp, rank: int) -> float | None:  # noqa: ARG002
        """How long a rank and its group take for something where that was measured; else its program is simulated."""
        return None

    def traffic(self, op: MeetingOp, rank: int) -> tuple[int, float] | None:  # noqa: ARG002
        """How many messages and bytes a rank sends for it where that is known; else its algorithm's program says so."""
        return None

    def bytes(self, op: Send | MeetingOp, goal: Goal, rank: int, shards: int = 1) -> float:  # noqa: ARG002
        """How many bytes a rank sends, or contributes to a collective; 0 for an observed one, of unknown size.

        Of a part (`U0/`), `shards` says how many there are.
        """
        return 0 if isinstance(op, Observed) else self.size(op.value, goal, shards)

    def size(self, value: Value, goal: Goal, shards: int = 1) -> float:
        """How many bytes a value has; of one that is a part, `shards` says how many parts there are."""
        if isinstance(value, Shard):
            return self.size(value.of, goal) / shards
        if callable(self.bytes_per_value):
            size = self.bytes_per_value(value)
            if not 0 <= size < math.inf:
                raise UsageError(f"Costs: bytes_per_value says that {value} has {size} bytes; it must be 0 or more")
            return size
        if isinstance(value, Slices) and isinstance(goal, Collective):
            return self.bytes_per_value * len(value) / goal.per_rank
        if isinstance(value, Bucket | Parameters) and isinstance(goal, TrainingStep) and goal.buckets[value.index :]:
            start, stop = goal.buckets[value.index]
            return self.bytes_per_value * (stop - start)
        if isinstance(value, Named):
            return 0
        return self.bytes_per_value

    def link(self, sender: int, receiver: int) -> Link:
        """The connection from one rank to another."""
        link = Link(self.latency, self.seconds_per_byte)
        if self.topology is not None:
            link = self.topology.link(sender, receiver).or_else(link)
        own = self.links.get((sender, receiver))
        return link if own is None else own.or_else(link)

    @property
    def shares_ports(self) -> bool:
        """Whether messages of different ranks may wait for the same port."""
        return self.topology is not None and self.topology.shared_nic

    def ports(self, sender: int, receiver: int) -> tuple[Port, ...]:
        """The ports that a message passes beside its sender's own."""
        return () if self.topology is None else self.topology.ports(sender, receiver)


def _at(cost: PerStage, stage: int) -> float:
    return cost[stage] if isinstance(cost, Sequence) else cost


def _numbers(costs: Costs) -> Iterator[tuple[str, Any]]:
    for name in ("forward", "backward_input", "backward_weight", "forward_backward"):
        value = getattr(costs, name)
        if isinstance(value, Sequence) and not isinstance(value, str):
            yield from ((f"{name}[{index}]", number) for index, number in enumerate(value))
        elif value is not None:
            yield name, value
    for name in ("optimizer", "latency", "seconds_per_byte", "add_seconds_per_byte"):
        yield name, getattr(costs, name)
    if not callable(costs.bytes_per_value):
        yield "bytes_per_value", costs.bytes_per_value
    links = {f"link {sender} → {receiver}": link for (sender, receiver), link in costs.links.items()}
    if costs.topology is not None:
        links |= {"the links inside a node": costs.topology.inside, "the links between nodes": costs.topology.between}
    for which, link in links.items():
        if not isinstance(link, Link):
            raise UsageError(f"Costs: {which} is {link!r}; give mp.Link(latency=…)")
        for name in ("latency", "seconds_per_byte"):
            if getattr(link, name) is not None:
                yield f"{name} of {which}", getattr(link, name)


def default_costs(program: Program) -> Costs:
    """The costs of a drawing without any: round numbers, so that times can be counted by eye.

    A forward and each half of a backward take 1, and so does what the program is about, if that is communication.

    - In a collective every message takes 1, so each hop is one tick.
    - In a pipeline messages are free: the bubbles that are left are those of the schedule itself.
    - In a data-parallel step one layer's gradients take 1 over one link: an all-reduce takes 2(p−1)/p for each layer.
    """
    if isinstance(program.goal, Collective):
        return Costs(latency=1)
    return Costs(seconds_per_byte=1) if program.goal.buckets else Costs()
