"""What each rank holds, in bytes over time, read from the program that a trace follows and the times of its events.

```
rank 0  F0.0 B0.0 %U0.0@dp !D0.0 S ~T0@dp          ZeRO-2, one layer, two ranks; 4, 4 and 8 bytes, as below
        parameters   4 ────────────────────────    whole on every rank
        gradients    ·····4───────2────────────    whole from the backward on; the rank's part when the rest is freed
        optimizer    4 ────────────────────────    half of 8: the other half is rank 1's
```

- *Parameters* are there from the beginning, whole; those that the program frees (`!T0`) only between a gather and that,
  and beside them the rank's own part. In mixed precision, what is gathered has fewer bits than the part.
- *Gradients* of a stage are there from its first backward on, until all of them are freed (`!D0.3`); without a free, to
  the end of the step. A rank's part of a sum lies in them, or, once they are freed, in memory of its own.
- The *optimizer's* state is there from the beginning: for all parameters of the rank, or for its part of those whose
  gradients are reduce-scattered.
- A rank frees a value when it comes to the Free: it has then computed all that stands before it. If the value is still
  in use, as by a sum that is under way, it is freed when that has ended. What happens at one moment happens in the
  order of the program.
- An *activation* is a stage's output, from its forward until the backward of the stage's weights has ended.
- *In flight* is what the rank is sending to another.

A recorded step says itself how large all of this is (`Trace.sizes`), and its activations were measured before and after
each computation: the memory of forwards' outputs, and of what autograd has saved below them. Parameters, buffers and
the batch do not count. The optimizer's state is what it was when the step had ended.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
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
    Join,
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
_UNKNOWN = {  # what is missing, and how it becomes known
    "optimizer": "no optimizer made a step in it",
    "activations": "they were not measured stage by stage",
}
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
        gathered: its parameters while they are whole, where a rank keeps a part of them otherwise, and they are
            converted for that (mixed precision); None: as `parameters`.

    Of a recorded step, `optimizer` and `activations` may be None: not known.
    """

    parameters: PerStage = 4
    gradients: PerStage = 4
    optimizer: PerStage | None = 8
    activations: PerStage | None = 1
    gathered: PerStage | None = None

    def of(self, kind: Kind, stage: int) -> float:
        """How many bytes a stage has of a kind; raises `UsageError` if that is not known."""
        size: PerStage | None = getattr(self, kind)
        if size is None:
            raise UsageError(f"memory: the size of {kind} in this step is not known: {_UNKNOWN[kind]}")
        return size[stage] if isinstance(size, Sequence) else size

    def of_gathered(self, stage: int) -> float:
        """How many bytes a stage's parameters have while they are whole."""
        size = self.parameters if self.gathered is None else self.gathered
        return size[stage] if isinstance(size, Sequence) else size

    def check(self, stages: int) -> None:
        """Raise `UsageError` unless these sizes belong to so many stages."""
        for kind in (*KINDS[:-1], "gathered"):
            size: PerStage | None = getattr(self, kind)
            numbers = size if isinstance(size, Sequence) else [] if size is None else [size]
            if isinstance(size, Sequence) and len(size) != stages:
                raise UsageError(f"Sizes: {kind} has {len(size)} numbers, and the program has {stages} stages")
            if not all(0 <= number < float("inf") for number in numbers):
                raise UsageError(f"Sizes: {kind}={size!r} is no number of bytes; it must be 0 or more")


@dataclass(frozen=True)
class RankMemory:
    """What one rank holds over time.

    Attributes:
        kinds: for each kind, the moments at which it changes, with how many bytes there are from then on.
        changes: each change by itself: when, by the operation at which place of the program, of which kind, by how many
            bytes. What happens at one moment happens in the order of the program: a rank that gathers one layer and
            then frees another holds both for that moment. Empty where activations were measured.
    """

    kinds: dict[Kind, list[tuple[float, float]]] = field(default_factory=dict)
    changes: Sequence[tuple[float, int, Kind, float]] = ()

    def at(self, time: float) -> dict[Kind, float]:
        """How many bytes of each kind there are at a moment."""
        return {kind: _at(changes, time) for kind, changes in self.kinds.items()}

    def peak_of(self, kind: Kind) -> float:
        """The most bytes of a kind that are there at once."""
        return max((size for _, size in self.kinds[kind]), default=0)

    @cached_property
    def moments(self) -> list[tuple[float, dict[Kind, float]]]:
        """The moments at which any kind changes, in order, with how many bytes of each there are from then on."""
        now: dict[Kind, float] = dict.fromkeys(self.kinds, 0.0)
        found = []
        if self.changes:
            for (time, _), together in itertools.groupby(self.changes, key=lambda change: change[:2]):
                for _, _, kind, size in together:
                    now = now | {kind: now[kind] + size}
                found.append((time, now))
            return found
        every = ((time, kind, size) for kind, sizes in self.kinds.items() for time, size in sizes)
        for time, group in itertools.groupby(sorted(every, key=lambda change: change[0]), key=lambda change: change[0]):
            now = now | {kind: size for _, kind, size in group}
            found.append((time, now))
        return found

    @property
    def total(self) -> list[tuple[float, float]]:
        """All kinds together: the moments at which the sum changes, with how many bytes there are from then on."""
        return [(time, sum(sizes.values())) for time, sizes in self.moments]

    @property
    def highest(self) -> tuple[float, dict[Kind, float]]:
        """When there is the most for the first time, and how many bytes of each kind that is."""
        return max(self.moments, key=lambda moment: (sum(moment[1].values()), -moment[0]), default=(0.0, {}))

    @property
    def peak(self) -> tuple[float, float]:
        """When there is the most for the first time, and how many bytes that is."""
        time, sizes = self.highest
        return time, sum(sizes.values())


def _at(changes: Sequence[tuple[float, float]], time: float) -> float:
    size = 0.0
    for moment, then in changes:
        if moment > time:
            break
        size = then
    return size


def memory_of(trace: Trace) -> list[RankMemory]:
    """What each rank of a training step holds over time; raises `UsageError` where it is none, or a size is unknown."""
    sizes = _sizes_of(trace)
    goal = trace.followed.goal
    if not isinstance(goal, TrainingStep):
        raise UsageError(f"memory is known for training steps; {trace.followed.name!r} is a {goal}")
    sizes.check(goal.stages)
    shared_by = trace.followed.shared_by()
    return [_Account(trace, goal, sizes, rank, shared_by).memory() for rank in range(trace.ranks)]


def _sizes_of(trace: Trace) -> Sizes:
    sizes = trace.sizes
    if isinstance(sizes, Mapping):
        if len(trace.steps) != 1:
            raise UsageError(
                f"memory: this trace has {len(trace.steps)} steps, each with sizes of its own; use step(…)"
            )
        sizes = sizes.get(trace.steps[0])
    if sizes is None:
        raise UsageError(
            "memory: this trace does not say how large parameters and activations are; mp.record finds it out for "
            "steps of one mp.DataParallel or mp.Pipeline, unless memory=False"
        )
    return sizes


def simulated_sizes(trace: Trace) -> Sizes | None:
    """The sizes with which one recorded step is simulated again; None if they are not known.

    What a stage's activations take is what the forward of a micro-batch adds, of the largest one. Where one forward
    goes through all stages, it is what each stage's backward frees.
    """
    if isinstance(trace.sizes, Sizes) or trace.sizes is None:
        return trace.sizes
    sizes = trace.sizes.get(trace.steps[0])
    if sizes is None:
        return None
    kept: defaultdict[int, list[float]] = defaultdict(list)  # by a forward of each stage
    freed: defaultdict[int, list[float]] = defaultdict(list)  # by a backward, where one forward goes through all stages
    for event in trace.events:
        before, after = event.activations or (0.0, 0.0)
        if event.activations is not None and isinstance(event.op, Forward | Backward):
            (kept if isinstance(event.op, Forward) else freed)[event.op.stage].append(abs(after - before))
    largest = [max(kept[stage] or freed[stage], default=None) for stage in range(_stages(sizes))]
    return replace(sizes, activations=None if None in largest else [size or 0.0 for size in largest])


def _stages(sizes: Sizes) -> int:
    return len(sizes.parameters) if isinstance(sizes.parameters, Sequence) else 1


class _Account:
    """One rank's bytes: what is added and taken away, and when."""

    def __init__(
        self,
        trace: Trace,
        goal: TrainingStep,
        sizes: Sizes,
        rank: int,
        shared_by: Mapping[tuple[int, int], tuple[int, ...]],
    ) -> None:
        self._goal, self._sizes = goal, sizes
        self._start = trace.bounds[0]
        self._ops = trace.followed.ranks[rank]
        self._rules = Rules(goal, self._ops)
        self._events: defaultdict[Op, deque[Event]] = defaultdict(deque)
        for event in trace.by_rank[rank]:
            self._events[event.op].append(event)
        # For each bucket, in how many parts it is kept: those of which other replicas have a copy count once.
        self._shards = [len(shared_by.get((rank, index), (rank,))) for index in range(len(goal.buckets))]
        self._freed = {op.value for op in self._ops if isinstance(op, Free)}
        self._deltas: defaultdict[int, set[int]] = defaultdict(set)  # stage → micro-batches whose gradients lie there
        self._measured = [event for event in trace.compute[rank] if event.activations is not None]
        self._parts: set[int] = set()  # the buckets whose part of the gradients has memory of its own
        self._place = 0  # of the operation that changes something
        self._changes: list[tuple[float, int, Kind, float]] = []

    def memory(self) -> RankMemory:
        """Go through the rank's operations in order, as far as there are events of them."""
        self._begin()
        touched: dict[Value, float] = {}  # when the last operation that needs or makes a value has ended
        came = ended = self._start  # when the rank comes to an operation, and when all before it have ended
        left = sum(map(len, self._events.values()))
        for op in self._ops:
            self._place += 1
            waiting = self._events.get(op)
            event = waiting.popleft() if waiting else None
            left -= event is not None
            if isinstance(op, Free):
                self._free(op.value, max(touched.get(op.value, came), came if event is None else event.end))
            elif isinstance(op, Join):
                came = ended
            elif event is None:
                if not left:
                    break  # the trace shows the beginning of a step
            else:
                for value in (*self._rules.needs(op), *self._rules.makes(op)):
                    touched[value] = max(touched.get(value, event.end), event.end)
                ended = max(ended, event.end)
                came = max(came, event.end) if event.computes else came
                self._do(op, event)
        kinds = {
            kind: _summed([(time, size) for time, _, of, size in self._changes if of == kind], self._start)
            for kind in KINDS
        }
        if self._measured:
            return RankMemory(kinds | {"activations": list(self._activations())})
        return RankMemory(kinds, sorted(self._changes, key=lambda change: change[:2]))

    def _activations(self) -> Iterator[tuple[float, float]]:
        """As they were measured: what a computation adds counts from its beginning on, what it frees until its end."""
        before, after = self._measured[0].activations or (0.0, 0.0)
        yield self._start, before
        for event in self._measured:
            before, after = event.activations or (0.0, 0.0)
            yield event.start, max(before, after)
            yield event.end, after

    def _begin(self) -> None:
        stages = {half.stage for op in self._ops for half in halves(op)}
        summed = (op.value for op in self._ops if isinstance(op, AllReduce | ReduceScatter))
        buckets = {value.index for value in summed if isinstance(value, Bucket)}
        stages |= {stage for index in buckets for stage in range(*self._goal.buckets[index])}
        bucket_of = {stage: index for index, bounds in enumerate(self._goal.buckets) for stage in range(*bounds)}
        for stage in stages:
            index = bucket_of.get(stage)
            shards = 1 if index is None else self._shards[index]
            freed = index is not None and Parameters(index) in self._freed
            self._add("optimizer", stage, self._start, 1 / shards)
            self._add("parameters", stage, self._start, 1 / shards if freed else 1)

    def _do(self, op: Op, event: Event) -> None:
        for half in halves(op):
            if isinstance(half, Forward) and not self._measured:
                self._add("activations", half.stage, event.start)
            if isinstance(half, Backward | BackwardWeight):
                if not self._measured:
                    self._add("activations", half.stage, event.end, -1)
                if not self._deltas[half.stage]:
                    self._add("gradients", half.stage, event.start)
                self._deltas[half.stage].add(half.microbatch)
        if event.kind == "send":
            self._change("in flight", event.start, event.bytes)
            self._change("in flight", event.end, -event.bytes)
        if isinstance(op, ReduceScatter) and isinstance(op.value, Bucket):
            self._keep_part(op.value.index, event)
        if isinstance(op, AllGather) and op.value in self._freed and isinstance(op.value, Parameters):
            # A real rank takes the memory when it asks, before the other ranks come; a simulated one when it begins.
            moment = event.asked if self._measured else event.start
            for stage in range(*self._goal.buckets[op.value.index]):
                self._change("parameters", moment, self._sizes.of_gathered(stage))

    def _keep_part(self, index: int, event: Event) -> None:
        """A part of the sum needs memory of its own where the whole gradients are let go."""
        stages = range(*self._goal.buckets[index])
        frees = any(isinstance(value, Delta) and value.stage in stages for value in self._freed)
        if frees and index not in self._parts:
            self._parts.add(index)
            for stage in stages:
                self._add("gradients", stage, event.start, 1 / self._shards[index])

    def _free(self, value: Value, time: float) -> None:
        if isinstance(value, Delta):
            self._deltas[value.stage].discard(value.microbatch)
            if not self._deltas[value.stage]:
                self._add("gradients", value.stage, time, -1)
        elif isinstance(value, Parameters):
            for stage in range(*self._goal.buckets[value.index]):
                self._change("parameters", time, -self._sizes.of_gathered(stage))

    def _add(self, kind: Kind, stage: int, time: float, times: float = 1) -> None:
        self._change(kind, time, times * self._sizes.of(kind, stage))

    def _change(self, kind: Kind, time: float, size: float) -> None:
        self._changes.append((time, self._place, kind, size))


def _summed(changes: list[tuple[float, float]], start: float) -> list[tuple[float, float]]:
    """Sizes from moment to moment, from what is added and taken away; at one moment, what is freed goes first."""
    return list(_running(sorted([(start, 0.0), *changes])))


def _running(changes: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    size = 0.0
    for time, together in itertools.groupby(changes, key=lambda change: change[0]):
        size += sum(change for _, change in together)
        yield time, size
