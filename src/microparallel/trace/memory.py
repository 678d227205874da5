"""What each rank holds, in bytes over time, read from the program that a trace follows and the times of its events.

```
rank 0  F0.0 B0.0 %U0.0@dp !D0.0 S ~T0@dp          ZeRO-2, one layer, two ranks; 4, 4 and 8 bytes, as below
        parameters   4 ────────────────────────    whole on every rank
        gradients    ·····4───────2────────────    whole from the backward on; the rank's part when the rest is freed
        optimizer    4 ────────────────────────    half of 8: the other half is rank 1's
```

- *Parameters* are there from the beginning, whole; those that the program frees (`!T0`) only between a gather and that,
  and beside them the rank's own part.
- *Gradients* of a stage are there from its first backward on, until all of them are freed (`!D0.3`); without a free, to
  the end of the step. A rank's part of a sum lies in them, or, once they are freed, in memory of its own.
- The *optimizer's* state is there from the beginning: for all parameters of the rank, or for its part of those whose
  gradients are reduce-scattered.
- An *activation* is a stage's output, from its forward until the backward of the stage's weights has ended.
- *In flight* is what the rank is sending to another.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from microparallel.errors import UsageError
from microparallel.program import (
    AllGather,
    AllReduce,
    Backward,
    BackwardWeight,
    Bucket,
    Delta,
    Forward,
    Free,
    Op,
    Parameters,
    ReduceScatter,
    Rules,
    TrainingStep,
    Value,
    halves,
)
from microparallel.trace.event import Event

if TYPE_CHECKING:
    from microparallel.trace.trace import Trace

PerStage = float | Sequence[float]
Kind = Literal["parameters", "gradients", "optimizer", "activations", "in flight"]
KINDS: tuple[Kind, ...] = ("parameters", "gradients", "optimizer", "activations", "in flight")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How many bytes a stage's parameters and what goes with them take; a number for all stages, or one for each.

    The defaults are those of one float32 parameter under Adam, beside one byte of output.

    Args:
        parameters: of a stage.
        gradients: of these parameters.
        optimizer: the optimizer's state for them.
        activations: a stage's output for one micro-batch, with what its backward keeps.
    """

    parameters: PerStage = 4
    gradients: PerStage = 4
    optimizer: PerStage = 8
    activations: PerStage = 1

    def of(self, kind: Kind, stage: int) -> float:
        """How many bytes a stage has of a kind."""
        size: PerStage = getattr(self, kind)
        return size[stage] if isinstance(size, Sequence) else size

    def check(self, stages: int) -> None:
        """Raise `UsageError` unless these sizes belong to so many stages."""
        for kind in KINDS[:-1]:
            size: PerStage = getattr(self, kind)
            numbers = size if isinstance(size, Sequence) else [size]
            if isinstance(size, Sequence) and len(size) != stages:
                raise UsageError(f"Sizes: {kind} has {len(size)} numbers, and the program has {stages} stages")
            if not all(0 <= number < float("inf") for number in numbers):
                raise UsageError(f"Sizes: {kind}={size!r} is no number of bytes; it must be 0 or more")


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What one rank holds over time.

    Attributes:
        kinds: for each kind, the moments at which it changes, with how many bytes there are from then on.
    """

    kinds: dict[Kind, list[tuple[float, float]]] = field(default_factory=dict)

    def at(self, time: float) -> dict[Kind, float]:
        """How many bytes of each kind there are at a moment."""
        return {kind: _at(changes, time) for kind, changes in self.kinds.items()}

    def peak_of(self, kind: Kind) -> float:
        """The most bytes of a kind that are there at once."""
        return max((size for _, size in self.kinds[kind]), default=0)

    @property
    def total(self) -> list[tuple[float, float]]:
        """All kinds together: the moments at which the sum changes, with how many bytes there are from then on."""
        moments = sorted({time for changes in self.kinds.values() for time, _ in changes})
        return [(time, sum(self.at(time).values())) for time in moments]

    @property
    def peak(self) -> tuple[float, float]:
        """When there is the most for the first time, and how many bytes that is."""
        return max(self.total, key=lambda change: (change[1], -change[0]), default=(0.0, 0.0))


def _at(changes: Sequence[tuple[float, float]], time: float) -> float:
    size = 0.0
    for moment, then in changes:
        if moment > time:
            break
        size = then
    return size


def memory_of(trace: Trace, sizes: Sizes) -> list[RankMemory]:
    """What each rank of a step holds over time; raises `UsageError` for what is no training step."""
    goal = trace.followed.goal
    if not isinstance(goal, TrainingStep):
        raise UsageError(f"memory is known for training steps; {trace.followed.name!r} is a {goal}")
    sizes.check(goal.stages)
    return [_Account(trace, goal, sizes, rank).memory() for rank in range(trace.ranks)]


class _Account:
    """One rank's bytes: what is added and taken away, and when."""

    def __init__(self, trace: Trace, goal: TrainingStep, sizes: Sizes, rank: int) -> None:
        program = trace.followed
        self._goal, self._sizes = goal, sizes
        self._start = trace.bounds[0]
        self._ops = program.ranks[rank]
        self._rules = Rules(goal, self._ops)
        self._events: defaultdict[Op, deque[Event]] = defaultdict(deque)
        for event in trace.by_rank[rank]:
            self._events[event.op].append(event)
        groups = program.groups()
        self._shared_by = {  # for each bucket that is kept in parts: among how many ranks
            op.value.index: len(groups[rank, op])
            for op in self._ops
            if isinstance(op, ReduceScatter | AllGather) and isinstance(op.value, Bucket | Parameters)
        }
        self._freed = {op.value for op in self._ops if isinstance(op, Free)}
        self._deltas: defaultdict[int, set[int]] = defaultdict(
            set
        )  # stage → the micro-batches whose gradients lie there
        self._parts: set[int] = set()  # the buckets whose part of the gradients has memory of its own
        self._changes: dict[Kind, list[tuple[float, float]]] = {kind: [] for kind in KINDS}

    def memory(self) -> RankMemory:
        """Go through the rank's operations in order."""
        self._begin()
        touched: dict[Value, float] = {}  # when the last operation that needs or makes a value has ended
        for op in self._ops:
            if isinstance(op, Free):
                self._free(op.value, touched.get(op.value, self._start))
                continue
            waiting = self._events.get(op)
            if not waiting:
                continue
            event = waiting.popleft()
            for value in (*self._rules.needs(op), *self._rules.makes(op)):
                touched[value] = max(touched.get(value, event.end), event.end)
            self._do(op, event)
        return RankMemory({kind: _summed(changes, self._start) for kind, changes in self._changes.items()})

    def _begin(self) -> None:
        stages = {half.stage for op in self._ops for half in halves(op)}
        summed = (op.value for op in self._ops if isinstance(op, AllReduce | ReduceScatter))
        buckets = {value.index for value in summed if isinstance(value, Bucket)}
        stages |= {stage for index in buckets for stage in range(*self._goal.buckets[index])}
        bucket_of = {stage: index for index, bounds in enumerate(self._goal.buckets) for stage in range(*bounds)}
        for stage in stages:
            index = bucket_of.get(stage, -1)
            ranks = self._shared_by.get(index, 1)
            self._add("optimizer", stage, self._start, 1 / ranks)
            self._add("parameters", stage, self._start, 1 / ranks if Parameters(index) in self._freed else 1)

    def _do(self, op: Op, event: Event) -> None:
        for half in halves(op):
            if isinstance(half, Forward):
                self._add("activations", half.stage, event.start)
            if isinstance(half, Backward | BackwardWeight):
                self._add("activations", half.stage, event.end, -1)
                if not self._deltas[half.stage]:
                    self._add("gradients", half.stage, event.start)
                self._deltas[half.stage].add(half.microbatch)
        if event.kind == "send":
            self._changes["in flight"] += [(event.start, event.bytes), (event.end, -event.bytes)]
        if isinstance(op, ReduceScatter) and isinstance(op.value, Bucket):
            self._keep_part(op.value.index, event)
        if isinstance(op, AllGather) and op.value in self._freed and isinstance(op.value, Parameters):
            for stage in range(*self._goal.buckets[op.value.index]):
                self._add("parameters", stage, event.start)

    def _keep_part(self, index: int, event: Event) -> None:
        """A part of the sum needs memory of its own where the whole gradients are let go."""
        stages = range(*self._goal.buckets[index])
        frees = any(isinstance(value, Delta) and value.stage in stages for value in self._freed)
        if frees and index not in self._parts:
            self._parts.add(index)
            for stage in stages:
                self._add("gradients", stage, event.start, 1 / self._shared_by[index])

    def _free(self, value: Value, time: float) -> None:
        if isinstance(value, Delta):
            self._deltas[value.stage].discard(value.microbatch)
            if not self._deltas[value.stage]:
                self._add("gradients", value.stage, time, -1)
        elif isinstance(value, Parameters):
            for stage in range(*self._goal.buckets[value.index]):
                self._add("parameters", stage, time, -1)

    def _add(self, kind: Kind, stage: int, time: float, times: float = 1) -> None:
        self._changes[kind].append((time, times * self._sizes.of(kind, stage)))


def _summed(changes: list[tuple[float, float]], start: float) -> list[tuple[float, float]]:
    """Sizes from moment to moment, from what is added and taken away; at one moment, what is freed goes first."""
    return list(_running(sorted([(start, 0.0), *changes])))


def _running(changes: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    size = 0.0
    for time, together in itertools.groupby(changes, key=lambda change: change[0]):
        size += sum(change for _, change in together)
        yield time, size
