"""Event: one operation of one rank, with the time it took."""

from __future__ import annotations

from typing import NamedTuple, get_args

from microparallel.errors import UsageError
from microparallel.program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    ForwardBackward,
    ForwardStages,
    GroupOp,
    Kind,
    Lane,
    Observed,
    Op,
    OptimizerStep,
    Recv,
    Send,
)

_KIND_OF: dict[type, Kind] = {
    Forward: "forward",
    ForwardStages: "forward",
    Backward: "backward",
    BackwardInput: "backward",
    BackwardWeight: "backward",
    ForwardBackward: "backward",
    OptimizerStep: "optimizer",
    **dict.fromkeys(get_args(GroupOp), "collective"),
    Send: "send",
    Recv: "receive",
}


def kind_of(op: Op) -> Kind:
    """What an operation is, in one word."""
    return op.kind if isinstance(op, Observed) else _KIND_OF.get(type(op), "other")


class Event(NamedTuple):
    """An operation that ran from `start` to `end`, on one lane of one rank.

    Waiting is not part of it. A receive starts when its message begins to arrive, and a collective when the last rank
    has come: not when this rank asked for it (`issued`), and not when this rank began to wait for it (`waited`).

    ```
    rank 0  ▒▒▒▒▒issued▒▒▒▒▒▒▒▒▒waited·····start░░░░░░░░end▒▒▒▒      ▒ computes   · waits   ░ exposed communication
    rank 1  ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒start, the last to come
    ```

    Attributes:
        rank: the rank that did it.
        lane: what it kept busy.
        op: an operation of a program, or something `Observed`.
        start: when it began.
        end: when it had ended.
        messages: how many this rank sent for it.
        sent: how many bytes those were.
        bytes: of the tensor that was sent, received or reduced.
        step: the number of the training step it belongs to.
        issued: of communication, when the rank asked for it; None: when it began.
        waited: of communication, since when the rank had nothing to do but to wait for it; None if it never waited.
        group: of a collective, the ranks that took part.
        number: which collective of its group it was, or which message of its channel, counted from 0.
        peer: of a message, the other rank.
        place: where in the user's code it was asked for.
        activations: of a measured computation, how many bytes of activations its rank held when it began, and when it
            had ended; None if they were not measured.
    """

    rank: int
    lane: Lane
    op: Op
    start: float
    end: float
    messages: int = 0
    sent: float = 0
    bytes: float = 0
    step: int = 0
    issued: float | None = None
    waited: float | None = None
    group: tuple[int, ...] = ()
    number: int = 0
    peer: int | None = None
    place: str = ""
    activations: tuple[float, float] | None = None

    @property
    def duration(self) -> float:
        """How long it took."""
        return self.end - self.start

    @property
    def kind(self) -> Kind:
        """What it is, in one word."""
        return kind_of(self.op)

    @property
    def operation(self) -> Op:
        """The operation of a program; raises `UsageError` for what was only observed."""
        if isinstance(self.op, Observed):
            raise UsageError(f"{self.op} was observed, and is no operation of a program; try view='parts'")
        return self.op

    @property
    def name(self) -> str:
        """What it is called."""
        return str(self.op)

    @property
    def computes(self) -> bool:
        """Whether the rank itself was at work."""
        return self.lane is Lane.COMPUTE

    def moved(self, by: float) -> Event:
        """The same event on a clock that shows `by` more."""
        issued, waited = (None if moment is None else moment + by for moment in (self.issued, self.waited))
        return self._replace(start=self.start + by, end=self.end + by, issued=issued, waited=waited)

    @property
    def asked(self) -> float:
        """When the rank asked for it."""
        return self.start if self.issued is None else self.issued
