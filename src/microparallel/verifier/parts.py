"""Do ranks that sum gradients, and keep parts of the weights, end with the same weights?

Every gradient goes into one sum, and all ranks form a sum in the same way. Where ranks keep parts (`Shard`), each part
is updated by the rank that keeps it, and gathered along the axis along which the gradients were summed.

A sum may take two steps: a reduce-scatter along one axis of the mesh, then an all-reduce of the parts along another. So
the sums are run on symbols: which ranks' gradients does a sum hold, and how often? (`check_contributions`)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from microparallel.errors import ProgramError
from microparallel.program import (
    AllGather,
    AllReduce,
    Bucket,
    Cursor,
    Delta,
    Op,
    OptimizerStep,
    Parameters,
    Program,
    ReduceScatter,
    Rules,
    Shard,
    TrainingStep,
    Value,
    Walk,
)
from microparallel.verifier.findings import DifferentWeights, LacksGradients, NeverReduced, NotUpdated, show_place

Sum = AllReduce | ReduceScatter


def bucket_sums(ops: Sequence[Op]) -> Iterator[tuple[Sum, Bucket]]:
    """The operations by which a rank sums buckets with others."""
    for op in ops:
        if isinstance(op, Sum) and isinstance(op.value, Bucket):
            yield op, op.value


def part_sums(ops: Sequence[Op]) -> Iterator[tuple[AllReduce, Bucket]]:
    """The operations by which a rank sums its parts of buckets with ranks that keep the same parts."""
    for op in ops:
        if isinstance(op, AllReduce) and isinstance(op.value, Shard) and isinstance(op.value.of, Bucket):
            yield op, op.value.of


def check_sums(program: Program, goal: TrainingStep) -> None:
    """All ranks sum a bucket along one axis and in the same way, and each gradient goes into one sum."""
    _check_axes(program)
    sums = [[*bucket_sums(ops), *part_sums(ops)] for ops in program.ranks]
    scattered = {bucket.index for mine in sums for op, bucket in mine if isinstance(op, ReduceScatter)}
    ways: dict[int, tuple[int, list[str]]] = {}
    for rank, mine in enumerate(sums):
        for index in sorted(scattered.intersection(bucket.index for _, bucket in mine)):
            ops = [op for op, bucket in mine if bucket.index == index]
            _check_each_gradient_once(Rules(goal, program.ranks[rank]), rank, index, ops)
            words = sorted(map(str, ops))
            other, theirs = ways.setdefault(index, (rank, words))
            if theirs != words:
                raise ProgramError(
                    f"rank {other} reduces bucket {index} by {' '.join(theirs)}, and rank {rank} by {' '.join(words)}; "
                    "they would not meet: all ranks reduce a bucket in the same way"
                )


def _check_axes(program: Program) -> None:
    """Ranks that name different axes would wait for different partners."""
    axes: dict[int, tuple[str, str]] = {}  # by bucket: which rank does what, along which axis
    for rank, ops in enumerate(program.ranks):
        does = [(f"sums {Bucket(bucket.index)}", bucket.index, op.axis) for op, bucket in bucket_sums(ops)]
        gathers = [op for op in ops if isinstance(op, AllGather)]
        does += [(f"gathers {op.value}", op.value.index, op.axis) for op in gathers if isinstance(op.value, Parameters)]
        for what, index, mine in does:
            other, axis = axes.setdefault(index, (f"rank {rank} {what}", mine))
            if axis != mine:
                again = "" if other.endswith(what) else f"{what} "
                raise ProgramError(
                    f"{other} along {axis}, and rank {rank} {again}along {mine}; "
                    "a bucket is summed and gathered along one axis"
                )


def _check_each_gradient_once(rules: Rules, rank: int, index: int, ops: Sequence[Sum]) -> None:
    taken: dict[Value, Sum] = {}
    for place, op in enumerate(ops):
        if op in ops[:place]:
            raise ProgramError(f"rank {rank} does {op} twice: its gradients would count twice; once is enough")
        for value in rules.needs(op):
            other = taken.setdefault(value, op)
            if other != op and isinstance(value, Delta):
                raise ProgramError(f"rank {rank} reduces {value} twice: by {other} and by {op}")
    bucket = Bucket(index)
    for delta in rules.needs(ReduceScatter(bucket, "")):  # all that it holds
        if delta not in taken and isinstance(delta, Delta):
            words = f"rank {rank} makes {delta} and never reduce-scatters it with {bucket}, which holds its stage"
            raise NeverReduced(words, rank, delta.stage, bucket)


def check_weights(program: Program, goal: TrainingStep, held: Sequence[Collection[Value]]) -> None:
    """Every part of the weights is updated by the rank that keeps it, and all ranks end with the same weights.

    Args:
        program: the step.
        goal: its goal.
        held: what each rank has at the end.
    """
    if not any(OptimizerStep() in ops for ops in program.ranks):
        return
    kept = [
        (rank, Parameters(bucket.index))
        for rank, ops in enumerate(program.ranks)
        for op, bucket in bucket_sums(ops)
        if isinstance(op, ReduceScatter)
    ]
    for rank, whole in kept:
        if OptimizerStep() not in program.ranks[rank]:
            words = f"rank {rank} keeps its part of {whole} and never updates it (S); no other rank can"
            raise NotUpdated(words, rank, whole)
    for rank, whole in kept:
        if not goal.sharded and whole not in held[rank]:
            words = (
                f"ranks are left with different weights: rank {rank} has updated its own part of {whole} and does not "
                f"have the others' new parts; ~{whole}@dp gathers them"
            )
            raise DifferentWeights(words, rank, whole)


# ── whose gradients a sum holds ─────────────────────────────────────────────────────────────────────────────────────


def check_contributions(program: Program, goal: TrainingStep) -> None:
    """Run the sums on symbols: the weights are updated with the gradients of all ranks that have some, once each.

    Args:
        program: the step; what else is wrong with its operations has been found before.
        goal: its goal.
    """
    if not goal.buckets:
        return  # no rank sums gradients
    account = _Account(program, goal)
    for cursor in Walk(program):
        account.do(cursor)
    for rank, ops in enumerate(program.ranks):
        if OptimizerStep() not in ops:
            account.check_complete(rank, "ends")


class _Held(NamedTuple):
    """What a sum holds.

    Attributes:
        givers: for each rank, how often its gradients are in it.
        lacking: the ranks whose gradients are not in it, though they have some for its bucket.
    """

    givers: Mapping[int, int]
    lacking: list[int]


class _Account:
    """For each rank, the sums that it has: of which bucket, and whose gradients each holds."""

    def __init__(self, program: Program, goal: TrainingStep) -> None:
        self._program = program
        self._rules = [Rules(goal, ops) for ops in program.ranks]
        self._sums: list[dict[Bucket, _Held]] = [{} for _ in program.ranks]
        self._with_gradients: dict[Bucket, list[int]] = {}
        self._keepers = {  # by rank and bucket: the ranks that keep a part of its sum each, in the parts' order
            (rank, op.value.index): ranks
            for (rank, op), ranks in program.groups().items()
            if isinstance(op, ReduceScatter) and isinstance(op.value, Bucket)
        }

    def do(self, cursor: Cursor) -> None:
        """The effect of an operation; raises `ProgramError` for a sum, a gather or an update that is wrong."""
        rank, op, meeting = cursor.rank, cursor.op, cursor.meeting
        if isinstance(op, OptimizerStep):
            self.check_complete(rank, "does S", self._place(cursor))
        elif isinstance(op, AllGather) and isinstance(op.value, Parameters):
            self._check_gather(cursor, op.value)
        elif isinstance(op, Sum) and meeting is not None and isinstance(op.value, Bucket | Shard):
            bucket = op.value.of if isinstance(op.value, Shard) else op.value
            assert isinstance(bucket, Bucket)  # `check_operations` has refused others
            if meeting.content is None:  # this is the first of its ranks: the others have not written their sums yet
                of_parts = isinstance(op.value, Shard)
                givers = self._sum_of_parts(cursor, bucket, meeting.ranks) if of_parts else Counter(meeting.ranks)
                lacking = [other for other in self._having_gradients(bucket) if other not in givers]
                meeting.content = _Held(givers, lacking)
            self._sums[rank][bucket] = meeting.content

    def check_complete(self, rank: int, does: str, place: str = "") -> None:
        """Raise `LacksGradients` unless all sums of a rank hold the gradients of all ranks that have some."""
        for bucket, held in self._sums[rank].items():
            if held.lacking:
                part = "its part of " if (rank, bucket.index) in self._keepers else ""
                words = f"rank {rank} {does}, and {part}{bucket} lacks the gradients of {_ranks(held.lacking)}"
                raise LacksGradients(f"{words}; {self._fix(rank, bucket)}{place}", rank, bucket, held.lacking)

    def _sum_of_parts(self, cursor: Cursor, bucket: Bucket, ranks: Sequence[int]) -> Counter[int]:
        """Add up what the parts of several ranks hold; they must be the same part, and hold no gradients twice."""
        total: Counter[int] = Counter()
        mine = self._part(cursor.rank, bucket)
        for rank in ranks:
            theirs = self._part(rank, bucket)
            if theirs != mine:
                words = f"which adds up different parts: rank {cursor.rank} keeps {mine}, and rank {rank} {theirs}"
                raise ProgramError(self._words(cursor, f"{words}; {self._fix(cursor.rank, bucket)}"))
            total.update(self._sums[rank][bucket].givers)
        twice = [giver for giver in self._having_gradients(bucket) if total[giver] > 1]
        if twice:
            words = f"which would count the gradients of {_ranks(twice)} twice: they are in its parts already"
            raise ProgramError(self._words(cursor, f"{words}; leave it out"))
        return total

    def _check_gather(self, cursor: Cursor, whole: Parameters) -> None:
        """What is gathered must be all parts, once each."""
        assert cursor.meeting is not None
        keepers, ranks = self._keepers.get((cursor.rank, whole.index), ()), cursor.meeting.ranks
        if keepers != ranks:
            kept = f"its parts are kept by {_ranks(keepers)}" if keepers else "this rank keeps no part of it"
            words = f"which gathers {whole} from {_ranks(ranks)}, and {kept}"
            raise ProgramError(
                self._words(cursor, f"{words}; {whole} is gathered by the ranks that reduce-scatter U{whole.index}")
            )

    def _having_gradients(self, bucket: Bucket) -> list[int]:
        """The ranks that have gradients for a bucket; others, without micro-batches, add nothing to a sum."""
        if bucket not in self._with_gradients:
            everything = ReduceScatter(bucket, "")
            self._with_gradients[bucket] = [rank for rank, one in enumerate(self._rules) if one.needs(everything)]
        return self._with_gradients[bucket]

    def _part(self, rank: int, bucket: Bucket) -> str:
        """Which part of a bucket a rank keeps, in words."""
        keepers = self._keepers[rank, bucket.index]
        return f"part {keepers.index(rank)} of {len(keepers)}"

    def _fix(self, rank: int, bucket: Bucket) -> str:
        """What would add what a sum lacks."""
        if (rank, bucket.index) not in self._keepers:
            return f"*{bucket}@world sums over all ranks that have its stages"
        for axis, _ in self._program.mesh:
            row = [other for other in range(self._program.world_size) if self._in_a_row(rank, other, axis)]
            alike = {self._part(other, bucket) for other in row if (other, bucket.index) in self._keepers}
            if len(row) > 1 and alike == {self._part(rank, bucket)}:
                return f"*{Shard(bucket)}@{axis} sums over ranks that keep the same part"
        return "an all-reduce of parts sums over ranks that keep the same part"

    def _in_a_row(self, one: int, other: int, axis: str) -> bool:
        return self._program.first_on_axis(one, axis) == self._program.first_on_axis(other, axis)

    def _words(self, cursor: Cursor, reason: str) -> str:
        return f"rank {cursor.rank} does {cursor.op}, {reason}{self._place(cursor)}"

    def _place(self, cursor: Cursor) -> str:
        return f"\n  {show_place(self._program, cursor.rank, cursor.place)}"


def _ranks(numbers: Sequence[int]) -> str:
    """`rank 2`, or `ranks 0, 2`."""
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
