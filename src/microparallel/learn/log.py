"""What the ranks of an exam did, in order: an observer of their calls, of which a grader makes a program.

A rank's row has a moment for everything that its observer was told. A grader's own stages and hooks tell it operations
of the program language (`Forward`, `Backward`). The exam's Comms tells it calls, whose values have no names yet: which
slice or which activation a rank sent is for the grader to say, which knows the exercise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from microparallel.observe import Activity
from microparallel.program import Op
from microparallel.program.ops import Observed
from microparallel.program.walk import Wait

SENDS = ("send_tensor", "isend")
RECEIVES = ("recv_tensor", "irecv")


@dataclass(slots=True, eq=False)
class Called:
    """A call of comms: on which rank and line of the learner's file, with which peer, and with which tensor."""

    call: str
    rank: int
    line: int
    place: int  # in the rank's row
    peer: int = -1
    agreement: str = ""  # what the other end of a message, or every rank of a collective, must say too
    address: int = 0  # of the tensor's first number, which tells what part of what it is
    asynchronous: bool = False
    waits_in: int = 0  # the line where it is waited for
    ended: bool = False
    content: torch.Tensor | None = None  # of what was sent, received or reduced

    @property
    def bytes(self) -> int:
        """How large the tensor was."""
        return 0 if self.content is None else self.content.nbytes


@dataclass(slots=True)
class Moment:
    """A rank began, waited for, or ended something."""

    phase: Literal["begins", "waits", "ends"]
    op: Called | Op
    number: int  # all moments of an exam are counted
    tensor: torch.Tensor | None  # the rank's own, as it was then, if the grader wants to know


Row = list[Moment]


class Log:
    """A rank's observer: it is told of the calls of its Comms, and of operations by the grader's stages and hooks."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self.row: Row = []
        self.watched: torch.Tensor | None = None  # copied at every moment, if the grader sets it
        self.call: Called  # the one that is being made, as the exam knows it
        self._numbers = numbers
        self._calls: dict[Activity, Called] = {}

    def begins(self, activity: Activity) -> None:
        """Write down that the rank begins something."""
        if isinstance(activity.op, Observed):
            self._calls[activity] = self.call
        self._note("begins", self.call if isinstance(activity.op, Observed) else activity.op)

    def waits(self, activity: Activity) -> None:
        """Write down that the rank waits for a call."""
        self._note("waits", self._calls[activity])

    def waits_again(self, call: Called) -> None:
        """Write down that the rank waits for a call that has ended."""
        self._note("waits", call)

    def ends(self, activity: Activity) -> None:
        """Write down that a call has ended."""
        self._calls[activity].ended = True
        self._note("ends", self._calls[activity])

    def _note(self, phase: Literal["begins", "waits", "ends"], op: Called | Op) -> None:
        tensor = None if self.watched is None else self.watched.clone()
        self.row.append(Moment(phase, op, next(self._numbers), tensor))


def calls(row: Sequence[Moment], *names: str) -> list[Called]:
    """The calls of those names that a rank has begun, in order; all of them if none is named."""
    begun = [moment.op for moment in row if moment.phase == "begins" and isinstance(moment.op, Called)]
    return [one for one in begun if not names or one.call in names]


def waited_for(rows: Sequence[Row], wait: Wait) -> Called:
    """The call in which a rank waits."""
    call = rows[wait.rank][wait.place].op
    assert isinstance(call, Called)
    return call


def computed(row: Sequence[Moment]) -> list[Op]:
    """The operations that a grader's own stages and hooks have told."""
    return [moment.op for moment in row if not isinstance(moment.op, Called)]
