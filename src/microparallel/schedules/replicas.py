"""Several pipelines side by side: each on its own micro-batches, their gradients summed where the stages are alike."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from microparallel.errors import ProgramError, UsageError
from microparallel.program import (
    AUTO,
    BATCH,
    BUFFERS,
    LOSS,
    NORM,
    SAMPLES,
    WORLD,
    Act,
    AllGather,
    AllReduce,
    Backward,
    BackwardWeight,
    Broadcast,
    Bucket,
    Forward,
    ForwardBackward,
    Free,
    Grad,
    GroupOp,
    Join,
    Op,
    OptimizerStep,
    Parameters,
    Program,
    Recv,
    ReduceScatter,
    Rest,
    Send,
    TrainingStep,
    Value,
    halves,
    presence,
    tied,
)
from microparallel.program import (
    overflow as overflow_of,
)
from microparallel.program.rules import Compute

Fewer = Mapping[int, Program | None]  # by replica: the program of one that has fewer micro-batches; None: it has none


def replicate(
    program: Program,
    replicas: int,
    algorithm: str | Sequence[str] = AUTO,
    *,
    fewer: Fewer | None = None,
    shared: Collection[int] = (),
    level: int = 0,
) -> Program:
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

    Args:
        program: of one pipeline.
        replicas: how many there are.
        algorithm: of the sums, one for all stages or one for each.
        fewer: the program of each replica that has fewer micro-batches; None for one that has none.
        shared: the ranks of a pipeline that have several stages with one parameter in common (`with_reductions`).
        level: 0: each rank gets the whole sum; 1: its part of it (a reduce-scatter).
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
        for ops in _summed(theirs, program, algorithm, shared, level)
    ]
    buckets = tuple((stage, stage + 1) for stage in range(goal.stages))
    whole = TrainingStep.of(
        goal.stages, {half.microbatch for ops in ranks for op in ops for half in halves(op)}, buckets
    )
    mesh = (("dp", replicas), *(program.mesh or (("pp", program.world_size),)))
    name = f"{program.name} × {replicas}{', zero-1' if level else ''}"
    return replace(program, name=name, goal=whole, ranks=tuple(ranks), mesh=mesh)


def _summed(
    theirs: Program | None, usual: Program, algorithm: str | Sequence[str], shared: Collection[int], level: int
) -> Iterator[Sequence[Op]]:
    """For each rank of a replica, its operations with the sums; one without micro-batches has only those."""
    for place, ops in enumerate((theirs or usual).ranks):
        summed = with_reductions(ops, algorithm, shares=place in shared, level=level)
        yield summed if theirs else only_sums(summed)


def only_sums(ops: Iterable[Op]) -> list[Op]:
    """What a rank without micro-batches does: it takes part in what its groups do together."""
    return [op for op in ops if isinstance(op, GroupOp | OptimizerStep | Join)]


def with_sums(
    program: Program,
    replicas: int = 1,
    *,
    fewer: Fewer | None = None,
    batch: int | None = None,
    shared: Collection[int] = (),
    ties: Sequence[Collection[int]] = (),
    samples: bool = True,
    overflow: bool = False,
    norm: bool = False,
    buffers: Collection[int] = (),
    level: int = 0,
    update: bool | None = None,
    algorithm: str | Sequence[str] = AUTO,
) -> Program:
    """The whole step of a pipeline, or of several side by side: with everything that its ranks sum up or broadcast.

    ```
    1f1b, 2 ranks, 1 micro-batch, twice, with an embedding that the first and the last stage share
    rank 0  ^:batch@pp/0 = *:samples@dp = F0.0 >A0.0@1 <G0.0@1 B0.0 *U0@dp = *:tied0@pp *:loss@world
    ```

    The rank that has the batch sends its shapes to the others. Replicas sum their numbers of samples, since each one's
    gradients are weighted with its share. When every gradient has been summed over the replicas, the copies of a
    parameter on different ranks are summed, and then the loss. With float16, all ranks find out whether any of them has
    gradients that are not finite. To clip gradients, the ranks may go on with the norm of all gradients; and all
    replicas may get the buffers of the first:

    ```
    rank 0  … *:loss@world *:overflow0@world *:norm@pp ^:buffers@dp/0
    ```

    With ZeRO (`level=1`), each replica keeps its part of the sums, updates its part of the parameters, and gathers the
    others'. Which gradients a replica has goes to the others in a message of its own. All replicas cut a parameter in
    the same way, so the ranks that share one sum the part that they keep. The norm is that of all ranks' parts:

    ```
    rank 0  … B0.0 %U0@dp *:presence0@dp = *:tied0@pp *:loss@world *:norm@world = S ~T0@dp
    ```

    Args:
        program: of one pipeline.
        replicas: how many there are.
        fewer: the program of each replica that has fewer micro-batches; None for one that has none.
        batch: the rank of a pipeline that sends the batch's shapes to the others; None if no rank does.
        shared: the ranks of a pipeline that have several stages with one parameter in common (`with_reductions`).
        ties: for each parameter that stages on different ranks share, those ranks of a pipeline.
        samples: whether replicas sum their numbers of samples.
        overflow: whether all ranks tell each other if they have gradients that are not finite (mixed precision).
        norm: whether the ranks compute the norm of all gradients together.
        buffers: the ranks of a pipeline that have buffers, if these are copied to all replicas.
        level: 0: every replica has everything; 1: replicas keep the optimizer's state in parts. One pipeline has all.
        update: whether the optimizer's step is part of it, which gathers at level 1; None: at level 1.
        algorithm: of the buckets' sums, and of what is gathered; one for all stages, or one for each.
    """
    if level not in (0, 1):
        raise UsageError(
            f"level={level!r}: choose 0 or 1; at level 2 gradients would leave after every micro-batch, and a pipeline "
            "adds up those of all micro-batches before it sums them once"
        )
    level = level if replicas > 1 else 0
    whole = replicate(program, replicas, algorithm, fewer=fewer, shared=shared, level=level)
    orders: list[tuple[Op, ...]] = []
    for rank, ops in enumerate(whole.ranks):
        place = rank % program.world_size
        before: list[Op] = []
        if batch is not None:
            before += [Broadcast(BATCH, "pp", rank - place + batch), Join()]
        if replicas > 1 and samples:
            before += [AllReduce(SAMPLES, "dp"), Join()]
        after: list[Op] = [AllReduce(presence(), "dp")] if level else []
        after += [Join()]
        after += [AllReduce(tied(index), "pp") for index, ranks in enumerate(ties) if place in ranks]
        after += [AllReduce(LOSS, WORLD)]
        after += [AllReduce(overflow_of(), WORLD)] if overflow else []
        after += [AllReduce(NORM, WORLD if level else "pp")] if norm else []
        if level if update is None else update:
            kept = (op.value for op in ops if isinstance(op, ReduceScatter) and isinstance(op.value, Bucket))
            stages = sorted((bucket.index for bucket in kept), reverse=True)
            gathers = (AllGather(Parameters(stage), "dp", _of(algorithm, stage)) for stage in stages)
            after += [Join(), OptimizerStep(), *gathers]
        after += [Broadcast(BUFFERS, "dp", place)] if replicas > 1 and place in buffers else []
        orders.append((*before, *ops, *after))
    mesh = whole.mesh or (("pp", program.world_size),)
    return replace(whole, ranks=tuple(orders), mesh=mesh)


def _of(algorithm: str | Sequence[str], stage: int) -> str:
    return algorithm if isinstance(algorithm, str) else algorithm[stage]


def with_reductions(
    ops: Sequence[Op], algorithm: str | Sequence[str] = AUTO, *, shares: bool = False, level: int = 0
) -> list[Op]:
    """Add each stage's sum after its last backward and the sends that follow: another rank waits for those.

    If several stages of this rank have a parameter in common (`shares`), its gradient goes with those of the rank's
    first stage, whose sum then stands after the last backward of all.
    """
    last: dict[int, int] = {}
    for place, op in enumerate(ops):
        for half in halves(op):
            if isinstance(half, Backward | BackwardWeight):
                last[half.stage] = place
    if shares and last:
        last[min(last)] = max(last.values())
    kind = ReduceScatter if level else AllReduce
    result: list[Op] = []
    due: list[Op] = []
    for place, op in enumerate(ops):
        if not isinstance(op, Send | Free):
            result += due
            due = []
        result.append(op)
        ended = sorted((stage for stage, end in last.items() if end == place), reverse=True)
        due += [kind(Bucket(stage), "dp", _of(algorithm, stage)) for stage in ended]
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
