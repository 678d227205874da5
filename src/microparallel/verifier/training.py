"""Does a training step do what it says? Walk through it and keep account of what every rank holds.

An operation must have what it needs (`program/rules.py`), nothing is made twice, and at the end every micro-batch had
its forward and its backward on every stage, once, on the rank that has the stage's weights. Where ranks keep parts of
the weights (`Shard`), every part is updated once, and no rank is left with weights that others do not have.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Sequence

from microparallel.collectives import group_kind, require_algorithm
from microparallel.errors import ProgramError, UsageError
from microparallel.program import (
    AUTO,
    WORLD,
    Act,
    Add,
    AllGather,
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Broadcast,
    Bucket,
    Cursor,
    Forward,
    Free,
    Grad,
    GroupOp,
    Named,
    Observed,
    Op,
    OptimizerStep,
    Parameters,
    Part,
    Program,
    Recv,
    ReduceScatter,
    Rest,
    Rules,
    Send,
    Shard,
    Slices,
    TrainingStep,
    Value,
    Walk,
    halves,
)
from microparallel.verifier.findings import GatheredAgain, Miscounted, Missing, NeverReduced, show_place
from microparallel.verifier.parts import bucket_sums, check_contributions, check_sums, check_weights

Account = dict[tuple[int, int], list[int]]  # (stage, micro-batch) → the ranks that did it
Accounts = dict[type[Op], Account]


def check_training_step(program: Program, goal: TrainingStep) -> None:
    """Raise `ProgramError` unless the step is whole and in order, naming the rank and the operation."""
    _check_needs(program, goal)
    done: Accounts = {kind: _account(program, kind) for kind in (Forward, Backward, BackwardInput, BackwardWeight)}
    for stage in range(goal.stages):
        for microbatch in goal.numbers():
            _check_once(done, stage, microbatch)
    _check_replicas(program, goal, done[Forward])
    _check_groups(program)
    _check_updates(program)
    check_contributions(program, goal)


def check_operations(program: Program, goal: TrainingStep) -> None:
    """Raise `ProgramError` if an operation has no place in this training step, whatever stands around it."""
    for rank, ops in enumerate(program.ranks):
        for place, op in enumerate(ops):
            reason = _not_allowed(op, goal)
            if reason:
                raise ProgramError(f"rank {rank} does {op}, {reason}\n  {show_place(program, rank, place)}")


def _not_allowed(op: Op, goal: TrainingStep) -> str:
    """Why an operation has no place in this training step; nothing if it has."""
    for half in halves(op):
        if half.stage >= goal.stages or not goal.has(half.microbatch):
            return f"and the goal is a {goal}, counted from 0"
    if isinstance(op, Add) or (isinstance(op, Recv) and op.reduce):
        return "and a training step adds only by all-reduce and reduce-scatter"
    if isinstance(op, Broadcast) and not isinstance(op.value, Named):
        return "and only a named value, such as :weights, is broadcast"
    if isinstance(op, ReduceScatter) or (isinstance(op, AllReduce) and not isinstance(op.value, Named)):
        return _not_summed(op, goal)
    if isinstance(op, AllGather):
        if not isinstance(op.value, Parameters) or op.value.index >= len(goal.buckets):
            return f"and only parameters of buckets are gathered; the goal names {len(goal.buckets) or 'no'} buckets"
    elif isinstance(op, Send | Recv | Free) and isinstance(op.value, Slices | Part):
        return "which is no value of a training step"
    elif isinstance(op, Free) and isinstance(op.value, Shard) and not isinstance(op.value.of, Bucket):
        return "and a rank keeps its parts of parameters and state: no other rank has them"
    elif isinstance(op, Send | Recv) and not isinstance(op.value, Act | Grad):
        return "and only activations (A) and their gradients (G) travel"
    return ""


def _not_summed(op: AllReduce | ReduceScatter, goal: TrainingStep) -> str:
    """Why a sum has no place in this training step; nothing if it has."""
    bucket, how = op.value, "whole buckets (U0) are reduce-scattered"
    if isinstance(op, AllReduce):
        how = "buckets (U0), and parts of them (U0/), are all-reduced"
        if isinstance(bucket, Shard):  # it was reduce-scattered along one axis, and is summed along another
            bucket = bucket.of
    if not isinstance(bucket, Bucket) or bucket.index >= len(goal.buckets):
        return f"and only {how}; the goal names {len(goal.buckets) or 'no'} buckets"
    if isinstance(op, AllReduce) and bucket is op.value and bucket.turn is not None:
        return "and only a reduce-scatter takes the gradients of one micro-batch"
    if isinstance(op, AllReduce) and bucket is op.value and goal.sharded:
        return "and in a sharded step each rank keeps its part of the sum alone: a reduce-scatter (%) gives it that"
    return ""


def check_beginning(program: Program, goal: TrainingStep, rest: Sequence[Sequence[Op]]) -> None:
    """Raise `ProgramError` unless what the ranks have done up to here is in order; `rest` is what each has yet to do.

    What a sum needs, and an optimizer step, depends on all that its rank computes, before and after.
    """
    _walk_with_needs(program, [Rules(goal, (*ops, *later)) for ops, later in zip(program.ranks, rest, strict=True)])


def _check_needs(program: Program, goal: TrainingStep) -> None:
    held = _walk_with_needs(program, [Rules(goal, ops) for ops in program.ranks])
    frees = (op.value for ops in program.ranks for op in ops if isinstance(op, Free))
    if any(isinstance(value, _OF_MICROBATCHES) for value in frees):
        _check_leaks(held)
    check_weights(program, goal, held)


def _walk_with_needs(program: Program, rules: list[Rules]) -> list[set[Value]]:
    """What each rank holds at the end; raises `ProgramError` where an operation lacks what it needs."""
    held: list[set[Value]] = [set(rule.at_first()) for rule in rules]
    ever: list[set[Value]] = [set(rule.at_first()) for rule in rules]
    steps: Counter[int] = Counter()

    for cursor in Walk(program):
        rank, op = cursor.rank, cursor.op
        words = functools.partial(_words, program, cursor)
        for value in rules[rank].needs(op):
            if value not in held[rank]:
                made = any(value in rules[other].makes(op) for other, ops in enumerate(program.ranks) for op in ops)
                state = "has freed it" if value in ever[rank] else "does not have it" if made else "no rank makes that"
                needs = words(f"which needs {value}, and {state}{_hint(value, op)}")
                raise Missing(needs, rank, cursor.place, op, value)
        for value in rules[rank].makes(op):
            if isinstance(value, Parameters) and value in held[rank]:
                again = words(f"and has gathered {value} already; it frees {value} first, or keeps it")
                raise GatheredAgain(again, rank, value)
            if value in ever[rank] and not isinstance(value, _MADE_AGAIN):
                raise ProgramError(words(f"and has had {value} before"))
            held[rank].add(value)
            ever[rank].add(value)
        if isinstance(op, Free):
            held[rank].remove(op.value)
        if isinstance(op, OptimizerStep):
            steps[rank] += 1
            if steps[rank] > 1:
                raise ProgramError(words("its second in one training step: it would update the same weights twice"))
    return held


_OF_MICROBATCHES = (Act, Grad, Rest)  # what a micro-batch leaves behind, if it is not freed
# What may be made again: named values, parameters that were freed, and parts of which an update makes a new version.
_MADE_AGAIN = (Named, Parameters, Shard)


def _hint(value: Value, op: Op) -> str:
    """What would give a rank the value that it does not have."""
    if isinstance(value, Parameters) and halves(op):
        return f"; ~{value}@dp gathers it"
    if isinstance(value, Shard) and isinstance(value.of, Parameters):
        return "; an optimizer step (S) after a reduce-scatter makes it"
    if isinstance(value, Shard) and isinstance(value.of, Bucket):
        return f"; %{value.of}@dp makes it, before {op}"
    return ""


def _words(program: Program, cursor: Cursor, reason: str) -> str:
    return f"rank {cursor.rank} does {cursor.op}, {reason}\n  {show_place(program, cursor.rank, cursor.place)}"


def _check_leaks(held: list[set[Value]]) -> None:
    """A program that frees must free all: what is left over is memory lost in every step."""
    for rank, values in enumerate(held):
        left = sorted(str(value) for value in values if isinstance(value, _OF_MICROBATCHES))
        if left:
            raise ProgramError(f"rank {rank} never frees {left[0]}; a program that frees must free all it holds")


def _account(program: Program, kind: type[Op]) -> Account:
    account: Account = defaultdict(list)
    for rank, ops in enumerate(program.ranks):
        for op in ops:
            for half in halves(op):
                if isinstance(half, kind):
                    account[half.stage, half.microbatch].append(rank)
    return account


def _check_once(done: Accounts, stage: int, microbatch: int) -> None:
    key = (stage, microbatch)
    forwards, whole = done[Forward].get(key, []), done[Backward].get(key, [])
    inputs, weights = done[BackwardInput].get(key, []), done[BackwardWeight].get(key, [])
    name = f"{stage}.{microbatch}"
    if len(forwards) != 1:
        words = f"F{name} happens {_times(forwards)}; every micro-batch needs every stage's forward once"
        raise Miscounted(words, stage, microbatch)
    if len(whole) + len(inputs) != 1 or len(whole) + len(weights) != 1:
        counts = f"B{name} {_times(whole)}, I{name} {_times(inputs)}, W{name} {_times(weights)}"
        raise Miscounted(f"{counts}; every forward needs one backward: B, or I and W", stage, microbatch)
    for letter, ranks in (("B", whole), ("I", inputs), ("W", weights)):
        if ranks and ranks != forwards:
            raise ProgramError(
                f"{letter}{name} runs on rank {ranks[0]}, and F{name} ran on rank {forwards[0]}, which has the weights"
            )


def _times(ranks: list[int]) -> str:
    if len(ranks) < 2:
        return "once" if ranks else "never"
    return f"{len(ranks)} times (ranks {', '.join(map(str, ranks))})"


def _check_replicas(program: Program, goal: TrainingStep, forwards: Account) -> None:
    """Ranks that share a stage's weights must sum its gradients."""
    homes: dict[int, set[int]] = defaultdict(set)
    for (stage, _), doers in forwards.items():
        homes[stage].update(doers)
    check_sums(program, goal)
    reduced = [{Bucket(bucket.index) for _, bucket in bucket_sums(ops)} for ops in program.ranks]
    stages_of = [sorted({half.stage for op in ops for half in halves(op)}) for ops in program.ranks]
    for index, bounds in enumerate(goal.buckets):
        _check_members(Bucket(index), bounds, reduced, stages_of)
    for stage, ranks in sorted(homes.items()):
        buckets = [Bucket(index) for index, (start, stop) in enumerate(goal.buckets) if start <= stage < stop]
        if len(ranks) > 1 and not buckets:
            raise ProgramError(
                f"stage {stage} runs on ranks {sorted(ranks)}, and the goal names no bucket to sum it in"
            )
        for rank in sorted(ranks):
            for bucket in buckets:
                if bucket not in reduced[rank]:
                    words = f"rank {rank} runs stage {stage} and never all-reduces {bucket}, which holds it"
                    raise NeverReduced(words, rank, stage, bucket)


def _check_members(
    bucket: Bucket, bounds: tuple[int, int], reduced: list[set[Bucket]], stages_of: list[list[int]]
) -> None:
    """Ranks that sum a bucket must mean the same stages by it, except ranks that compute nothing."""
    start, stop = bounds
    members = [rank for rank, values in enumerate(reduced) if bucket in values and stages_of[rank]]
    meant = {rank: [stage for stage in stages_of[rank] if start <= stage < stop] for rank in members}
    for rank, theirs in meant.items():
        if theirs != meant[members[0]]:
            mine = meant[members[0]]
            raise ProgramError(f"{bucket} holds stages {mine} on rank {members[0]} and stages {theirs} on rank {rank}")


def _check_updates(program: Program) -> None:
    """Either every rank that computes updates its weights, or none does."""
    workers = [rank for rank, ops in enumerate(program.ranks) if any(halves(op) for op in ops)]
    updated = [rank for rank in workers if OptimizerStep() in program.ranks[rank]]
    if updated and updated != workers:
        missing = next(rank for rank in workers if rank not in updated)
        raise ProgramError(f"rank {updated[0]} updates its weights (S), and rank {missing} does not")


def _check_groups(program: Program) -> None:
    """What ranks do together must be the same on all of them, with an algorithm and a root that exist."""
    named = [axis for axis, _ in program.mesh]
    alike: dict[object, tuple[int, GroupOp]] = {}
    groups = program.groups()
    for (rank, op), members in groups.items():
        assert not isinstance(op, Observed)  # `verify` has refused it
        if named and op.axis not in (WORLD, *named):
            raise ProgramError(f"rank {rank} does {op}, and the mesh has the axes {', '.join(named)}")
        try:
            if op.algorithm != AUTO:
                require_algorithm(group_kind(op), op.algorithm)
        except UsageError as error:
            raise ProgramError(f"rank {rank} does {op}: {error}") from None
        if isinstance(op, Broadcast) and op.root not in members:
            raise ProgramError(f"rank {rank} does {op}, and rank {op.root} does not take part in it")
        other, theirs = alike.setdefault((type(op), op.value, program.first_on_axis(rank, op.axis)), (rank, op))
        if theirs != op and ((other, op) not in groups or (rank, theirs) not in groups):
            raise ProgramError(f"rank {other} does {theirs}, and rank {rank} does {op}; they would not meet")
