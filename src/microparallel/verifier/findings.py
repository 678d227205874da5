"""What the verifier finds: an error for each kind, with fields, so that graders can say it in their own words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from microparallel.errors import ProgramError
from microparallel.program import Bucket, Op, Parameters, Program, Recv, Send, Value

if TYPE_CHECKING:
    from microparallel.program import Wait
    from microparallel.program.symbols import Symbol


class Unmatched(ProgramError):
    """The two ends of a message differ, or there is only one: message `number` of a channel, counted from 1."""

    def __init__(self, message: str, sender: int, receiver: int, number: int, send: Send | None, recv: Recv | None):
        super().__init__(message)
        self.sender, self.receiver, self.number, self.send, self.recv = sender, receiver, number, send, recv


class Deadlock(ProgramError):
    """Ranks that wait for ever: all of them, each with the place in its list."""

    def __init__(self, message: str, waits: Sequence[Wait]):
        super().__init__(message)
        self.waits = tuple(waits)


class Missing(ProgramError):
    """A rank begins an operation without a value that it needs."""

    def __init__(self, message: str, rank: int, place: int, op: Op, value: Value):
        super().__init__(message)
        self.rank, self.place, self.op, self.value = rank, place, op, value


class GatheredAgain(ProgramError):
    """A rank gathers parameters that it has whole."""

    def __init__(self, message: str, rank: int, parameters: Parameters):
        super().__init__(message)
        self.rank, self.parameters = rank, parameters


class Miscounted(ProgramError):
    """A forward or backward of a micro-batch that does not happen once."""

    def __init__(self, message: str, stage: int, microbatch: int):
        super().__init__(message)
        self.stage, self.microbatch = stage, microbatch


class NeverReduced(ProgramError):
    """A rank that keeps the gradients of a stage to itself, though others have that stage too."""

    def __init__(self, message: str, rank: int, stage: int, bucket: Bucket):
        super().__init__(message)
        self.rank, self.stage, self.bucket = rank, stage, bucket


class LacksGradients(ProgramError):
    """A rank updates its weights, or ends, with a sum that does not hold the gradients of all ranks."""

    def __init__(self, message: str, rank: int, bucket: Bucket, lacking: Sequence[int]):
        super().__init__(message)
        self.rank, self.bucket, self.lacking = rank, bucket, tuple(lacking)


class NotUpdated(ProgramError):
    """A rank keeps its part of some parameters and never updates it."""

    def __init__(self, message: str, rank: int, parameters: Parameters):
        super().__init__(message)
        self.rank, self.parameters = rank, parameters


class DifferentWeights(ProgramError):
    """Ranks end with different weights: one has updated its own part of some parameters, and lacks the others'."""

    def __init__(self, message: str, rank: int, parameters: Parameters):
        super().__init__(message)
        self.rank, self.parameters = rank, parameters


class Unreached(ProgramError):
    """A slice of a collective that ends with other contributions than promised: (rank, slice) → how many times."""

    def __init__(self, message: str, rank: int, index: int, found: Symbol, wanted: Symbol):
        super().__init__(message)
        self.rank, self.index, self.found, self.wanted = rank, index, found, wanted


_AROUND = 3  # operations that are shown before and after a place


def show_place(program: Program, rank: int, place: int) -> str:
    """A few operations of a rank, with one in brackets: `rank 2: … F2.1 [>A2.1@3] <G2.0@3 B2.0 …`."""
    ops = program.ranks[rank]
    first, last = max(0, place - _AROUND), min(len(ops), place + _AROUND + 1)
    words = [f"[{ops[index]}]" if index == place else str(ops[index]) for index in range(first, last)]
    return f"rank {rank}: {'… ' * (first > 0)}{' '.join(words)}{' …' * (last < len(ops))}"
