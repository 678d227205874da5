"""The rules of the language: what an operation needs, what it makes, and what it must not overwrite.

1. *Needs*: an operation begins when all values that it needs are there.
2. *Makes*: when an operation has ended, the values that it makes are there.
3. *Hazard*: a rank must not overwrite a value that it is still sending.

| operation           | needs                                             | makes                              |
|---------------------|---------------------------------------------------|------------------------------------|
| F s.m               | the output of the stage before                    | its own output                     |
| F s:t.m             | the output of the stage before s                  | the outputs of stages s to t-1     |
| B s.m               | the stage's input, its output and its gradient    | the input's gradient, the weights' |
| I s.m               | the same                                          | the input's gradient, the rest     |
| W s.m               | the stage's input, its output and the rest        | the weights' gradients             |
| F&B                 | what its two halves need                          | what they make                     |
| Send                | the value                                         |                                    |
| Recv                | with `reduce`, the value                          | the value                          |
| Add                 | both values                                       | their sum                          |
| Free                | the value                                         | (it takes the value away)          |
| AllReduce of bucket | the weights' gradients of its stages, of this rank| the bucket                         |
| of a part (`U0.1/`) | the part, which a reduce-scatter made             | the part again, summed once more   |
| of a named value    |                                                   | the value                          |
| Broadcast           |                                                   | the value                          |
| ReduceScatter of    | the weights' gradients of its stages, of this rank| this rank's part of the sum        |
| a bucket            | (`U0.1`: those of its second micro-batch)         |                                    |
| AllGather of        | this rank's part of them                          | the whole of them                  |
| parameters          |                                                   |                                    |
| Observed            |                                                   |                                    |
| OptimizerStep       | all buckets that its rank sums or has stages in;  | its part of the parameters and of  |
|                     | its parts of those that are reduce-scattered;     | the state, for the parts on the    |
|                     | gradients of stages that are in no bucket         | left                               |

- The first stage's input is the batch, which is always there; no operation needs its gradient.
- The last stage makes its output's gradient itself, from the loss.
- In a sharded step a stage's forward and backward also need the parameters of its bucket, whole. Each rank has its part
  of the parameters from the beginning.
- A program does not say which operations use a named value (`:loss`), so a Join stands where a lane must wait for one.
- Some values are made again: parameters are gathered again after they were freed, a part is summed over replicas, or
  updated. Each time there is a new *version*. An operation needs the version that its rank's list makes last before it.

A Send carries its value as it was when its rank came to the Send. As long as the Send is *open* (it may still read),
its rank must not write to that value. An Add writes when it begins. A Recv writes from the moment it is posted; with
`reduce`, only when the message has arrived, since the message may arrive in other memory.

These rules are written here only. The walk (`walk.py`) reads them, and with it the verifier, the simulator and every
other policy; so do the passes of `schedules/` and the interpreter of collectives.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from microparallel.errors import ProgramError
from microparallel.program import ops as o
from microparallel.program.program import Goal, TrainingStep
from microparallel.program.values import Act, Bucket, Delta, Grad, Named, Parameters, Rest, Shard, Slices, State, Value

Compute = o.Forward | o.Backward | o.BackwardInput | o.BackwardWeight


class Version(NamedTuple):
    """A value that was made again: `Version(T0, 2)` is there once the second operation that makes T0 has ended."""

    value: Value
    number: int


def halves(op: o.Op) -> tuple[Compute, ...]:
    """The stage operations that an operation consists of.

    Two for a pair, a forward for each stage of a ForwardStages, a stage operation itself, and none of any other.
    """
    if isinstance(op, o.ForwardBackward):
        return (op.forward, op.backward)
    if isinstance(op, o.ForwardStages):
        return tuple(o.Forward(stage, op.microbatch) for stage in range(op.start, op.stop))
    return (op,) if isinstance(op, Compute) else ()


class Rules:
    """The rule for one rank: what its operations need and make depends on the goal, and on what the rank computes."""

    def __init__(self, goal: Goal, ops: Sequence[o.Op]) -> None:
        self._last = goal.stages - 1 if isinstance(goal, TrainingStep) else -1
        self._buckets = goal.buckets if isinstance(goal, TrainingStep) else ()
        self._sharded = isinstance(goal, TrainingStep) and goal.sharded
        self._ops = ops
        self._deltas: list[Delta] | None = None
        self._gradients_of: dict[Value, tuple[Value, ...]] = {}
        self._updated_with: tuple[Value, ...] | None = None

    def at_first(self) -> tuple[Value, ...]:
        """The values that this rank has before the step, of those that operations make."""
        return tuple(Shard(Parameters(index)) for index in range(len(self._buckets))) if self._sharded else ()

    def needs(self, op: o.Op) -> tuple[Value, ...]:
        """The values that must be there before an operation begins."""
        if self._sharded and (parts := halves(op)):
            whole = {Parameters(_bucket_of(self._buckets)[half.stage]): None for half in parts}
            return (*self._needs(op), *whole)
        return self._needs(op)

    def _needs(self, op: o.Op) -> tuple[Value, ...]:
        match op:
            case o.Forward(stage, microbatch) | o.ForwardStages(stage, _, microbatch):
                return (Act(stage - 1, microbatch),) if stage else ()
            case o.Backward(stage, microbatch) | o.BackwardInput(stage, microbatch):
                given = () if stage == self._last else (Grad(stage, microbatch),)
                return (*_kept(stage, microbatch), *given)
            case o.BackwardWeight(stage, microbatch):
                return (*_kept(stage, microbatch), Rest(stage, microbatch))
            case o.ForwardBackward(forward, backward):
                return self._needs(forward) + self._needs(backward)
            case o.Recv(value, _, reduce):
                return (value,) if reduce else ()
            case o.Add(value, into):
                return (value, into)
            case o.Send(value) | o.Free(value):
                return (value,)
            case o.AllReduce(value) | o.Broadcast(value) | o.ReduceScatter(value):
                return self._gradients(value)
            case o.AllGather(value):
                return (part_of(value),)
            case o.OptimizerStep():
                return self._reduced()
        return ()

    def makes(self, op: o.Op) -> tuple[Value, ...]:
        """The values that are there once an operation has ended."""
        match op:
            case o.Forward(stage, microbatch):
                return (Act(stage, microbatch),)
            case o.ForwardStages(start, stop, microbatch):
                return tuple(Act(stage, microbatch) for stage in range(start, stop))
            case o.Backward(stage, microbatch):
                return (*_passed_on(stage, microbatch), Delta(stage, microbatch))
            case o.BackwardInput(stage, microbatch):
                return (*_passed_on(stage, microbatch), Rest(stage, microbatch))
            case o.BackwardWeight(stage, microbatch):
                return (Delta(stage, microbatch),)
            case o.ForwardBackward(forward, backward):
                return self.makes(forward) + self.makes(backward)
            case o.Recv(value) | o.Add(_, value) | o.AllReduce(value) | o.Broadcast(value) | o.AllGather(value):
                return (value,)
            case o.ReduceScatter(value):
                return (part_of(value),)
            case o.OptimizerStep():
                return self._updated()
        return ()

    def versions(self) -> dict[int, tuple[Value | Version, ...]]:
        """For each operation that needs something that was made again: its place, and all that it needs."""
        if not any(isinstance(op, o.AllGather | o.ReduceScatter) for op in self._ops):
            return {}  # only parameters and parts are made again
        made = Counter(self.at_first())
        found: dict[int, tuple[Value | Version, ...]] = {}
        for place, op in enumerate(self._ops):
            needs = self.needs(op)
            if any(made[value] > 1 for value in needs):
                found[place] = tuple(Version(value, made[value]) if made[value] > 1 else value for value in needs)
            made.update(self.makes(op))
        return found

    def deltas(self) -> list[Delta]:
        """The weights' gradients that this rank makes."""
        if self._deltas is None:
            makers = (half for op in self._ops for half in halves(op))
            self._deltas = [
                Delta(half.stage, half.microbatch) for half in makers if isinstance(half, o.Backward | o.BackwardWeight)
            ]
        return self._deltas

    def _gradients(self, value: Value) -> tuple[Value, ...]:
        if value not in self._gradients_of:
            self._gradients_of[value] = self._find_gradients(value)
        return self._gradients_of[value]

    def _find_gradients(self, value: Value) -> tuple[Value, ...]:
        if isinstance(value, Named):
            return ()
        if not isinstance(value, Bucket):
            return (value,)
        if value.index >= len(self._buckets):
            raise ProgramError(f"there is no bucket {value}; the goal names {len(self._buckets)}, counted from 0")
        start, stop = self._buckets[value.index]
        mine = [delta for delta in self.deltas() if start <= delta.stage < stop]
        if value.turn is not None:
            turns = sorted({delta.microbatch for delta in self.deltas()})[value.turn : value.turn + 1]
            mine = [delta for delta in mine if delta.microbatch in turns]
        return tuple(mine)

    def _reduced(self) -> tuple[Value, ...]:
        """What the weights are updated with: buckets, and gradients that are in none.

        The buckets are those of this rank's stages, and those that it sums though it computed nothing of them: a rank
        without data updates its weights with the gradients of the others.
        """
        if self._updated_with is None:
            bucket_of = _bucket_of(self._buckets)
            parts = {part_of(op.value): None for op in self._ops if isinstance(op, o.ReduceScatter)}
            scattered = {part.of.index for part in parts}
            mine = dict.fromkeys(bucket_of[delta.stage] for delta in self.deltas() if delta.stage in bucket_of)
            buckets: dict[Value, None] = {Bucket(index): None for index in mine if index not in scattered}
            summed = (op.value for op in self._ops if isinstance(op, o.AllReduce))
            buckets |= {value: None for value in summed if isinstance(value, Bucket)}
            buckets |= dict.fromkeys(parts)
            alone = [delta for delta in self.deltas() if delta.stage not in bucket_of]
            self._updated_with = (*buckets, *alone)
        return self._updated_with

    def _updated(self) -> tuple[Value, ...]:
        """What this rank's OptimizerStep changes of the parts that it keeps."""
        updated = dict.fromkeys(part.of.index for part in self._reduced() if isinstance(part, Shard))
        return tuple(Shard(whole) for index in updated for whole in (Parameters(index), State(index)))


def part_of(value: Value) -> Shard:
    """A rank's part of a value; raises `ProgramError` for a value that has no parts."""
    if not isinstance(value, Bucket | Parameters | State):
        raise ProgramError(f"{value} has no parts: gradients (U0) are reduce-scattered, parameters (T0) are gathered")
    return Shard(value)


@functools.lru_cache(maxsize=64)
def _bucket_of(buckets: tuple[tuple[int, int], ...]) -> dict[int, int]:
    """For each stage that is in a bucket, which bucket; the answer is the same for all ranks."""
    return {stage: index for index, (start, stop) in enumerate(buckets) for stage in range(start, stop)}


def _kept(stage: int, microbatch: int) -> tuple[Value, ...]:
    """What a stage keeps from its forward until its backward has ended: its input and its output."""
    output = Act(stage, microbatch)
    return (Act(stage - 1, microbatch), output) if stage else (output,)


def _passed_on(stage: int, microbatch: int) -> tuple[Value, ...]:
    return (Grad(stage - 1, microbatch),) if stage else ()


def written(op: o.Recv | o.Add) -> Value:
    """The memory that an operation changes, while its rank may still be sending what is there."""
    return op.into if isinstance(op, o.Add) else op.value


Sending = TypeVar("Sending")


class OpenSends(Generic[Sending]):
    """The sends of one rank that may still read what they carry, each under a key of the caller's choice.

    They are kept by the memory they read, so those in the way of a write are found without looking at all the others.
    """

    def __init__(self) -> None:
        self._reading: dict[object, dict[Sending, Value]] = {}

    def add(self, value: Value, sending: Sending) -> None:
        """Note that a send of a value has begun."""
        for place in _memory(value):
            if place in self._reading:
                self._reading[place][sending] = value
            else:
                self._reading[place] = {sending: value}

    def conflicts(self, op: o.Recv | o.Add) -> dict[Sending, Value]:
        """The sends that an operation must wait for before it writes, since they read it; and what each carries."""
        if not self._reading:
            return {}
        found: dict[Sending, Value] = {}
        for place in _memory(written(op)):
            if place in self._reading:
                found |= self._reading[place]
        return found

    def close(self, value: Value, sending: Sending) -> None:
        """Note that a send has read its value."""
        for place in _memory(value):
            reading = self._reading[place]
            del reading[sending]
            if not reading:
                del self._reading[place]

    def __iter__(self) -> Iterator[Sending]:
        """All open sends, once each."""
        return iter({sending: None for reading in self._reading.values() for sending in reading})


def _memory(value: Value) -> Iterable[object]:
    """The pieces of memory that a value names: two values share one if they touch."""
    if not isinstance(value, Slices):
        return (value,)
    return (value.start,) if value.stop == value.start + 1 else value.slices


def live_activations(op: o.Op) -> tuple[int, int]:
    """How many activations an operation adds when it begins, and lets go when it ends.

    A forward's output is held until the backward of its weights has ended.
    """
    begins = sum(isinstance(half, o.Forward) for half in halves(op))
    ends = sum(isinstance(half, o.Backward | o.BackwardWeight) for half in halves(op))
    return begins, ends


def held_activations(ops: Iterable[o.Op]) -> Iterator[int]:
    """How many activations a rank that does these operations in this order holds during each of them."""
    live = 0
    for op in ops:
        begins, ends = live_activations(op)
        live += begins
        yield live
        live -= ends


def peak_activations(ops: Iterable[o.Op]) -> int:
    """The most activations that are held at once by a rank that does these operations in this order."""
    return max(held_activations(ops), default=0)
