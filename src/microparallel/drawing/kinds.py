"""The kinds of operations, and how each looks: one letter, one word, one colour.

The colours are those of Okabe and Ito, which people who see colours differently can tell apart. They are fills with
dark or white ink of their own, so they stand on a light page as well as on a dark one.
"""

from __future__ import annotations

from dataclasses import dataclass

from microparallel.program import (
    Add,
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Broadcast,
    Forward,
    ForwardBackward,
    ForwardStages,
    Op,
    OptimizerStep,
    Recv,
    Send,
)


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
