"""Do ranks that sum gradients, and keep parts of the weights, end with the same weights?

Every gradient goes into one sum, and all ranks form a sum in the same way. Where ranks keep parts (`Shard`), each part
is updated by the rank that keeps it, and gathered along the axis along which the gradients were summed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from microparallel.errors import ProgramError
from microparallel.program import (
    AllGather,
    AllReduce,
    Bucket,
    Delta,
    Op,
    OptimizerStep,
    Parameters,
    Program,
    ReduceScatter,
    Rules,
    TrainingStep,
    Value,
)
from microparallel.verifier.findings import DifferentWeights, NeverReduced, NotUpdated

Sum = AllReduce | ReduceScatter


def bucket_sums(ops: Sequence[Op]) -> Iterator[tuple[Sum, Bucket]]:
    """The operations by which a rank sums buckets with others."""
    for op in ops:
        if isinstance(op, Sum) and isinstance(op.value, Bucket):
            yield op, op.value


def check_sums(program: Program, goal: TrainingStep) -> None:
    """All ranks sum a bucket along one axis and in the same way, and each gradient goes into one sum."""
    _check_axes(program)
    sums = [list(bucket_sums(ops)) for ops in program.ranks]
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
                    "they would not meet"
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
                raise ProgramError(f"{other} along {axis}, and rank {rank} {again}along {mine}")


def _check_each_gradient_once(rules: Rules, rank: int, index: int, ops: Sequence[Sum]) -> None:
    taken: dict[Value, Sum] = {}
    for place, op in enumerate(ops):
        if op in ops[:place]:
            raise ProgramError(f"rank {rank} does {op} twice: its gradients would count twice")
        for delta in rules.needs(op):
            other = taken.setdefault(delta, op)
            if other != op:
                raise ProgramError(f"rank {rank} reduces {delta} twice: by {other} and by {op}")
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
