"""Several pipelines side by side: each on its own micro-batches, their gradients summed where the stages are alike."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from microparallel.errors import ProgramError
from microparallel.program import (
    AUTO,
    BATCH,
    BUFFERS,
    LOSS,
    NORM,
    SAMPLES,
    SHARED,
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
    Op,
    Program,
    Recv,
    Rest,
    Send,
    TrainingStep,
    Value,
    halves,
    tied,
)
from microparallel.program.rules import Compute

Fewer = Mapping[int, Program | None]  # by replica: the program of one that has fewer micro-batches; None: it has none


def replicate(program: Program, replicas: int, algorithm: str = AUTO, *, fewer: Fewer | None = None) -> Program:
    """Run a pipeline several times, on different micro-batches, and sum each stage's gradients over the replicas.

    ```
    1f1b, 2 ranks, 1 micro-batch, twice; the all-reduce of a stage begins when its last backward has ended
    rank 0  F0.0 >A0.0@1 <G0.0@1 B0.0 *U0@dp
    rank 1  <A0.0@0 F1.0 B1.0 >G0.0@0 *U1@dp
    rank 2  F0.1 >A0.1@3 <G0.1@3 B0.1 *U0@dp
    rank 3  <A0.1@2 F1.1 B1.1 >G0.1@2 *U1@dp
    ```

    A replica may have fewer micro-batches than others, and then runs another program; one that has none takes part in
    the sums alone.

    ```
    with fewer={0: None}, the second pipeline's micro-batch keeps its number, and no rank has number 0
    rank 0  *U0@dp
    rank 1  *U1@dp
    rank 2  F0.1 >A0.1@3 <G0.1@3 B0.1 *U0@dp
    rank 3  <A0.1@2 F1.1 B1.1 >G0.1@2 *U1@dp
    ```
    """
    goal = program.goal
    if not isinstance(goal, TrainingStep) or goal.buckets:
        raise ProgramError(f"program {program.name!r} is a {goal}; only a pipeline without replicas can be replicated")
    each = [program if fewer is None else fewer.get(copy, program) for copy in range(replicas)]
    if replicas == 1:
        return each[0] or program
    ranks = [
        tuple(shifted(op, copy * goal.microbatches, copy * program.world_size) for op in ops)
        for copy, theirs in enumerate(each)
        for ops in _summed(theirs, program, algorithm)
    ]
    buckets = tuple((stage, stage + 1) for stage in range(goal.stages))
    whole = TrainingStep.of(
        goal.stages, {half.microbatch for ops in ranks for op in ops for half in halves(op)}, buckets
    )
    mesh = (("dp", replicas), *(program.mesh or (("pp", program.world_size),)))
    return replace(program, name=f"{program.name} × {replicas}", goal=whole, ranks=tuple(ranks), mesh=mesh)


def _summed(theirs: Program | None, usual: Program, algorithm: str) -> Iterator[Sequence[Op]]:
    """For each rank of a replica, its operations with the all-reduces; one without micro-batches has only those."""
    for ops in (theirs or usual).ranks:
        summed = with_reductions(ops, algorithm)
        yield summed if theirs else only_sums(summed)


def only_sums(ops: Iterable[Op]) -> list[Op]:
    """What a rank without micro-batches does: it takes part in the all-reduces and broadcasts of its group."""
    return [op for op in ops if isinstance(op, AllReduce | Broadcast | Join)]


def with_sums(
    program: Program,
    replicas: int = 1,
    *,
    fewer: Fewer | None = None,
    batch: int | None = None,
    shared: Collection[int] = (),
    ties: Sequence[Collection[int]] = (),
    samples: bool = True,
    norm: bool = False,
    buffers: Collection[int] = (),
    algorithm: str = AUTO,
) -> Program:
    """The whole step of a pipeline, or of several side by side: with everything that its ranks sum up or broadcast.

    ```
    1f1b, 2 ranks, 1 micro-batch, twice, with an embedding that the first and the last stage share
    rank 0  ^:batch@pp/0 = *:samples@dp = F0.0 >A0.0@1 <G0.0@1 B0.0 *U0@dp = *:tied0@pp *:loss@world
    ```

    The rank that has the batch sends its shapes to the others. Replicas sum their numbers of samples, since each one's
    gradients are weighted with its share. When every gradient has been summed over the replicas, the copies of a
    parameter on different ranks are summed, and then the loss. To clip gradients, the ranks may go on with the norm of
    all gradients; and all replicas may get the buffers of the first:

    ```
    rank 0  … *:loss@world *:norm@pp ^:buffers@dp/0
    ```

    Args:
        program: of one pipeline.
        replicas: how many there are.
        fewer: the program of each replica that has fewer micro-batches; None for one that has none.
        batch: the rank of a pipeline that sends the batch's shapes to the others; None if no rank does.
        shared: the ranks of a pipeline that have several stages with one parameter in common: it is summed last.
        ties: for each parameter that stages on different ranks share, those ranks of a pipeline.
        samples: whether replicas sum their numbers of samples.
        norm: whether the ranks of a pipeline compute the norm of its gradients together.
        buffers: the ranks of a pipeline that have buffers, if these are copied to all replicas.
        algorithm: of the buckets' all-reduces.
    """
    whole = replicate(program, replicas, algorithm, fewer=fewer)
    orders: list[tuple[Op, ...]] = []
    for rank, ops in enumerate(whole.ranks):
        place = rank % program.world_size
        before: list[Op] = []
        if batch is not None:
            before += [Broadcast(BATCH, "pp", rank - place + batch), Join()]
        if replicas > 1 and samples:
            before += [AllReduce(SAMPLES, "dp"), Join()]
        after: list[Op] = [Join()]
        if replicas > 1 and place in shared:
            after += [AllReduce(SHARED, "dp"), Join()]
        after += [AllReduce(tied(index), "pp") for index, ranks in enumerate(ties) if place in ranks]
        after += [AllReduce(LOSS, WORLD)]
        after += [AllReduce(NORM, "pp")] if norm else []
        after += [Broadcast(BUFFERS, "dp", place)] if replicas > 1 and place in buffers else []
        orders.append((*before, *ops, *after))
    mesh = whole.mesh or (("pp", program.world_size),)
    return replace(whole, ranks=tuple(orders), mesh=mesh)


def with_reductions(ops: Sequence[Op], algorithm: str = AUTO) -> list[Op]:
    """Add each stage's all-reduce after its last backward and the sends that follow: another rank waits for those."""
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
