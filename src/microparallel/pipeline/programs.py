"""One order for the messages of all ranks, for transports that run a rank's messages one after another, as NCCL does.

There a message holds up those behind it, and it ends only when its receiver has come to it. If every rank keeps to one
and the same order of all messages, the first that has not ended is at the head of its sender's line and of its
receiver's, so it moves, and nobody waits for ever:

```
program   rank 0: F0.0 >A0.0@1 F0.1 >A0.1@1 <G0.0@1 B0.0        rank 1: <A0.0@0 F1.0 B1.0 >G0.0@0 <A0.1@0 F1.1
alone     rank 0: >A0.0 │ >A0.1 │ <G0.0                         rank 1: <A0.0 │ >G0.0 │ <A0.1        both send
in line   rank 0: >A0.0 │ >A0.1 │ <G0.0                         rank 1: <A0.0 │ <A0.1 │ >G0.0
```

A receive may so be posted before it is needed: here rank 1 takes A0.1 before it hands over G0.0.
"""

from __future__ import annotations

import functools
import heapq
from dataclasses import replace

from microparallel.errors import ProgramError, UsageError
from microparallel.program import (
    Act,
    BackwardInput,
    Cursor,
    Grad,
    Op,
    Policy,
    Program,
    Recv,
    Send,
    TrainingStep,
    Walk,
    halves,
)
from microparallel.schedules import DATA_PARALLEL, PIPELINES, build, forwards_only, lower, with_sums
from microparallel.schedules.passes import first_microbatches
from microparallel.verifier import verify


def line_up(program: Program) -> list[list[Send | Recv]]:
    """For each rank its sends and receives, in an order that all ranks keep: that in which they could be sent.

    What a rank sends before it waits for a message is in front of that message, so it never has to wait for itself.
    """
    lines: list[list[Send | Recv]] = [[] for _ in program.ranks]
    for cursor in Walk(program, _InTurns()):
        if isinstance(cursor.op, Send):
            lines[cursor.rank].append(cursor.op)
            lines[cursor.op.to].append(Recv(cursor.op.value, cursor.rank))
    return lines


class _InTurns(Policy):
    """Ranks take turns, from the first to the last and again; in each turn a rank computes once."""

    def pauses_after(self, op: Op) -> bool:
        """A computation ends a rank's turn."""
        return bool(halves(op))

    def queue(self) -> _Turns:
        """Whose turn it is."""
        return _Turns()


class _Turns:
    """Ranks that can go on: those further down in this turn, the others in the next."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, Cursor]] = []  # by turn and rank
        self._now = (0, -1)

    def append(self, cursor: Cursor) -> None:
        turn, rank = self._now
        heapq.heappush(self._waiting, (turn + (cursor.rank <= rank), cursor.rank, cursor))

    def popleft(self) -> Cursor:
        *now, cursor = heapq.heappop(self._waiting)
        self._now = (now[0], now[1])
        return cursor

    def __len__(self) -> int:
        return len(self._waiting)


# The programs of a pipeline: for a step of so many micro-batches, and for its forwards alone.


class Schedule:
    """A schedule for a number of ranks, by name or as a program of somebody's own."""

    def __init__(
        self, schedule: str | Program, ranks: int, microbatches: int, stages_per_rank: int | None = None
    ) -> None:
        self._ranks = ranks
        self._options = {} if stages_per_rank is None else {"stages_per_rank": stages_per_rank}
        if isinstance(schedule, Program):
            self._given: Program | None = _checked(schedule, ranks)
            self.microbatches = _goal(schedule).microbatches
        else:
            if schedule in DATA_PARALLEL:
                raise UsageError(f"schedule={schedule!r} is no pipeline; choose one of {', '.join(PIPELINES)}")
            self._given = None
            self.microbatches = microbatches
        self._name = schedule if isinstance(schedule, str) else schedule.name
        program = self.program(self.microbatches)
        self.stages = _goal(program).stages
        self.homes = _homes(program)
        self.split_stages = {op.stage for ops in program.ranks for op in ops if isinstance(op, BackwardInput)}
        self.readers = _readers(program, self.homes)

    @functools.cache  # noqa: B019 a schedule lives as long as its pipeline, and has few programs
    def program(self, microbatches: int) -> Program:
        """One pipeline's step."""
        return self._build(microbatches)

    @functools.cache  # noqa: B019
    def forwards(self, microbatches: int) -> Program:
        """One pipeline's forwards alone."""
        return forwards_only(self.program(microbatches))

    @functools.cache  # noqa: B019
    def lines(self, microbatches: int, training: bool) -> list[list[Send | Recv]]:
        """For each rank of a pipeline its messages, in the order that all ranks keep."""
        return line_up(self.program(microbatches) if training else self.forwards(microbatches))

    @functools.cache  # noqa: B019
    def whole(
        self,
        microbatches: tuple[int, ...],
        shared: tuple[int, ...] = (),
        ties: tuple[tuple[int, ...], ...] = (),
        *,
        samples: bool = True,
        norm: bool = False,
        buffers: tuple[int, ...] = (),
    ) -> Program:
        """The step of pipelines with so many micro-batches each, and all that ranks do together (`with_sums`)."""
        return with_sums(
            self.program(self.microbatches),
            len(microbatches),
            fewer={
                replica: self.program(count) if count else None
                for replica, count in enumerate(microbatches)
                if count != self.microbatches
            },
            batch=self.homes[0] if self._ranks > 1 else None,
            shared=shared,
            ties=ties,
            samples=samples,
            norm=norm,
            buffers=buffers,
        )

    def _build(self, microbatches: int) -> Program:
        if self._given is None:
            return build(self._name, self._ranks, microbatches, **self._options)
        if microbatches == self.microbatches:
            return self._given
        return _shortened(self._given, microbatches)


def _shortened(program: Program, microbatches: int) -> Program:
    """The first micro-batches of a program: what is left of its order is still right."""
    orders = tuple(first_microbatches(ops, microbatches) for ops in program.ranks)
    return lower(replace(program, goal=TrainingStep(_goal(program).stages, microbatches), ranks=orders))


def _checked(program: Program, ranks: int) -> Program:
    """A program that can be run by these ranks: verified, with its messages."""
    goal = _goal(program)
    if goal.buckets:
        raise ProgramError(f"program {program.name!r} sums buckets; write one pipeline, and ask for replicas=…")
    if program.world_size != ranks:
        raise UsageError(f"program {program.name!r} is for {program.world_size} ranks, and this pipeline has {ranks}")
    runnable = lower(program) if program.sends_nothing and ranks > 1 else program
    verify(runnable)
    return runnable


def _goal(program: Program) -> TrainingStep:
    if not isinstance(program.goal, TrainingStep):
        raise ProgramError(f"program {program.name!r} is a {program.goal}, and a pipeline runs a training step")
    return program.goal


def _homes(program: Program) -> list[int]:
    """The rank of each stage."""
    homes = {half.stage: rank for rank, ops in enumerate(program.ranks) for op in ops for half in halves(op)}
    return [homes[stage] for stage in range(_goal(program).stages)]


def _readers(program: Program, homes: list[int]) -> list[list[int]]:
    """For each stage but the last, the other ranks that handle what it returns, or the gradients of that."""
    readers = [{home} for home in homes[1:]]
    for rank, ops in enumerate(program.ranks):
        for op in ops:
            if isinstance(op, Recv) and isinstance(op.value, Act | Grad) and op.value.stage < len(readers):
                readers[op.value.stage].add(rank)
    return [sorted(ranks - {homes[stage]}) for stage, ranks in enumerate(readers)]
