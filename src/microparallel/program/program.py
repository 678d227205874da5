"""Program: for every rank an ordered list of operations, and what must hold when all have run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from microparallel.errors import ProgramError
from microparallel.program.ops import AllGather, AllReduce, MeetingOp, Observed, Op, ReduceScatter, Send, is_meeting
from microparallel.program.values import Bucket, Parameters
from microparallel.text import count

CollectiveKind = Literal[
    "all-reduce", "reduce-scatter", "all-gather", "broadcast", "reduce", "scatter", "gather", "all-to-all"
]
MOST_SLICES = 100_000
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
    | `all-to-all`     | rank r slices r·p to r·p + p            | rank r slices r, p + r, 2p + r, …             |

    In an all-to-all among p ranks there is a slice for each pair: number s·p + r is what rank s has for rank r.
    """

    kind: CollectiveKind
    slices: int
    root: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.per_rank <= MOST_SLICES:
            raise ProgramError(f"a collective has 1 to {MOST_SLICES:,} slices, not {self.slices:,}")
        if (self.root is not None) != (self.kind in ROOTED):
            raise ProgramError(f"{self.kind} {'needs a' if self.kind in ROOTED else 'has no'} root")

    @property
    def per_rank(self) -> int:
        """How many slices one rank's own tensor has: all there are; in an all-to-all, one for each rank."""
        return math.isqrt(max(0, self.slices)) if self.kind == "all-to-all" else self.slices

    def __str__(self) -> str:
        root = "" if self.root is None else f", root {self.root}"
        return f"{self.kind} of {count(self.slices, 'slice')}{root}"


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """The goal of a training step: every micro-batch had its forward and its backward on every stage, once.

    Ranks that run the same stage on different micro-batches are replicas, and must sum its gradients. They do so in
    buckets: `buckets[2] == (4, 6)` says that bucket 2 holds the gradients of stages 4 and 5.

    Micro-batches are counted from 0. A rank numbers its own without knowing how many the others have, so where some
    have fewer, their numbers are left out: `TrainingStep(1, 3, skipped=(2,))` has the micro-batches 0, 1 and 3.

    Before and after a step every rank has all parameters of its stages. In a `sharded` step it has only its part of
    them that is up to date: it gathers the parameters of a bucket before it computes with them.
    """

    stages: int
    microbatches: int
    buckets: tuple[tuple[int, int], ...] = ()
    skipped: tuple[int, ...] = ()
    sharded: bool = False

    def __post_init__(self) -> None:
        if self.stages < 1 or self.microbatches < 1:
            raise ProgramError(f"a {self} does nothing; at least 1 stage and 1 micro-batch are needed")
        if self.skipped != tuple(sorted({number for number in self.skipped if 0 <= number < self._stop - 1})):
            raise ProgramError(f"a {self}: what is skipped are numbers below its last micro-batch, once each, in order")
        if self.sharded and sum(stop - start for start, stop in self.buckets) != self.stages:
            raise ProgramError(f"a {self}: what is sharded are buckets, so every stage must be in one")
        for start, stop in self.buckets:
            if not 0 <= start < stop <= self.stages:
                raise ProgramError(f"bucket {start}:{stop} is no range of {self.stages} stages")
        for (start, stop), (other, _) in itertools.pairwise(sorted(self.buckets)):
            if other < stop:
                raise ProgramError(f"stage {other} is in bucket {start}:{stop} and in another; it can be in one only")

    @classmethod
    def of(cls, stages: int, numbers: Collection[int], buckets: tuple[tuple[int, int], ...] = ()) -> TrainingStep:
        """The goal of a step that has the micro-batches with these numbers."""
        below = range(max(numbers, default=0))
        return cls(stages, len(numbers), buckets, tuple(number for number in below if number not in numbers))

    @property
    def _stop(self) -> int:
        return self.microbatches + len(self.skipped)

    def has(self, microbatch: int) -> bool:
        """Whether a micro-batch with this number belongs to it."""
        return 0 <= microbatch < self._stop and microbatch not in self.skipped

    def numbers(self) -> Iterator[int]:
        """The numbers of its micro-batches."""
        return filter(self.has, range(self._stop))

    def __str__(self) -> str:
        buckets = "".join(f" {start}:{stop}" for start, stop in self.buckets)
        stages = count(self.stages, "stage")
        microbatches = count(self.microbatches, "micro-batch", "es")
        skipped = f" skipping {' '.join(map(str, self.skipped))}" if self.skipped else ""
        sharded = ", sharded" if self.sharded else ""
        return f"training step of {stages}, {microbatches}{skipped}{f', buckets{buckets}' if buckets else ''}{sharded}"


Goal = Collective | TrainingStep
Groups = dict[tuple[int, MeetingOp], tuple[int, ...]]  # by rank and operation: the ranks that do it together


@dataclass(frozen=True, slots=True)
class Program:
    """A parallel algorithm: what each rank does, in order, and what all of them are to achieve.

    Args:
        name: such as `ring` or `1f1b`.
        goal: what must hold at the end.
        ranks: each rank's operations.
        mesh: the axes along which the ranks form a grid, with their sizes, the last one running fastest:
            `(("dp", 2), ("pp", 3))` puts ranks 0, 1, 2 into one pipeline and ranks 0, 3 into one group of replicas.
            Without it every axis holds all ranks, and the axis `world` always does.
    """

    name: str
    goal: Goal
    ranks: tuple[tuple[Op, ...], ...]
    mesh: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if self.name != self.name.strip() or not self.name or any(sign in self.name for sign in "#\n\r"):
            raise ProgramError(f"{self.name!r} is no name for a program; it needs letters, and neither # nor line ends")
        if not self.ranks:
            raise ProgramError(f"program {self.name!r} has no ranks; at least 1 is needed")
        if isinstance(self.goal, Collective) and self.goal.kind == "all-to-all":
            pairs = len(self.ranks) ** 2
            if self.goal.slices != pairs:
                raise ProgramError(
                    f"an all-to-all among {len(self.ranks)} ranks has a slice for each pair, {pairs} in all, "
                    f"not {self.goal.slices}"
                )
        if self.mesh and math.prod(size for _, size in self.mesh) != len(self.ranks):
            grid = " × ".join(f"{axis} {size}" for axis, size in self.mesh)
            raise ProgramError(f"the mesh of program {self.name!r} is {grid}, and it has {len(self.ranks)} ranks")
        if len({axis for axis, _ in self.mesh}) < len(self.mesh):
            raise ProgramError(f"the mesh of program {self.name!r} names an axis twice")

    @property
    def world_size(self) -> int:
        """How many ranks take part."""
        return len(self.ranks)

    def __len__(self) -> int:
        """Count the operations of all ranks."""
        return sum(map(len, self.ranks))

    def all_reduces(self) -> list[AllReduce]:
        """The different all-reduces of all ranks, each once."""
        return [op for op in dict.fromkeys(itertools.chain(*self.ranks)) if isinstance(op, AllReduce)]

    def bucket_sums(self) -> list[tuple[AllReduce | ReduceScatter, Bucket]]:
        """The different operations of all ranks by which they sum gradients, each once, with the bucket it sums."""
        different = dict.fromkeys(itertools.chain(*self.ranks))
        sums = (op for op in different if isinstance(op, AllReduce | ReduceScatter))
        return [(op, op.value) for op in sums if isinstance(op.value, Bucket)]

    def groups(self) -> Groups:
        """What each rank does together with others, with the ranks that take part: those on its axis that do the same.

        A rank that does the same operation twice meets the others twice. An observed collective has no axis: all ranks
        that have it take part.
        """
        together: dict[tuple[MeetingOp, int], list[int]] = {}
        for rank, ops in enumerate(self.ranks):
            for op in dict.fromkeys(filter(is_meeting, ops)):
                first = 0 if isinstance(op, Observed) else self.first_on_axis(rank, op.axis)
                together.setdefault((op, first), []).append(rank)
        return {(rank, op): tuple(ranks) for (op, _), ranks in together.items() for rank in ranks}

    def shared_by(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """For each rank and bucket of which it keeps a part: the ranks that keep a part each, in the parts' order.

        They are the ranks that reduce-scatter the bucket's gradients, or gather its parameters, together.
        """
        return {
            (rank, op.value.index): ranks
            for (rank, op), ranks in self.groups().items()
            if isinstance(op, ReduceScatter | AllGather) and isinstance(op.value, Bucket | Parameters)
        }

    def first_on_axis(self, rank: int, axis: str) -> int:
        """The lowest of the ranks that share a row with this one along an axis of the mesh."""
        apart = 1  # how far two neighbours on an axis are apart
        for name, size in reversed(self.mesh):
            if name == axis:
                return rank - rank // apart % size * apart
            apart *= size
        return 0

    def messages_sent(self) -> list[int]:
        """How many messages each rank sends."""
        return [sum(isinstance(op, Send) for op in ops) for ops in self.ranks]
