"""Program: for every rank an ordered list of operations, and what must hold when all have run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from microparallel.errors import ProgramError
from microparallel.program.ops import Op, Send

CollectiveKind = Literal["all-reduce", "reduce-scatter", "all-gather", "broadcast", "reduce", "scatter", "gather"]
ROOTED = ("broadcast", "reduce", "scatter", "gather")


@dataclass(frozen=True, slots=True)
class Collective:
    """The goal of a collective: what every rank holds in each slice of its tensor at the end.

    | kind             | at first                                | at the end                                    |
    |------------------|-----------------------------------------|-----------------------------------------------|
    | `all-reduce`     | every rank its contribution             | every rank the sum, in every slice            |
    | `reduce`         | every rank its contribution             | the root the sum, in every slice              |
    | `reduce-scatter` | every rank its contribution             | rank r the sum, in slice r                    |
    | `all-gather`     | rank r slice r                          | every rank every slice                        |
    | `gather`         | rank r slice r                          | the root every slice                          |
    | `broadcast`      | the root every slice                    | every rank every slice                        |
    | `scatter`        | the root every slice                    | rank r slice r                                |
    """

    kind: CollectiveKind
    slices: int
    root: int | None = None

    def __post_init__(self) -> None:
        if self.slices < 1:
            raise ProgramError(f"a collective of {self.slices} slices moves nothing; at least 1 is needed")
        if (self.root is not None) != (self.kind in ROOTED):
            raise ProgramError(f"{self.kind} {'needs a' if self.kind in ROOTED else 'has no'} root")

    def __str__(self) -> str:
        root = "" if self.root is None else f", root {self.root}"
        return f"{self.kind} of {self.slices} slice{'s' * (self.slices > 1)}{root}"


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """The goal of a pipeline: every micro-batch had its forward and its backward on every stage, once."""

    stages: int
    microbatches: int

    def __str__(self) -> str:
        return f"training step of {self.stages} stages, {self.microbatches} micro-batches"


Goal = Collective | TrainingStep


@dataclass(frozen=True, slots=True)
class Program:
    """A parallel algorithm: what each rank does, in order, and what all of them are to achieve."""

    name: str
    goal: Goal
    ranks: tuple[tuple[Op, ...], ...]

    def __post_init__(self) -> None:
        if not self.ranks:
            raise ProgramError(f"program {self.name!r} has no ranks; at least 1 is needed")

    @property
    def world_size(self) -> int:
        """How many ranks take part."""
        return len(self.ranks)

    def __len__(self) -> int:
        """Count the operations of all ranks."""
        return sum(map(len, self.ranks))

    def messages_sent(self) -> list[int]:
        """How many messages each rank sends."""
        return [sum(isinstance(op, Send) for op in ops) for ops in self.ranks]
