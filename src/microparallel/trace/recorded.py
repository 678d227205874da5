"""The program of a recorded step: its events are the operations, in the order in which each rank came to them.

```
recorded    forward ▒▒▒▒▒▒ backward ▒▒▒┤c0▒▒▒▒▒┤c1▒▒▒·····│▒▒▒ optimizer ▒▒▒      · blocked
program     forward   backward c0 backward c1 backward = optimizer
```

What a rank does by itself is measured on its own clock, which stands still while the rank is blocked: so Python, data
and logging are part of it. They count to the operation before them; behind a Send or a collective, to the one that
follows. Where a rank waited for a collective before it went on, a Join stands.

`DataParallel` and `Pipeline` report the operations of their program, and those keep their names and values. What was
only `Observed` stays that in the program. So does what a program cannot say: an operation that a rank reported twice,
or a collective of ranks that are on no common axis of a mesh. Parameters may be gathered twice, since they are let go
in between; then each time takes as long as the mean.

What needs gathered parameters says so by itself: for a wait after something else was computed no Join stands.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from microparallel.errors import ProgramError, UsageError
from microparallel.program import (
    WORLD,
    AllGather,
    AllReduce,
    Backward,
    BackwardWeight,
    Broadcast,
    Bucket,
    Free,
    Join,
    Kind,
    Observed,
    Op,
    Parameters,
    Program,
    Recv,
    ReduceScatter,
    Rules,
    Send,
    TrainingStep,
    halves,
    is_meeting,
)
from microparallel.trace.event import Event
from microparallel.trace.intervals import length, outside, union
from microparallel.trace.meetings import meetings
from microparallel.trace.trace import Trace

PerOperation = dict[tuple[int, Op], float]


@dataclass(frozen=True)
class RecordedStep:
    """What the ranks did in a step, and how long each operation took; Python and data count to what is computed.

    Attributes:
        program: the operations of the ranks; each rank does each operation once, but for gathers of parameters.
        seconds: of each operation; of communication, since the last rank had come.
        bytes: of what was sent or reduced.
        traffic: how many messages and bytes a rank sent for a collective.
    """

    program: Program
    seconds: PerOperation = field(default_factory=dict)
    bytes: PerOperation = field(default_factory=dict)
    traffic: dict[tuple[int, Op], tuple[int, float]] = field(default_factory=dict)


def recorded_step(trace: Trace, *, reported: bool = True) -> RecordedStep:
    """The program of one step alone, with its costs.

    Args:
        trace: of the step.
        reported: whether operations keep the names and values that ranks reported; otherwise all are taken as observed.
    """
    if trace.simulated and trace.program is not None and reported:
        return _simulated_step(trace, trace.program)
    trace = _as_recorded(trace)
    observed: set[Op] = set()
    while True:
        step = _Step(trace, reported, observed)
        wrong = step.misunderstood()
        if not wrong:
            return step.result()
        if wrong <= observed:  # to take them as observed has not helped
            names = ", ".join(sorted(map(str, wrong))[:3])
            raise UsageError(f"the recorded step cannot be put into a program: it is not clear what {names} sums")
        observed |= wrong


def _simulated_step(trace: Trace, program: Program) -> RecordedStep:
    """What was simulated knows its program; a collective takes as long as the last rank takes part in it."""
    seconds = {(event.rank, event.op): event.duration for event in trace.events}
    for places in meetings(trace.events):
        together = [trace.events[place] for place in places]
        seconds |= {(event.rank, event.op): max(one.duration for one in together) for event in together}
    sent = [event for event in trace.events if not event.computes]
    return RecordedStep(
        program,
        seconds,
        {(event.rank, event.op): event.bytes for event in sent},
        {(event.rank, event.op): (event.messages, event.sent) for event in sent},
    )


def _as_recorded(trace: Trace) -> Trace:
    """A simulated trace with what a recorder adds: when each rank asked for communication, and since when it waited."""
    if not trace.simulated:
        return trace
    rules = Rules(TrainingStep(1, 1), ())
    made = {(event.rank, value): event.end for event in trace.events for value in rules.makes(event.op)}
    events = []
    for event, waited in zip(trace.events, trace.waits, strict=True):
        if isinstance(event.op, Send):  # a rank asks for it as soon as the value is made, and does not wait for it
            asked = made.get((event.rank, event.op.value), event.asked)
            events.append(event._replace(issued=asked))
        elif waited is not None:
            events.append(event._replace(issued=min(event.asked, waited), waited=waited))
        else:
            events.append(event)
    return replace(trace, events=events)


class OwnClock:
    """A rank's clock that stands still while the rank is blocked by communication."""

    def __init__(self, events: Iterable[Event], start: float) -> None:
        self._start = start
        self._blocked = union((event.waited, event.end) for event in events if event.waited is not None)

    def at(self, moment: float) -> float:
        """How long the rank has been at work by itself."""
        if moment <= self._start:
            return 0.0
        return length(outside([(self._start, moment)], self._blocked))


class _Step:
    """All ranks of a step, with those operations taken as observed that would not mean what happened."""

    def __init__(self, trace: Trace, reported: bool, observed: set[Op]) -> None:
        self._reported = reported
        self._observed = observed
        self._seconds: PerOperation = {}
        self._bytes: PerOperation = {}
        self._traffic: dict[tuple[int, Op], tuple[int, float]] = {}
        self._groups: dict[tuple[int, Op], tuple[int, ...]] = {}
        self._ops: dict[int, Op] = {}  # of communication, by the places of its events
        self._collectives: list[tuple[Op, list[Event]]] = []  # each with the events of all ranks that met
        for number, places in enumerate(meetings(trace.events)):
            together = sorted(((trace.events[place], place) for place in places), key=lambda one: one[0].rank)
            if together[0][0].kind == "collective":
                self._add_collective(together, number)
            elif reported:
                self._add_message({event.kind: (event, place) for event, place in together})
        self._measure_collectives()
        mine: list[list[tuple[Event, Op | None]]] = [[] for _ in range(trace.ranks)]
        for place, event in enumerate(trace.events):
            mine[event.rank].append((event, self._ops.get(place)))
        orders = tuple(self._rank(rank, events, trace) for rank, events in enumerate(mine))
        self.program = Program("recorded", TrainingStep(1, 1), orders, self._mesh(trace.ranks))

    def result(self) -> RecordedStep:
        """The program with its goal, and all that was measured."""
        program = replace(self.program, goal=_goal(self.program))
        return RecordedStep(program, self._seconds, self._bytes, self._traffic)

    def misunderstood(self) -> set[Op]:
        """The operations whose ranks in the program are not those that met; and unclear sums of gradients."""
        groups = self.program.groups()
        wrong: set[Op] = {op for (rank, op), group in groups.items() if group != self._groups[rank, op]}
        sums = {op for op, _ in self.program.bucket_sums()}
        try:
            _goal(self.program)
        except ProgramError:
            return wrong | sums
        return wrong

    # ── communication ───────────────────────────────────────────────────────────────────────────────────────────

    def _add_collective(self, together: Sequence[tuple[Event, int]], number: int) -> None:
        """Only of what all ranks of its group have recorded it is known how long it took."""
        first = together[0][0]
        group = tuple(event.rank for event, _ in together)
        if len(group) < 2 or (first.group and group != tuple(sorted(first.group))):
            return
        op = first.op
        again = not _may_repeat(op) and any((rank, op) in self._groups for rank in group)
        rootless = isinstance(op, Broadcast) and op.root not in group
        if not self._reported or again or rootless or op in self._observed or isinstance(op, Observed):
            op = Observed(str(op), "collective", number)
        self._collectives.append((op, [event for event, _ in together]))
        for event, place in together:
            self._ops[place] = op
            self._groups[event.rank, op] = group
            self._bytes[event.rank, op] = event.bytes
            self._traffic[event.rank, op] = event.messages, event.sent

    def _add_message(self, sides: dict[str, tuple[Event, int]]) -> None:
        """A message took as long as it was under way once it was sent, and was waited for."""
        if len(sides) < 2:
            return
        (send, outgoing), (receive, incoming) = sides["send"], sides["receive"]
        if not isinstance(send.op, Send) or not isinstance(receive.op, Recv):
            return
        op = self._ops[outgoing] = replace(send.op, to=receive.rank)  # of this world, whatever a smaller one calls it
        self._ops[incoming] = replace(receive.op, source=send.rank)
        self._seconds[send.rank, op] = max(0.0, receive.end - max(send.start, receive.asked))
        self._bytes[send.rank, op] = send.bytes

    def _measure_collectives(self) -> None:
        """How long each took: since the last rank had come, and those before it had ended."""
        found: defaultdict[tuple[int, Op], list[float]] = defaultdict(list)
        ended: defaultdict[int, float] = defaultdict(lambda: -math.inf)
        for op, events in sorted(self._collectives, key=lambda item: (item[1][0].asked, item[1][0].start)):
            begun = max(*(ended[event.rank] for event in events), *(event.start for event in events))
            for event in events:
                found[event.rank, op].append(max(0.0, event.end - begun))
                ended[event.rank] = max(begun, event.end)
        self._seconds |= {key: statistics.fmean(seconds) for key, seconds in found.items()}

    def _mesh(self, ranks: int) -> tuple[tuple[str, int], ...]:
        """The grid in which replicas meet: as far apart as a pipeline is long, or as a group that has all parts."""
        groups = self._groups.items()
        inside = {op.axis for (_, op), group in groups if isinstance(op, AllGather) and len(group) < ranks}
        for (_, op), group in self._groups.items():
            apart = group[1] - group[0]
            if not isinstance(op, AllReduce | ReduceScatter) or op.axis == WORLD:
                continue
            if apart > 1 and apart * len(group) == ranks:
                return (op.axis, len(group)), (next(iter(inside - {op.axis}), "pp"), apart)
        return ()

    # ── one rank ────────────────────────────────────────────────────────────────────────────────────────────────

    def _rank(self, rank: int, mine: Sequence[tuple[Event, Op | None]], trace: Trace) -> tuple[Op, ...]:
        """A rank's operations, in the order in which it came to them; and how long each took on its own clock."""
        alone = trace.ranks == 1  # there is no rank to wait for: what is called communication is work of its own
        blocking = [event for event, op in mine if not alone and not isinstance(op, Send)]  # to send is work, too
        rows = _Rows(_moments(mine, self._reported), OwnClock(blocking, trace.bounds[0]))
        self._seconds |= {(rank, op): seconds for op, seconds in rows.seconds.items()}
        return tuple(rows.ops)


@dataclass(frozen=True)
class _Moment:
    """When a rank came to an operation that computes, to communication, or to where it waits for that."""

    at: float
    op: Op
    event: Event
    reported: bool | None = None  # of a Send, a collective, a wait for one: whether it is not only observed

    @property
    def computes(self) -> bool:
        return self.event.computes and not isinstance(self.op, Free)

    @property
    def left(self) -> float:
        """When the rank was done with it: at once, if it sent a message and did not wait."""
        return self.at if isinstance(self.op, Send) and self.event.waited is None else self.event.end

    @property
    def key(self) -> tuple[float, int, float]:
        """In order: at the same moment, first what takes no time, then what is asked for, waits, and what begins."""
        if self.event.computes:
            return self.at, 4 if self.event.duration else 0, self.event.start
        return self.at, 1 if isinstance(self.op, Send) else 3 if isinstance(self.op, Join) else 2, self.event.start


def _moments(mine: Sequence[tuple[Event, Op | None]], reported: bool) -> list[_Moment]:
    """All of them, in order; of several waits between two collectives only the last, which is for all before it."""
    found = []
    working = [event for event, _ in mine if event.computes and event.duration]
    for event, op in mine:
        if event.computes:
            if reported or event.kind != "other":
                found.append(_Moment(event.start, event.op if reported else Observed(str(event.op), event.kind), event))
        elif op is not None:
            in_program = None if isinstance(op, Recv) else not isinstance(op, Observed)
            found.append(_Moment(event.asked, op, event, in_program))
            if (
                is_meeting(op)
                and event.waited is not None
                and not (_may_repeat(op) and _computed_since(event, working))
            ):
                found.append(_Moment(event.waited, Join(), event, in_program))
    found.sort(key=lambda moment: moment.key)
    needed = []
    waits_later = False
    for moment in reversed(found):
        waits = isinstance(moment.op, Join)
        if not (waits and waits_later):
            needed.append(moment)
        waits_later = waits or (waits_later and not is_meeting(moment.op))
    return needed[::-1]


def _may_repeat(op: Op) -> bool:
    """Whether a rank may do it more than once in a step: parameters are gathered again after they were let go."""
    return isinstance(op, AllGather) and isinstance(op.value, Parameters)


def _computed_since(event: Event, working: Iterable[Event]) -> bool:
    """Whether the rank computed between asking for a collective and waiting for it."""
    assert event.waited is not None
    return any(one.start < event.waited and one.end > event.asked for one in working)


class _Rows:
    """A rank's operations, and the time on its own clock that belongs to each.

    The time after a collective is a piece of its own if the rank was computing, or if the collective was only observed.
    Else it counts to what is computed next, as does the time in which a rank could not go on because it was sending.
    Where nothing is computed between reported communication, all of the time is that of the communication.
    """

    def __init__(self, moments: Sequence[_Moment], clock: OwnClock) -> None:
        self.ops: list[Op] = []
        self.seconds: dict[Op, float] = {}
        self._clock = clock
        self._at = 0.0  # on the clock: up to here, all time has been given to operations
        self._op: Op | None = None  # which gets what follows; None behind a collective
        self._working: Event | None = None  # what is computed, or was last
        self._first = next((moment.event for moment in moments if moment.computes), None)
        self._pieces: Counter[tuple[str, str]] = Counter()
        unfinished = False  # whether there are collectives that the rank has not waited for
        calling = False  # whether nothing was computed since it sent something, or asked for a collective
        for moment in moments:
            if moment.computes:
                if moment.event.kind == "optimizer" and unfinished:
                    self._spend(moment)
                    self._op = None
                    self.ops.append(Join())
                    unfinished = False
                self._compute(moment)
                calling = False
            else:
                if moment.reported is not None:
                    self._spend(moment)
                    if calling and moment.reported and not isinstance(moment.op, Send):
                        self._at = clock.at(moment.at)
                    self._op = None
                    calling = not isinstance(moment.op, Join)
                unfinished = is_meeting(moment.op) or (unfinished and not isinstance(moment.op, Join))
                self.ops.append(moment.op)
        self._end(max((moment.left for moment in moments), default=0.0))

    def _compute(self, moment: _Moment) -> None:
        self._spend(moment)
        now = self._clock.at(moment.at)
        self._working = moment.event
        self._op = self._unique(moment.op, moment.event.kind)
        self._append(self._op, now - self._at)
        self._at = now

    def _spend(self, moment: _Moment) -> None:
        """The rank comes to something: give the time until now to what it was doing."""
        now = self._clock.at(moment.at)
        if self._op is not None:
            self.seconds[self._op] += now - self._at
            self._at = now
            return
        if moment.reported is not False:  # then only to what was still being computed
            now = min(now, 0.0 if self._working is None else self._clock.at(self._working.end))
        if now > self._at:
            self._append(self._piece(), now - self._at)
            self._at = now

    def _end(self, moment: float) -> None:
        """What remains counts to what was computed last."""
        rest = max(0.0, self._clock.at(moment) - self._at)
        if not self.seconds and rest:
            self._append(self._piece(), rest)
        elif self.seconds:
            self.seconds[next(reversed(self.seconds))] += rest

    def _append(self, op: Op, seconds: float) -> None:
        self.ops.append(op)
        self.seconds[op] = seconds

    def _piece(self) -> Op:
        """A piece of what is computed, or was last; before all, of what is computed first."""
        event = self._working or self._first
        return self._unique(Observed("work", "backward") if event is None else Observed(str(event.op), event.kind))

    def _unique(self, op: Op, kind: Kind = "backward") -> Op:
        """An operation under a name that the rank has not used yet."""
        if not isinstance(op, Observed) and op not in self.seconds:
            return op
        kind = op.kind if isinstance(op, Observed) else kind
        number = self._pieces[str(op), kind]
        self._pieces[str(op), kind] += 1
        return Observed(str(op), kind, number)


# ── the goal ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _goal(program: Program) -> TrainingStep:
    """How many stages and micro-batches there were, and which stages' gradients each bucket held."""
    computed = [half for ops in program.ranks for op in ops for half in halves(op)]
    stages = 1 + max((half.stage for half in computed), default=0)
    microbatches = 1 + max((half.microbatch for half in computed), default=0)
    ranges: dict[int, tuple[int, int]] = {}
    for ops in program.ranks:
        ranges |= _ranges(ops)
    summed = {bucket.index for _, bucket in program.bucket_sums()}
    if summed != ranges.keys() or summed != set(range(len(summed))):
        raise ProgramError("it is not clear which gradients were summed together")
    sharded = any(isinstance(op, Free) and isinstance(op.value, Parameters) for ops in program.ranks for op in ops)
    return TrainingStep(stages, microbatches, tuple(ranges[index] for index in range(len(ranges))), sharded=sharded)


def _ranges(ops: Sequence[Op]) -> dict[int, tuple[int, int]]:
    """The stages of each bucket: those whose last backward stands before it, and before no other one.

    Buckets that stand behind each other share what is computed before them, in order.
    """
    last: dict[int, int] = {}
    for place, op in enumerate(ops):
        last |= {half.stage: place for half in halves(op) if isinstance(half, Backward | BackwardWeight)}
    ended = {place: stage for stage, place in last.items()}
    ranges: dict[int, tuple[int, int]] = {}
    stages: list[int] = []
    buckets: list[int] = []

    def share() -> None:
        for number, bucket in enumerate(buckets):
            part = stages[number * len(stages) // len(buckets) : (number + 1) * len(stages) // len(buckets)]
            if part:
                ranges[bucket] = min(part), max(part) + 1
        if buckets:
            stages.clear()
            buckets.clear()

    for place, op in enumerate(ops):
        if place in ended:
            share()
            stages.append(ended[place])
        elif isinstance(op, AllReduce | ReduceScatter) and isinstance(op.value, Bucket):
            buckets.append(op.value.index)
    share()
    return ranges
