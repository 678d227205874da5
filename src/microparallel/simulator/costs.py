"""Costs: how long each operation takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from microparallel.errors import UsageError
from microparallel.program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Bucket,
    Chunk,
    Collective,
    Forward,
    ForwardBackward,
    Goal,
    Op,
    OptimizerStep,
    Value,
)
from microparallel.topology import Link

PerStage = float | Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """How long operations take, in any unit of time; one number for all stages, or a list with one for each.

    Args:
        forward: a stage's forward (with several chunks a rank, one chunk's).
        backward_input: the half of its backward that gives the gradient of its input.
        backward_weight: the half that gives the gradients of its weights. A full backward takes both halves' time.
        forward_backward: a forward and a backward that run as one operation; their times together, if None.
        optimizer: the update of the weights.
        latency: what each message costs, however small.
        seconds_per_byte: what each of its bytes costs.
        add_seconds_per_byte: what it costs to add a received byte to one's own.
        bytes_per_value: the size of a collective's whole tensor, of a stage's output, or of a layer's gradients; or a
            function from a value to its size.
        links: connections that differ from the others, by (sender, receiver).

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
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in _numbers(self):
            if not value >= 0:
                raise UsageError(f"Costs: {name}={value} is no time or size; it must be 0 or more")

    def of(self, op: Op) -> float:
        """How long a computation takes."""
        match op:
            case Forward(stage):
                return _at(self.forward, stage, "forward")
            case BackwardInput(stage):
                return _at(self.backward_input, stage, "backward_input")
            case BackwardWeight(stage):
                return _at(self.backward_weight, stage, "backward_weight")
            case Backward(stage):
                halves = _at(self.backward_input, stage, "backward_input")
                return halves + _at(self.backward_weight, stage, "backward_weight")
            case ForwardBackward(forward, backward):
                if self.forward_backward is not None:
                    return _at(self.forward_backward, forward.stage, "forward_backward")
                return self.of(forward) + self.of(backward)
            case OptimizerStep():
                return self.optimizer
        return 0

    def size(self, value: Value, goal: Goal) -> float:
        """How many bytes a value has."""
        if callable(self.bytes_per_value):
            return self.bytes_per_value(value)
        if isinstance(value, Chunk) and isinstance(goal, Collective):
            return self.bytes_per_value * len(value) / goal.slices
        if isinstance(value, Bucket) and not isinstance(goal, Collective) and value.index < len(goal.buckets):
            start, stop = goal.buckets[value.index]
            return self.bytes_per_value * (stop - start)
        return self.bytes_per_value

    def link(self, sender: int, receiver: int) -> Link:
        """The connection from one rank to another."""
        return self.links.get((sender, receiver)) or Link(self.latency, self.seconds_per_byte)


def _at(cost: PerStage, stage: int, name: str) -> float:
    if not isinstance(cost, Sequence):
        return cost
    if stage >= len(cost):
        raise UsageError(f"Costs: {name} has {len(cost)} numbers, and the program has a stage {stage}; give one each")
    return cost[stage]


def _numbers(costs: Costs) -> Iterator[tuple[str, float]]:
    for name in ("forward", "backward_input", "backward_weight", "forward_backward"):
        value = getattr(costs, name)
        if isinstance(value, Sequence):
            yield from ((f"{name}[{index}]", number) for index, number in enumerate(value))
        elif value is not None:
            yield name, value
    for name in ("optimizer", "latency", "seconds_per_byte", "add_seconds_per_byte"):
        yield name, getattr(costs, name)
    if not callable(costs.bytes_per_value):
        yield "bytes_per_value", costs.bytes_per_value
    for (sender, receiver), link in costs.links.items():
        yield f"latency of link {sender} → {receiver}", link.latency
        yield f"seconds_per_byte of link {sender} → {receiver}", link.seconds_per_byte
