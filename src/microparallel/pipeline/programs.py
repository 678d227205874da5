"""The programs of a pipeline: of a step, of its forwards alone, and the order of their messages."""

from __future__ import annotations

import functools
import heapq
from dataclasses import replace

from microparallel.errors import ProgramError, UsageError
from microparallel.program import (
    AUTO,
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
from microparallel.schedules import DATA_PARALLEL, PIPELINES, build, complete, forwards_only, lower, with_sums
from microparallel.schedules.passes import first_microbatches
from microparallel.schedules.replicas import shifted
from microparallel.verifier import verify


class Schedule:
    """A schedule for a number of ranks, given by name or as a program of the caller's own.

    Attributes:
        microbatches: how many the usual step has.
        stages: how many the model is cut into.
        homes: for each stage, the rank that has it.
        split_stages: the stages whose backward is done in two halves.
        readers: for each stage but the last, the other ranks that receive what it returns, or the gradients of that.
    """

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
    def message_orders(self, microbatches: int, training: bool) -> list[list[Send | Recv]]:
        """For each rank of a pipeline its messages, in one order that all ranks keep."""
        return message_order(self.program(microbatches) if training else self.forwards(microbatches))

    @functools.cache  # noqa: B019
    def whole(
        self,
        microbatches: tuple[int, ...],
        shared: tuple[int, ...] = (),
        ties: tuple[tuple[int, ...], ...] = (),
        *,
        samples: bool = True,
        overflow: bool = False,
        norm: bool = False,
        buffers: tuple[int, ...] = (),
        level: int = 0,
        update: bool | None = None,
        algorithm: str | tuple[str, ...] = AUTO,
    ) -> Program:
        """The step of several pipelines: for each its micro-batches, and the sums over ranks (`with_sums`)."""
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
            overflow=overflow,
            norm=norm,
            buffers=buffers,
            level=level,
            update=update,
            algorithm=algorithm,
        )

    def _build(self, microbatches: int) -> Program:
        if self._given is None:
            return build(self._name, self._ranks, microbatches, **self._options)
        if microbatches == self.microbatches:
            return self._given
        return _shortened(self._given, microbatches)


def repeated(program: Program, times: int) -> Program:
    """The program of so many times as many micro-batches: the same again and again, with other micro-batches.

    ```
    twice     rank 0: F0.0 F0.1 B0.0 B0.1     →     rank 0: F0.0 F0.1 B0.0 B0.1 F0.2 F0.3 B0.2 B0.3
    ```
    """
    if times == 1:
        return program
    goal = _goal(program)
    orders = tuple(
        tuple(shifted(op, copy * goal.microbatches, 0) for copy in range(times) for op in ops if halves(op))
        for ops in program.ranks
    )
    return lower(replace(program, goal=TrainingStep(goal.stages, times * goal.microbatches), ranks=orders))


def _shortened(program: Program, microbatches: int) -> Program:
    """The first micro-batches of a program, in the order of the program; without the others it is still right."""
    orders = tuple(first_microbatches(ops, microbatches) for ops in program.ranks)
    return lower(replace(program, goal=TrainingStep(_goal(program).stages, microbatches), ranks=orders))


def _checked(program: Program, ranks: int) -> Program:
    """The caller's program, verified, and with messages where it has none."""
    goal = _goal(program)
    if goal.buckets:
        raise ProgramError(f"program {program.name!r} sums buckets; write one pipeline, and ask for replicas=…")
    if program.world_size != ranks:
        raise UsageError(f"program {program.name!r} is for {program.world_size} ranks, and this pipeline has {ranks}")
    runnable = complete(program)
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
    """For each stage but the last, the other ranks that receive what it returns, or the gradients of that."""
    readers = [{home} for home in homes[1:]]
    for rank, ops in enumerate(program.ranks):
        for op in ops:
            if isinstance(op, Recv) and isinstance(op.value, Act | Grad) and op.value.stage < len(readers):
                readers[op.value.stage].add(rank)
    return [sorted(ranks - {homes[stage]}) for stage, ranks in enumerate(readers)]


# ── one order for the messages of all ranks ─────────────────────────────────────────────────────────────────────────


def message_order(program: Program) -> list[list[Send | Recv]]:
    """For each rank its sends and receives, in one order that all ranks keep.

    This is for transports that run a rank's messages one after another, as NCCL does: a message blocks those behind it,
    and it completes only when its receiver comes to it. When all ranks keep one order of all messages, the earliest
    message that has not completed is next on its sender and on its receiver. So it proceeds, and there is no deadlock:

    ```
    program    rank 0: F0.0 >A0.0@1 F0.1 >A0.1@1 <G0.0@1 B0.0        rank 1: <A0.0@0 F1.0 B1.0 >G0.0@0 <A0.1@0 F1.1
    alone      rank 0: >A0.0 │ >A0.1 │ <G0.0                         rank 1: <A0.0 │ >G0.0 │ <A0.1        both send
    in order   rank 0: >A0.0 │ >A0.1 │ <G0.0                         rank 1: <A0.0 │ <A0.1 │ >G0.0
    ```

    A receive may be posted before its value is needed: here rank 1 receives A0.1 before it sends G0.0.

    The order is that in which the ranks could send. What a rank sends before it waits for a message stands before that
    message, so a rank never waits for a message that it has still to cause.
    """
    orders: list[list[Send | Recv]] = [[] for _ in program.ranks]
    for cursor in Walk(program, _OneByOne()):
        if isinstance(cursor.op, Send):
            orders[cursor.rank].append(cursor.op)
            orders[cursor.op.to].append(Recv(cursor.op.value, cursor.rank))
    return orders


class _OneByOne(Policy):
    """Ranks go on one by one, from the first to the last and again; in each round a rank computes once."""

    def pauses_after(self, op: Op) -> bool:
        """Whether the next rank goes on after this operation: it is a computation."""
        return bool(halves(op))

    def queue(self) -> _Rounds:
        """The ranks that can go on, the next one first."""
        return _Rounds()


class _Rounds:
    """Ranks that can go on: those after the current rank in this round, the others in the next."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, Cursor]] = []  # by round and rank
        self._now = (0, -1)

    def append(self, cursor: Cursor) -> None:
        this_round, rank = self._now
        heapq.heappush(self._waiting, (this_round + (cursor.rank <= rank), cursor.rank, cursor))

    def popleft(self) -> Cursor:
        *now, cursor = heapq.heappop(self._waiting)
        self._now = (now[0], now[1])
        return cursor

    def __len__(self) -> int:
        return len(self._waiting)
