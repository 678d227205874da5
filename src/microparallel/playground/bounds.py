"""Times below which no solution of a level can be, each with its reason."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from microparallel.playground.board import Board
from microparallel.playground.levels import Level
from microparallel.program import (
    AllGather,
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Bucket,
    Collective,
    Forward,
    Op,
    Program,
    TrainingStep,
    halves,
    is_meeting,
)
from microparallel.simulator import simulate
from microparallel.text import short


def bound_of(level: Level) -> tuple[float, str]:
    """A time below which no solution is, and why."""
    if level.bound is not None:
        return level.bound
    if isinstance(level.goal, Collective):
        return _bound_of_messages(level, level.goal)
    bounds = (
        _bounds_of_pipeline(level, level.goal) if level.kind == "pipeline" else _bounds_of_replicas(level, level.goal)
    )
    return max(bounds, key=lambda one: one[0])


def _bounds_of_pipeline(level: Level, goal: TrainingStep) -> Iterator[tuple[float, str]]:
    stages, costs = range(goal.stages), level.costs
    forward = [costs.of(Forward(stage, 0), 0) for stage in stages]
    halved = any(isinstance(op, BackwardInput) for tray in level.trays for op in tray)
    back = [costs.of(BackwardInput(stage, 0) if halved else Backward(stage, 0), 0) for stage in stages]
    weight = costs.of(BackwardWeight(0, 0), 0) if halved else 0
    yield sum(forward) + sum(back) + weight, "one micro-batch has to go through all stages and back"
    for rank, tray in enumerate(level.trays):
        mine = sorted({half.stage for op in tray for half in halves(op)})
        work = sum(costs.of(op, 0) for op in tray)
        head = sum(forward[: mine[0]])
        tail = 0 if halved else sum(back[: mine[0]])
        parts = [f"rank {rank} computes for {short(work)}"]
        parts += [f"has nothing to do before {short(head)}"] if head else []
        parts += [f"and the gradient takes {short(tail)} from there to stage 0"] if tail else []
        yield head + work + tail, ", ".join(parts)


def _bounds_of_replicas(level: Level, goal: TrainingStep) -> Iterator[tuple[float, str]]:
    tray, costs = level.trays[0], level.costs
    ops = list(tray)
    work = sum(costs.of(op, 0) for op in ops if halves(op))
    takes = durations(level)
    first = next(index for index, (start, _) in enumerate(goal.buckets) if start == 0)
    gathers = [op for op in ops if isinstance(op, AllGather)]
    sums = [op for op in ops if is_meeting(op) and not isinstance(op, AllGather)]
    head = next((takes[op] for op in gathers if goal.sharded and op.value.index == first), 0.0)  # type: ignore[union-attr]
    last = min(takes[op] for op in sums if op.value.index == first)  # type: ignore[union-attr]
    tail = last + (0 if goal.sharded else sum(takes[op] for op in gathers))
    said = [f"a rank computes for {short(work)}"]
    said += [f"after a gather, which takes {short(head)}"] if head else []
    said += [f"and then the gradients of layer 0 have to be summed, which takes {short(last)}"]
    said += [f"and the parameters gathered, which takes {short(tail - last)}"] if tail > last else []
    yield head + work + tail, ", ".join(said)
    network = sum(takes[op] for op in ops if is_meeting(op))
    if not goal.sharded:
        each = goal.microbatches // level.ranks
        forwards = sum(costs.of(op, 0) for op in ops if isinstance(op, Forward))
        soonest = min(
            each * sum(costs.of(Backward(stage, 0), 0) for stage in range(start, goal.stages))
            for start, _ in goal.buckets
        )
        begins = forwards + soonest if each == 1 else soonest
        yield (
            begins + network,
            f"the network is busy for {short(network)}, and has nothing to send before {short(begins)}",
        )
    else:
        yield network, f"the network is busy for {short(network)}"


def durations(level: Level) -> dict[Op, float]:
    """How long each operation of replicas takes, from a step in the order of the tray."""
    board = Board(level, [f"0:{op}" for op in level.trays[0]])
    return {event.operation: event.end - event.start for event in board.trace().by_rank[0]}


def all_reduces(level: Level) -> dict[int, float]:
    """How long an all-reduce of a bucket takes on a level's ranks, by how many layers the bucket has."""
    goal = level.goal
    assert isinstance(goal, TrainingStep)
    step = TrainingStep(goal.stages, level.ranks, goal.buckets)
    sums = [AllReduce(Bucket(index), "dp") for index in range(len(goal.buckets))]
    ranks = tuple(tuple(_step_of(rank, goal.stages, sums)) for rank in range(level.ranks))
    events = simulate(Program("sums", step, ranks), level.costs).events
    found = {event.operation: event.end - event.start for event in events}
    return {stop - start: found[op] for op, (start, stop) in zip(sums, goal.buckets, strict=True)}


def _step_of(microbatch: int, layers: int, sums: Iterable[Op]) -> Iterator[Op]:
    yield from (Forward(layer, microbatch) for layer in range(layers))
    yield from (Backward(layer, microbatch) for layer in reversed(range(layers)))
    yield from sums


def _bound_of_messages(level: Level, goal: Collective) -> tuple[float, str]:
    costs, ranks = level.costs, level.ranks
    turns = math.ceil(math.log2(ranks))
    time = turns * costs.latency
    latency = (
        f"what one rank has can be on twice as many ranks after each message, so {turns} have to follow each other"
    )
    share = (ranks - 1) / ranks * costs.seconds_per_byte * (2 if goal.kind == "all-reduce" else 1)
    if goal.kind == "all-reduce":
        words = f"of each slice, {ranks - 1} parts have to be added and {ranks - 1} ranks told, by {ranks} at once"
    else:
        words = f"a rank has to receive {ranks - 1} slices, or what they are sums of"
    return (share, words) if share > time else (time, latency)
