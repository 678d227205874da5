"""A recorded step whose parameters are gathered on demand (ZeRO-3): what did it wait for, and what would help?

```
prefetch 0    comm     [~T2]      [~T1]      [~T0]           every gather is exposed: the rank waits for it
              compute       [ F0 ]     [ F1 ]     [ F2 ]
prefetch 1    comm     [~T2][~T1]  [~T0]                     only the first one is; two units are whole at a time
              compute       [ F0 ][ F1 ][ F2 ]
```

`waits_of` lists the gathers and sums of a step, each with the computation that waited for it. `options_of` finds out
with which options the program was made, and `choices_of` makes it with others and simulates it with the recorded costs.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from microparallel.errors import UsageError
from microparallel.program import (
    AUTO,
    BUFFERS,
    LOSS,
    NORM,
    ORDER,
    SAMPLES,
    WEIGHTS,
    AllGather,
    AllReduce,
    Backward,
    Broadcast,
    Bucket,
    Forward,
    Free,
    Join,
    Named,
    Observed,
    Op,
    Parameters,
    Program,
    ReduceScatter,
    Shard,
    TrainingStep,
    announced,
    halves,
    overflow,
)
from microparallel.schedules import fully_sharded_step
from microparallel.simulator.fitted import Fitted
from microparallel.trace import Event, Trace
from microparallel.trace.meetings import meetings

PREFETCHES = (0, 1, 2, 3)

# ── what computation waited for ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Waited:
    """A gather or a sum of one unit, and how long ranks waited for it; seconds are means over the ranks.

    Attributes:
        what: "gather" of parameters, or "sum" of gradients.
        unit: its number, in the order in which a forward uses them.
        stage: of the computation that waited for it, or that came next; None for the optimizer.
        phase: "forward", "backward" or "optimizer": what that computation is.
        exposed: nothing was computed while it was under way.
        waiting: for other ranks, which had not come to it yet.
        hidden: it was under way while the rank computed.
        bytes: of the whole unit.
    """

    what: str
    unit: int
    stage: int | None
    phase: str
    exposed: float
    waiting: float
    hidden: float
    bytes: float

    @property
    def seconds(self) -> float:
        """How long computation stood still for it."""
        return self.exposed + self.waiting

    def __str__(self) -> str:
        """In words: the gather of unit 2, before its backward."""
        if self.stage is None:
            return f"the {self.what} of unit {self.unit}, before the optimizer"
        whose = "its" if self.stage == self.unit else f"stage {self.stage}'s"
        return f"the {self.what} of unit {self.unit}, before {whose} {self.phase}"


def waits_of(trace: Trace) -> list[Waited]:
    """The gathers and sums of a recorded or simulated step, in order; none if its parameters are not gathered."""
    units = _units(trace)
    if not units:
        return []
    found = []
    for places in meetings(trace.events):
        first = trace.events[places[0]]
        named = _unit_of(first.op)
        if named is not None:
            what, index = named
            found.append((first.asked, _waited(trace, places, what, units - 1 - index)))
    return [waited for _, waited in sorted(found, key=lambda one: one[0])]


def _units(trace: Trace) -> int:
    """How many units are gathered and let go."""
    freed = {event.op.value.index for event in trace.events if _frees_parameters(event.op)}  # type: ignore[union-attr]
    if freed:
        return 1 + max(freed)
    program = trace.program  # a simulated step has no events of what takes no time
    ops = [op for ops in program.ranks for op in ops] if program is not None else []
    return 1 + max((op.value.index for op in ops if _frees_parameters(op)), default=-1)  # type: ignore[union-attr]


def _frees_parameters(op: Op) -> bool:
    return isinstance(op, Free) and isinstance(op.value, Parameters)


def _unit_of(op: Op) -> tuple[str, int] | None:
    match op:
        case AllGather(Parameters(index)):
            return "gather", index
        case ReduceScatter(Bucket(index)):
            return "sum", index
    return None


def _waited(trace: Trace, places: Sequence[int], what: str, unit: int) -> Waited:
    exposed, waiting, hidden = [], [], []
    delayed: Event | None = None
    longest = -1.0
    for place in places:
        event, since = trace.events[place], trace.waits[place]
        blocked = event.end if since is None else min(since, event.end)
        waiting.append(max(0.0, min(event.start, event.end) - blocked))
        exposed.append(event.end - max(event.start, blocked))
        hidden.append(max(0.0, min(blocked, event.end) - event.start))
        if exposed[-1] + waiting[-1] > longest:
            longest = exposed[-1] + waiting[-1]
            delayed = _computed_at(trace, event.rank, blocked)
    half = halves(delayed.op)[0] if delayed is not None and halves(delayed.op) else None
    return Waited(
        what,
        unit,
        None if half is None else half.stage,
        "optimizer" if delayed is None or half is None else delayed.kind,
        statistics.fmean(exposed),
        statistics.fmean(waiting),
        statistics.fmean(hidden),
        trace.events[places[0]].bytes,
    )


def _computed_at(trace: Trace, rank: int, moment: float) -> Event | None:
    """What a rank was computing at a moment, or what it computed next."""
    mine = (event for event in trace.compute[rank] if halves(event.op) or event.kind == "optimizer")
    return next((event for event in mine if event.end > moment), None)


# ── with which options was it made? ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Options:
    """How a step gathers: what `mp.FullyShardedDataParallel` was told, and all else that its program depends on."""

    prefetch: int
    reshard_after_forward: bool
    overlap: bool
    others: tuple[tuple[str, Any], ...]  # of `schedules.fully_sharded_step`

    @property
    def units(self) -> int:
        """How many there are."""
        found: int = dict(self.others)["units"]
        return found

    def program(self) -> Program:
        """The step."""
        return fully_sharded_step(
            prefetch=self.prefetch,
            reshard_after_forward=self.reshard_after_forward,
            overlap=self.overlap,
            **dict(self.others),
        )


def options_of(program: Program) -> Options | None:
    """The options that make this program; None if it is none of that kind, or if units were gathered on demand, too."""
    goal = program.goal
    if not isinstance(goal, TrainingStep) or not goal.sharded:
        return None
    try:
        found = _guess(program, goal)
        made = found.program()
    except (UsageError, ValueError):
        return None
    return found if _essence(made) == _essence(program) else None


def _guess(program: Program, goal: TrainingStep) -> Options:
    """What the program would have been made with, if it was made with anything."""
    numbers = [sorted({half.microbatch for op in ops for half in halves(op)}) for ops in program.ranks]
    busiest = max(range(program.world_size), key=lambda rank: len(numbers[rank]))
    ops = [op for op in program.ranks[busiest] if not isinstance(op, Observed)]
    forward = next(place for place, op in enumerate(ops) if isinstance(op, Forward))
    backward = next(place for place, op in enumerate(ops) if isinstance(op, Backward))
    gathers = [place for place, op in enumerate(ops) if isinstance(op, AllGather)]
    sums = [op for op in ops if isinstance(op, ReduceScatter)]
    named = {op.value for op in ops if isinstance(op, AllReduce | Broadcast)}
    reshard = any(map(_frees_parameters, ops[:backward]))
    across = [op for op in ops if isinstance(op, AllReduce) and isinstance(op.value, Shard)]
    others = {
        "units": goal.stages,
        "ranks": program.world_size,
        "microbatches": tuple(map(len, numbers)),
        "last": _last_uses(ops[:backward], goal.stages) if reshard else (),
        "replicas": dict(program.mesh).get("replica", 1) if across else 1,
        "buffers": BUFFERS in named,
        "weights": WEIGHTS in named,
        "order": ORDER in named,
        "samples": SAMPLES in named,
        "loss": LOSS in named,
        "norm": NORM in named,
        "overflow": overflow() in named,
        "algorithm": sums[0].algorithm if sums else AUTO,
        "at_once": all(isinstance(op.value, Bucket) and op.value.turn is not None for op in sums),
    }
    return Options(
        prefetch=sum(place < forward for place in gathers) - 1,
        reshard_after_forward=reshard,
        # Some take no time to wait for; those that are announced, in a first step, are always waited for.
        overlap=not any(isinstance(ops[place + 1], Join) and not _is_announced(ops, place) for place in gathers),
        others=tuple(others.items()),
    )


def _is_announced(ops: Sequence[Op], place: int) -> bool:
    """Whether ranks have told those without samples of a gather just before it."""
    before = next((op for op in reversed(ops[:place]) if not isinstance(op, Join)), None)
    match before:
        case AllReduce(Named(name) as value):
            return name.startswith("announced") and value != announced()  # the first one says who has samples
    return False


def _last_uses(forward: Sequence[Op], units: int) -> tuple[int, ...]:
    """For each stage, the stage behind whose forward its unit is let go."""
    last = list(range(units))
    stage = 0
    for op in forward:
        if isinstance(op, Forward):
            stage = op.stage
        elif isinstance(op, Free) and isinstance(op.value, Parameters):
            last[units - 1 - op.value.index] = stage
    return tuple(last)


def _essence(program: Program) -> list[list[Op]]:
    """The operations of all ranks without Joins, which also stand where a rank happened to wait, and without pieces."""
    return [[op for op in ops if not isinstance(op, Join | Observed)] for ops in program.ranks]


# ── what would others give? ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Choice:
    """What a step would take with certain options, by simulation; bytes are those of the rank that has most.

    Attributes:
        prefetch: how many units ahead parameters are gathered.
        reshard_after_forward: whether they are let go after forward.
        overlap: whether computation goes on meanwhile.
        now: whether that is how the step was recorded.
        seconds: of the step.
        exposed: communication that nothing is computed beside, on the rank that has most.
        sent: bytes.
        weights: the most bytes of parameters at a time; None if sizes are not known.
        memory: the most bytes of all kinds at a time; None if sizes are not known.
    """

    prefetch: int
    reshard_after_forward: bool
    overlap: bool
    now: bool
    seconds: float
    exposed: float
    sent: float
    weights: float | None
    memory: float | None


def choices_of(step: Fitted) -> list[Choice]:
    """The step as it is first, then with other options: prefetch 0 to 3, parameters kept or not, overlap.

    Empty where its parameters are not gathered as a program says.
    """
    options = options_of(step.program)
    if options is None:
        return []
    known = _whole_computations(step)
    return [_choice(known, one, now=one == options) for one in _others(options)]


def _others(now: Options) -> Iterator[Options]:
    yield now
    for prefetch in PREFETCHES:
        if prefetch != now.prefetch and prefetch < max(1, now.units):
            yield replace(now, prefetch=prefetch)
    yield replace(now, reshard_after_forward=not now.reshard_after_forward)
    if not now.overlap:
        yield replace(now, overlap=True)


def _whole_computations(step: Fitted) -> Fitted:
    """The step with costs in which pieces of a computation, between which a rank waited, are one again."""
    seconds = dict(step.costs.seconds)
    for rank, ops in enumerate(step.program.ranks):
        by_name = {str(op): op for op in ops if not isinstance(op, Observed)}
        for op in ops:
            if isinstance(op, Observed) and op.kind != "collective" and (whole := by_name.get(op.name)) is not None:
                seconds[rank, whole] = seconds.get((rank, whole), 0.0) + seconds.pop((rank, op), 0.0)
    return replace(step, costs=replace(step.costs, seconds=seconds))


def _choice(step: Fitted, options: Options, *, now: bool) -> Choice:
    trace = replace(step, program=options.program()).simulate()
    try:
        held = trace.memory
    except UsageError:
        held = []
    return Choice(
        options.prefetch,
        options.reshard_after_forward,
        options.overlap,
        now,
        trace.makespan,
        max(trace.exposed_communication),
        max(trace.bytes_sent),
        max((rank.peak_of("parameters") for rank in held), default=None),
        max((rank.peak[1] for rank in held), default=None),
    )
