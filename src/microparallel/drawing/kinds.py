"""The kinds of operations, and how each looks: one letter, one word, one colour; and its name in a cell.

The colours are those of Okabe and Ito, which colour-blind readers can distinguish. They are fills with
dark or white ink of their own, so they stand on a light page as well as on a dark one.
"""

from __future__ import annotations

from dataclasses import dataclass

from microparallel.program import (
    Act,
    Add,
    AllGather,
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Broadcast,
    Bucket,
    Collective,
    Forward,
    ForwardBackward,
    ForwardStages,
    Grad,
    GroupOp,
    Op,
    OptimizerStep,
    Parameters,
    Program,
    Recv,
    ReduceScatter,
    Send,
    Shard,
    halves,
)
from microparallel.program.rules import Compute


@dataclass(frozen=True, slots=True)
class Kind:
    """How one kind of operation is written and coloured."""

    letter: str
    word: str
    fill: str
    ink: str = "#000000"

    @property
    def name(self) -> str:
        """The word as it is used in a style sheet."""
        return self.word.replace(" ", "-")


FORWARD = Kind("F", "forward", "#56b4e9")
BACKWARD = Kind("B", "backward", "#e69f00")
INPUT_HALF = Kind("I", "input half", "#e8743b")
WEIGHT_HALF = Kind("W", "weight half", "#cc79a7")
PAIR = Kind("&", "pair", "#2bb58c")
SEND = Kind(">", "send", "#b8c0c8")
RECEIVE = Kind("<", "receive", "#8fd3b6")
RECEIVE_AND_ADD = Kind("<+", "receive and add", "#f0d442")
ADD = Kind("+", "add", "#cc79a7")
ALL_REDUCE = Kind("U", "all-reduce", "#0072b2", "#ffffff")
BROADCAST = Kind("^", "broadcast", "#00664b", "#ffffff")
REDUCE_SCATTER = Kind("%", "reduce-scatter", "#17708f", "#ffffff")
ALL_GATHER = Kind("~", "all-gather", "#4b3a8c", "#ffffff")
OPTIMIZER_STEP = Kind("S", "optimizer step", "#555b66", "#ffffff")
OTHER = Kind("?", "other", "#999999")
KINDS = (
    FORWARD,
    BACKWARD,
    INPUT_HALF,
    WEIGHT_HALF,
    PAIR,
    SEND,
    RECEIVE,
    RECEIVE_AND_ADD,
    ADD,
    ALL_REDUCE,
    BROADCAST,
    REDUCE_SCATTER,
    ALL_GATHER,
    OPTIMIZER_STEP,
    OTHER,
)

_KIND_OF: dict[type, Kind] = {
    Forward: FORWARD,
    ForwardStages: FORWARD,
    Backward: BACKWARD,
    BackwardInput: INPUT_HALF,
    BackwardWeight: WEIGHT_HALF,
    ForwardBackward: PAIR,
    Send: SEND,
    Recv: RECEIVE,
    Add: ADD,
    AllReduce: ALL_REDUCE,
    Broadcast: BROADCAST,
    ReduceScatter: REDUCE_SCATTER,
    AllGather: ALL_GATHER,
    OptimizerStep: OPTIMIZER_STEP,
}


def kind_of(op: Op) -> Kind:
    """The kind of an operation."""
    if isinstance(op, Recv) and op.reduce:
        return RECEIVE_AND_ADD
    return _KIND_OF.get(type(op), OTHER)


def shaded(colour: str, shade: int) -> str:
    """The same colour, paler: a rank that holds several stages shows each in a shade of its own."""
    paler = min(0.3 * shade, 0.75)
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * paler):02x}" for part in parts)


# ── names in cells: as much as a reader needs, and shorter forms for narrow cells ───────────────────────────────────


@dataclass(frozen=True, slots=True)
class Naming:
    """Which numbers distinguish a rank's operations: if it has only one stage, the micro-batch is enough.

    | a rank has                              | full form   | short form | letter |
    |-----------------------------------------|-------------|------------|--------|
    | one stage (1F1B)                        | `F3`        | `F3`       | `F`    |
    | several stages (interleaved)            | `F0.3`      | `F3`       | `F`    |
    | its own share of the batch (DDP)        | `F0`        | `F0`       | `F`    |

    What is sent and received is named in the same way: `>A3`, or `>A0.3`.
    """

    several_stages: bool
    several_microbatches: bool
    stages: tuple[tuple[int, ...], ...]  # of each rank
    buckets: tuple[tuple[int, int], ...] = ()

    def forms(self, op: Op) -> tuple[str, str]:
        """The full and the short form of an operation's name."""
        if isinstance(op, ForwardBackward):
            forward, backward = self.forms(op.forward), self.forms(op.backward)
            return f"{forward[0]}&{backward[0]}", f"{forward[1]}&{backward[1]}"
        if isinstance(op, Compute):
            return self._stage_op(op)
        if isinstance(op, ForwardStages):
            return (f"F{op.microbatch}" if self.several_microbatches else "F",) * 2
        if isinstance(op, GroupOp):
            return str(op.value), str(op.value)
        if not isinstance(op, Send | Recv):
            return str(op), str(op)
        letter, value = kind_of(op).letter, op.value
        if isinstance(value, Act | Grad):
            short = f"{letter}{str(value)[0]}{value.microbatch}"
            return f"{letter}{value}" if self.several_stages else short, short
        return str(op), f"{letter}{value}"

    def _stage_op(self, op: Compute) -> tuple[str, str]:
        letter = kind_of(op).letter
        if not self.several_stages:
            return (f"{letter}{op.microbatch}",) * 2
        if not self.several_microbatches:
            return (f"{letter}{op.stage}",) * 2
        return str(op), f"{letter}{op.microbatch}"

    def related(self, op: Op) -> tuple[int, ...]:
        """What an operation is about: micro-batches in a pipeline, layers in a data-parallel step."""
        value = getattr(op, "value", None)
        value = value.of if isinstance(value, Shard) else value
        if isinstance(value, Bucket | Parameters) and value.index < len(self.buckets):
            return tuple(range(*self.buckets[value.index]))
        if isinstance(value, Act | Grad):
            return (value.microbatch,)
        return tuple(half.microbatch if self.several_microbatches else half.stage for half in halves(op))

    def shade(self, rank: int, op: Op) -> int:
        """Where an operation's stage stands among those of its rank, if micro-batches visit several."""
        parts = halves(op)
        if len(parts) != 1 or not (self.several_stages and self.several_microbatches):
            return 0
        return self.stages[rank].index(parts[0].stage)

    def meaning(self, *, short: bool) -> str:
        """What the numbers in the cells are."""
        if not self.several_stages:
            return "the number is the micro-batch"
        if not self.several_microbatches:
            return "the number is the layer, or the bucket"
        return "the number is the micro-batch" if short else "the numbers are stage.micro-batch"


def naming_of(program: Program) -> Naming:
    """Find out which numbers distinguish the operations of each rank."""
    if isinstance(program.goal, Collective):
        return Naming(several_stages=False, several_microbatches=False, stages=((),) * program.world_size)
    stages: list[tuple[int, ...]] = []
    microbatches: list[set[int]] = []
    for ops in program.ranks:
        parts = [half for op in ops for half in halves(op)]
        stages.append(tuple(sorted({half.stage for half in parts})))
        microbatches.append({half.microbatch for half in parts})
    return Naming(
        several_stages=any(len(numbers) > 1 for numbers in stages),
        several_microbatches=not program.goal.buckets or any(len(numbers) > 1 for numbers in microbatches),
        stages=tuple(stages),
        buckets=program.goal.buckets,
    )
