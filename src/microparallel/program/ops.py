"""Operations: what a rank does, one small frozen dataclass each, with only its own fields.

| operation                     | text        | meaning                                                              |
|-------------------------------|-------------|----------------------------------------------------------------------|
| `Forward(0, 3)`               | `F0.3`      | forward of stage 0 on micro-batch 3                                  |
| `ForwardStages(0, 4, 3)`      | `F0:4.3`    | forward of stages 0 to 3 on micro-batch 3, as one operation          |
| `Backward(0, 3)`              | `B0.3`      | its full backward                                                    |
| `BackwardInput(0, 3)`         | `I0.3`      | the half that gives the gradient of the stage's input                |
| `BackwardWeight(0, 3)`        | `W0.3`      | the half that gives the gradients of its weights                     |
| `ForwardBackward(f, b)`       | `F0.3&B1.2` | a forward and a backward as one indivisible operation                |
| `Send(value, 1)`              | `>A0.3@1`   | start sending a value to rank 1; never stops the lane                |
| `Recv(value, 0)`              | `<A0.3@0`   | wait for a value from rank 0                                         |
| `Recv(value, 0, reduce=True)` | `<+C2@0`    | wait for a value from rank 0, and add it to this rank's              |
| `Add(value, into)`            | `C0:4+=P1`  | add one value to another                                             |
| `Free(value)`                 | `!A0.3`     | forget a value                                                       |
| `AllReduce(value, "dp")`      | `*U0@dp`    | sum a value over the ranks of one axis of the mesh                   |
|                               | `*U0/@replica` | a part: over ranks that keep the same part of their sums          |
| `Broadcast(value, "dp", 0)`   | `^:w@dp/0`  | copy rank 0's value to the ranks of one axis of the mesh             |
| `ReduceScatter(value, "dp")`  | `%U0@dp`    | sum a value over those ranks; each keeps its part of the sum         |
| `AllGather(value, "dp")`      | `~T0@dp`    | put the parts of those ranks together, so that each has the whole    |
| `OptimizerStep()`             | `S`         | update the weights, or this rank's part of them                      |
| `Join()`                      | `=`         | both lanes wait here for each other                                  |
| `Observed("backward", kind)`  | `?backward/0/backward` | seen from outside: it names no values |

What a group does together may name its algorithm (`*U0@dp:ring`, `^:w@dp/0:tree`, `%U0@dp:direct`). Without a name
it is "auto": then `collectives.resolve` chooses, for the run and for the simulator alike.

A rank's operations are one list, and they do what they would do one after another. But they run on two *lanes*, one
that computes and one that communicates: a lane keeps its order, and an operation waits for the other lane only where
it needs a value from it (`rules.py`), or at a Join. A rank asks for what its group does together when it comes to it:
when all that it computes before it has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeGuard

from microparallel.errors import ProgramError
from microparallel.program.values import Value

WORLD = "world"  # the axis that holds all ranks, whatever the mesh
AUTO = "auto"  # the algorithm of a group's operation that leaves the choice open


Kind = Literal["forward", "backward", "optimizer", "collective", "send", "receive", "other"]
_COMPUTATION: tuple[Kind, ...] = ("forward", "backward", "optimizer")


class Lane(StrEnum):
    """What an operation keeps busy: a rank may compute and communicate at the same time."""

    COMPUTE = "compute"
    COMM = "comm"


@dataclass(frozen=True, slots=True)
class Forward:
    """Compute a stage's output for one micro-batch."""

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"F{self.stage}.{self.microbatch}"


@dataclass(frozen=True, slots=True)
class ForwardStages:
    """Compute the outputs of stages `start` to `stop` - 1, one after another, as one operation."""

    start: int
    stop: int
    microbatch: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ProgramError(f"{self} has no stages; the first must be below {self.stop}")

    def __str__(self) -> str:
        return f"F{self.start}:{self.stop}.{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Backward:
    """Compute all gradients of a stage for one micro-batch."""

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"B{self.stage}.{self.microbatch}"


@dataclass(frozen=True, slots=True)
class BackwardInput:
    """Compute the gradient of a stage's input only: the half that the stage before waits for."""

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"I{self.stage}.{self.microbatch}"


@dataclass(frozen=True, slots=True)
class BackwardWeight:
    """Compute the gradients of a stage's weights: the half that no other stage waits for."""

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"W{self.stage}.{self.microbatch}"


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """A forward and a backward that run as one operation, each hiding the other's communication."""

    forward: Forward
    backward: Backward

    def __str__(self) -> str:
        return f"{self.forward}&{self.backward}"


@dataclass(frozen=True, slots=True)
class Send:
    """Start sending a value as it is now; the lane goes on at once."""

    value: Value
    to: int

    def __str__(self) -> str:
        return f">{self.value}@{self.to}"


@dataclass(frozen=True, slots=True)
class Recv:
    """Wait for a value; with `reduce`, add it to this rank's value instead of overwriting that."""

    value: Value
    source: int
    reduce: bool = False

    def __str__(self) -> str:
        return f"<{'+' if self.reduce else ''}{self.value}@{self.source}"


@dataclass(frozen=True, slots=True)
class Add:
    """Add one value to another of the same rank."""

    value: Value
    into: Value

    def __str__(self) -> str:
        return f"{self.into}+={self.value}"


@dataclass(frozen=True, slots=True)
class Free:
    """Forget a value that no later operation of this rank needs."""

    value: Value

    def __str__(self) -> str:
        return f"!{self.value}"


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Sum a value over the ranks along one axis of the mesh."""

    value: Value
    axis: str
    algorithm: str = AUTO

    def __str__(self) -> str:
        return f"*{self.value}@{self.axis}{_named(self.algorithm)}"


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Copy the root's value to the ranks along one axis of the mesh; the root is a rank of the whole program."""

    value: Value
    axis: str
    root: int
    algorithm: str = AUTO

    def __str__(self) -> str:
        return f"^{self.value}@{self.axis}/{self.root}{_named(self.algorithm)}"


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """Sum a value over the ranks along one axis of the mesh, and leave each of them its part of the sum."""

    value: Value
    axis: str
    algorithm: str = AUTO

    def __str__(self) -> str:
        return f"%{self.value}@{self.axis}{_named(self.algorithm)}"


@dataclass(frozen=True, slots=True)
class AllGather:
    """Give each rank along one axis of the mesh the whole of a value of which each of them has a part."""

    value: Value
    axis: str
    algorithm: str = AUTO

    def __str__(self) -> str:
        return f"~{self.value}@{self.axis}{_named(self.algorithm)}"


def _named(algorithm: str) -> str:
    return "" if algorithm == AUTO else f":{algorithm}"


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Update the weights; where gradients were reduce-scattered, this rank's part of them."""

    def __str__(self) -> str:
        return "S"


@dataclass(frozen=True, slots=True)
class Join:
    """Let each lane wait for the other: what comes later in the list begins when all before it has ended."""

    def __str__(self) -> str:
        return "="


@dataclass(frozen=True, slots=True)
class Observed:
    """Something that was seen from outside and that no program names: a module's forward, a call of a Comms.

    It names no values, so only its place among the other operations is known. Ranks that have an equal observed
    collective did it together.

    Attributes:
        name: what people call it.
        kind: what it is, in one word.
        number: distinguishes operations of one name: pieces of one backward, one collective after another.
    """

    name: str
    kind: Kind
    number: int = 0

    def __str__(self) -> str:
        return self.name


Op = (
    Forward
    | ForwardStages
    | Backward
    | BackwardInput
    | BackwardWeight
    | ForwardBackward
    | Send
    | Recv
    | Add
    | Free
    | AllReduce
    | Broadcast
    | ReduceScatter
    | AllGather
    | OptimizerStep
    | Join
    | Observed
)
GroupOp = AllReduce | Broadcast | ReduceScatter | AllGather  # what the ranks of a group do together
MeetingOp = GroupOp | Observed  # what several ranks do together; an Observed only if it is a collective
_COMMUNICATION = (Send, Recv, Add, AllReduce, Broadcast, ReduceScatter, AllGather)


def is_meeting(op: Op) -> TypeGuard[MeetingOp]:
    """Whether several ranks do this operation together: none begins before all have come to it."""
    return op.kind == "collective" if isinstance(op, Observed) else isinstance(op, GroupOp)


def lane_of(kind: Kind) -> Lane:
    """The lane of an `Observed` of this kind."""
    return Lane.COMPUTE if kind in _COMPUTATION else Lane.COMM


def lane(op: Op) -> Lane:
    """The lane an operation runs on."""
    if isinstance(op, Observed):
        return lane_of(op.kind)
    return Lane.COMM if isinstance(op, _COMMUNICATION) else Lane.COMPUTE
