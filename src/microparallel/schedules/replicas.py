"""Several pipelines side by side: each on its own micro-batches, their gradients summed where the stages are alike."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from microparallel.errors import ProgramError
from microparallel.program import (
    AUTO,
    WORLD,
    Act,
    AllReduce,
    Backward,
    BackwardWeight,
    Broadcast,
    Bucket,
    Forward,
    ForwardBackward,
    Free,
    Grad,
    Join,
    Named,
    Op,
    Program,
    Recv,
    Rest,
    Send,
    TrainingStep,
    Value,
    halves,
)
from microparallel.program.rules import Compute


def replicate(program: Program, replicas: int, algorithm: str = AUTO) -> Program:
    """Run a pipeline several times, on different micro-batches, and sum each stage's gradients over the replicas.

    ```
    1f1b, 2 ranks, 1 micro-batch, twice; the all-reduce of a stage begins when its last backward has ended
    rank 0  F0.0 >A0.0@1 <G0.0@1 B0.0 *U0@dp
    rank 1  <A0.0@0 F1.0 B1.0 >G0.0@0 *U1@dp
    rank 2  F0.1 >A0.1@3 <G0.1@3 B0.1 *U0@dp
    rank 3  <A0.1@2 F1.1 B1.1 >G0.1@2 *U1@dp
    ```
    """
    goal = program.goal
    if not isinstance(goal, TrainingStep) or goal.buckets:
        raise ProgramError(f"program {program.name!r} is a {goal}; only a pipeline without replicas can be replicated")
    if replicas == 1:
        return program
    ranks = [
        tuple(
            shifted(op, copy * goal.microbatches, copy * program.world_size) for op in with_reductions(ops, algorithm)
        )
        for copy in range(replicas)
        for ops in program.ranks
    ]
    buckets = tuple((stage, stage + 1) for stage in range(goal.stages))
    whole = TrainingStep(goal.stages, goal.microbatches * replicas, buckets)
    mesh = (("dp", replicas), *(program.mesh or (("pp", program.world_size),)))
    return replace(program, name=f"{program.name} × {replicas}", goal=whole, ranks=tuple(ranks), mesh=mesh)


def with_sums(
    program: Program,
    replicas: int = 1,
    *,
    shared: Collection[int] = (),
    ties: Sequence[Collection[int]] = (),
    algorithm: str = AUTO,
) -> Program:
    """The whole step of a pipeline, or of several side by side: with all that its ranks sum up.

    ```
    1f1b, 2 ranks, 1 micro-batch, twice, with an embedding that the first and the last stage share
    rank 0  *:samples@dp = F0.0 >A0.0@1 <G0.0@1 B0.0 *U0@dp = *:tied0@pp *:loss@world
    ```

    Replicas count their samples first, since each one's gradients count for its share. In the end, when every gradient
    has been added up over the replicas, copies of a parameter on different ranks get their sum, and all learn the loss.

    Args:
        program: of one pipeline.
        replicas: how many there are.
        shared: the ranks of a pipeline several of whose stages use the same parameter: that is summed last.
        ties: for each parameter that stages on different ranks share, those ranks of a pipeline.
        algorithm: of the buckets' all-reduces.
    """
    whole = replicate(program, replicas, algorithm)
    orders: list[tuple[Op, ...]] = []
    for rank, ops in enumerate(whole.ranks):
        place = rank % program.world_size
        before: list[Op] = [AllReduce(Named("samples"), "dp"), Join()] if replicas > 1 else []
        after: list[Op] = [Join()]
        if replicas > 1 and place in shared:
            after += [AllReduce(Named("shared"), "dp"), Join()]
        after += [AllReduce(Named(f"tied{index}"), "pp") for index, ranks in enumerate(ties) if place in ranks]
        orders.append((*before, *ops, *after, AllReduce(Named("loss"), WORLD)))
    mesh = whole.mesh or (("pp", program.world_size),)
    return replace(whole, ranks=tuple(orders), mesh=mesh)


def with_reductions(ops: Sequence[Op], algorithm: str = AUTO) -> list[Op]:
    """Add each stage's all-reduce behind its last backward, and behind what that sends: others wait for it."""
    last: dict[int, int] = {}
    for place, op in enumerate(ops):
        for half in halves(op):
            if isinstance(half, Backward | BackwardWeight):
                last[half.stage] = place
    result: list[Op] = []
    due: list[Op] = []
    for place, op in enumerate(ops):
        if not isinstance(op, Send | Free):
            result += due
            due = []
        result.append(op)
        due += [AllReduce(Bucket(stage), "dp", algorithm) for stage, end in last.items() if end == place]
    return result + due


def shifted(op: Op, microbatches: int, ranks: int) -> Op:
    """The same operation of another replica."""
    if isinstance(op, ForwardBackward):
        forward, backward = (replace(half, microbatch=half.microbatch + microbatches) for half in halves(op))
        if isinstance(forward, Forward) and isinstance(backward, Backward):
            return ForwardBackward(forward, backward)
    if isinstance(op, Compute):
        return replace(op, microbatch=op.microbatch + microbatches)
    if isinstance(op, Send):
        return Send(_value(op.value, microbatches), op.to + ranks)
    if isinstance(op, Recv):
        return Recv(_value(op.value, microbatches), op.source + ranks, op.reduce)
    if isinstance(op, Free):
        return Free(_value(op.value, microbatches))
    if isinstance(op, Broadcast):
        return replace(op, root=op.root + ranks)
    return op


def _value(value: Value, microbatches: int) -> Value:
    if isinstance(value, Act | Grad | Rest):
        return replace(value, microbatch=value.microbatch + microbatches)
    return value
