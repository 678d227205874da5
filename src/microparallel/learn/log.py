"""What the ranks of an exam did, in order: an observer of their calls, of which a grader makes a program.

A row has a moment for everything a rank was seen to do. A grader's own stages and hooks tell operations of the program
language (`Forward`, `Backward`); the exam's Comms tells calls, whose values have no names yet: which slice or which
activation it was that a rank sent is for the grader to say, who knows the exercise.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from microparallel.program import Op
from microparallel.verifier import Wait

SENDS = ("send_tensor", "isend")
RECEIVES = ("recv_tensor", "irecv")


@dataclass(slots=True, eq=False)
class Called:
    """A call: what it was, on which rank and line of the learner's file, with whom, and with what."""

    call: str
    rank: int
    line: int
    place: int  # in the rank's row
    peer: int = -1
    agreement: str = ""  # what the other end of a message, or every rank of a call of all, must say too
    address: int = 0  # of the tensor's first number, which tells what part of what it is
    asynchronous: bool = False
    waits_in: int = 0  # the line where it is waited for
    ended: bool = False
    content: torch.Tensor | None = None  # of what was sent, received or reduced

    @property
    def bytes(self) -> int:
        """How large it was."""
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
    """The observer: a row for every rank, written by that rank's thread."""

    def __init__(self, ranks: int) -> None:
        self.rows: list[Row] = [[] for _ in range(ranks)]
        self.watched: dict[int, torch.Tensor] = {}  # by rank: the tensor to be looked at in every moment
        self._numbers = itertools.count()

    def begins(self, op: Called | Op, rank: int) -> None:
        """Write down that a rank begins something."""
        self._note("begins", op, rank)

    def waits(self, op: Called, on: int | None) -> None:  # noqa: ARG002
        """Write down that its rank waits for a call, perhaps not for the first time."""
        self._note("waits", op, op.rank)

    def ends(self, op: Called, bytes: int = 0) -> None:  # noqa: ARG002
        """Write down that a call has ended."""
        op.ended = True
        self._note("ends", op, op.rank)

    def _note(self, phase: Literal["begins", "waits", "ends"], op: Called | Op, rank: int) -> None:
        tensor = self.watched.get(rank)
        self.rows[rank].append(Moment(phase, op, next(self._numbers), None if tensor is None else tensor.clone()))


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
