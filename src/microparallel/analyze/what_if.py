"""What would a step take if something were different? Each change is simulated on the recorded step."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from microparallel.analyze.compressed import Codec, compressed_steps
from microparallel.bench.messages import fit_line
from microparallel.program import (
    AllReduce,
    Bucket,
    Join,
    MeetingOp,
    Observed,
    Op,
    Send,
    TrainingStep,
    halves,
    is_meeting,
)
from microparallel.schedules import PIPELINES, build
from microparallel.simulator.fitted import Fitted, RecordedCosts, computes
from microparallel.simulator.gathering import PREFETCHES, Choice, choices_of
from microparallel.text import show_size
from microparallel.topology import Link
from microparallel.trace import kind_of


@dataclass(frozen=True)
class Change:
    """Something that could be different, and what the simulator makes of it.

    Attributes:
        name: in a word or two.
        advice: what to do for it, as an order; empty where nothing can be done, and it only shows a limit.
        seconds: how long the step would take.
        samples: how many times as many samples it would have.
        speed: how many times as many samples a second.
    """

    name: str
    advice: str
    seconds: float
    speed: float
    samples: float = 1.0


# What each kind of bottleneck may be helped by, in words that the table and the verdict share.
NO_COMMUNICATION, TWICE_THE_BANDWIDTH, OVERLAP = "no communication", "twice the bandwidth", "overlap"
HALF_BUCKETS, DOUBLE_BUCKETS, TWICE_THE_BATCH = "half the buckets", "double buckets", "twice the batch"
ALL_ALIKE, SHARES, TWICE_THE_SPEED = "no straggler", "fair shares", "cores twice as fast"
TWICE_THE_MICROBATCHES, NO_BUBBLE, NO_OTHER = "twice the micro-batches", "no bubble", "no data or Python"
COMPRESSED = "compress "  # and the method
PREFETCH, KEPT, LET_GO = tuple(f"prefetch {units}" for units in PREFETCHES), "parameters kept", "parameters let go"


def changes(
    fitted: Fitted, outside: float = 0.0, codecs: Sequence[Codec] = (), link: Link | None = None
) -> list[Change]:
    """All changes that mean something to this step.

    Args:
        fitted: the step.
        outside: seconds before and after the step; they grow with the samples, and no other change touches them.
        codecs: the methods by which gradients could be compressed, and what encoding costs on this machine.
        link: what a message costs, if that was measured beside the step.
    """
    base = fitted.makespan + outside
    if not base:
        return []
    found = _of_pipeline(fitted) if fitted.pipeline > 1 else _of_collectives(fitted)
    every = (*found, *_of_compression(fitted, codecs, link))
    with_all = ((name, advice, took + outside * samples, samples) for name, advice, took, samples in every)
    return [
        Change(name, advice, took, samples * base / took if took else 1.0, samples)
        for name, advice, took, samples in with_all
    ]


_Row = tuple[str, str, float, float]


def _of_compression(step: Fitted, codecs: Sequence[Codec], link: Link | None) -> Iterator[_Row]:
    for codec, compressed in compressed_steps(step, codecs, link):
        advice = f"compress gradients with {codec.method} (--compress, DataParallel(compress=…)), and watch the loss"
        yield f"{COMPRESSED}{codec.method}", advice, compressed.makespan, 1.0


def slowest_rank(step: Fitted) -> int:
    """The rank that works longest by itself."""
    return step.work.index(max(step.work))


def _without_communication(step: Fitted) -> Fitted:
    return step.scaled(lambda _, op: 1.0 if computes(op) else 0.0)


# ── data parallelism ────────────────────────────────────────────────────────────────────────────────────────────────


def _of_collectives(step: Fitted) -> Iterator[_Row]:
    yield TWICE_THE_SPEED, "", step.scaled(lambda _, op: 0.5 if computes(op) else 1.0).makespan, 1.0
    twice = step.scaled(lambda _, op: 2.0 if _grows(op) else 1.0)
    yield TWICE_THE_BATCH, "give each rank twice the samples (--batch)", twice.makespan, 2.0
    if step.program.world_size == 1:
        return
    slow = slowest_rank(step)
    yield ALL_ALIKE, f"find out what slows rank {slow} down", _without_straggler(step).makespan, 1.0
    yield SHARES, f"give rank {slow} fewer samples than the others", _fair_shares(step).makespan, 1.0
    if not step.collectives:
        return
    yield NO_COMMUNICATION, "", _without_communication(step).makespan, 1.0
    line = _Line(step)
    quicker = {op: line.at(size, bandwidth=2.0) for op, (_, size) in step.collectives.items()}
    advice = "use a faster transport or network"
    yield TWICE_THE_BANDWIDTH, advice, _with_seconds(step, quicker).makespan, 1.0
    if isinstance(step.program.goal, TrainingStep) and step.program.goal.sharded:
        yield from _of_units(step)
        return
    # With buckets of another size, what is summed has no names yet: it is a list of times, in order.
    buckets = gradient_sums(step)
    plain, renamed = _as_observed(step)
    sums = [renamed[op] for op in buckets]
    patient = _rewritten(plain, lambda rows: _without_waits(rows, sums))
    if patient.program != plain.program and _issued_during_work(plain, sums):
        advice = "let buckets travel while backward computes (DataParallel(overlap=True))"
        yield OVERLAP, advice, patient.makespan, 1.0
    if buckets:
        advice = "halve the buckets (bucket_cap_mb), so that communication begins sooner"
        yield HALF_BUCKETS, advice, _rewritten(plain, lambda rows: _halved(rows, sums, line)).makespan, 1.0
    if len(buckets) > 1:
        advice = "let gradients travel in buckets twice as large (--strategy ddp, bucket_cap_mb)"
        yield DOUBLE_BUCKETS, advice, _rewritten(plain, lambda rows: _merged(rows, sums, line)).makespan, 1.0


def _of_units(step: Fitted) -> Iterator[_Row]:
    """Other options of a step whose parameters are gathered on demand."""
    choices = choices_of(step)
    for choice in choices[1:]:
        name, advice = _named(choice, choices[0])
        # Simulated with these options it may take a little less or more than it took, and only the difference counts.
        yield name, advice, max(0.0, step.makespan + choice.seconds - choices[0].seconds), 1.0


def _named(choice: Choice, now: Choice) -> tuple[str, str]:
    """A choice's name, and the order to make it, with what it costs in memory."""
    costs = ""
    if choice.memory is not None and now.memory is not None and choice.memory != now.memory:
        more = choice.memory - now.memory
        costs = f", which takes {show_size(abs(more))} {'more' if more > 0 else 'less'} memory"
    if choice.overlap != now.overlap:
        return OVERLAP, f"gather and sum while units compute (overlap=True), if there are cores to spare for it{costs}"
    if choice.reshard_after_forward != now.reshard_after_forward:
        if choice.reshard_after_forward:
            return LET_GO, f"let parameters go after forward (reshard_after_forward=True){costs}"
        return KEPT, f"keep parameters after forward (reshard_after_forward=False){costs}"
    return PREFETCH[choice.prefetch], f"gather units {choice.prefetch} ahead (prefetch={choice.prefetch}){costs}"


def gradient_sums(step: Fitted) -> list[MeetingOp]:
    """The sums of gradients, in order: buckets; where no bucket has a name, all that was observed."""
    every = list(step.collectives)
    buckets: list[MeetingOp] = [op for op in every if isinstance(op, AllReduce) and isinstance(op.value, Bucket)]
    return buckets or [op for op in every if isinstance(op, Observed)]


def _grows(op: Op) -> bool:
    """Whether it takes longer with more samples: the optimizer does not, nor do messages."""
    return computes(op) and kind_of(op) != "optimizer"


def _without_straggler(step: Fitted) -> Fitted:
    """The slowest rank does its work as fast as the others on average."""
    slow, work = slowest_rank(step), step.work
    usual = statistics.fmean(seconds for rank, seconds in enumerate(work) if rank != slow)
    factor = usual / work[slow] if work[slow] else 1.0
    return step.scaled(lambda rank, op: factor if rank == slow and computes(op) else 1.0)


def _fair_shares(step: Fitted) -> Fitted:
    """Ranks have so many samples that all come to the optimizer at the same time, each as slow as it was."""
    ranks = enumerate(step.program.ranks)
    times = [sum(step.seconds(rank, op) for op in ops if _grows(op)) for rank, ops in ranks]
    if not all(times):
        return step
    # With shares s of the samples, s × time is the same for all, and the shares sum to what they were.
    same = len(times) / sum(1 / one for one in times)
    return step.scaled(lambda rank, op: same / times[rank] if _grows(op) else 1.0)


def _with_seconds(step: Fitted, seconds: dict[MeetingOp, float]) -> Fitted:
    """The same, with other times of what ranks do together."""
    changed = dict(step.costs.seconds)
    for rank, ops in enumerate(step.program.ranks):
        changed |= {(rank, op): seconds[op] for op in filter(is_meeting, ops)}
    return replace(step, costs=replace(step.costs, seconds=changed))


class _Line:
    """How long a collective of another size takes, or over faster links: by the line through those recorded."""

    def __init__(self, step: Fitted) -> None:
        points = [(int(size), seconds) for seconds, size in step.collectives.values()]
        total, took = sum(size for size, _ in points), sum(seconds for _, seconds in points)
        line = fit_line([(size, seconds) for size, seconds in points if seconds > 0])
        self._latency, self._per_byte = line if line is not None else (0.0, took / total if total else 0.0)
        # What the line is off by: its times for what was recorded must sum to what they took.
        by_line = sum(self.at(size) for size, _ in points)
        self._off = took / by_line if by_line else 1.0

    def at(self, size: float, bandwidth: float = 1.0) -> float:
        """By the line itself."""
        return self._latency + size * self._per_byte / bandwidth

    def as_long(self, size: float) -> float:
        """Less what it is off by."""
        return self.at(size) * self._off


# ── another order ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Timed:
    """An operation of a rank, with its cost."""

    op: Op
    seconds: float = 0.0
    bytes: float = 0.0


def _rewritten(step: Fitted, change: Callable[[list[_Timed]], list[_Timed]]) -> Fitted:
    """The step in which every rank's list is another one."""
    costs, ranks = step.costs, []
    for rank, ops in enumerate(step.program.ranks):
        keys = [(rank, op) for op in ops]
        ranks.append(change([_Timed(key[1], step.seconds(*key), costs.exchanged.get(key, 0.0)) for key in keys]))
    everything = [(rank, row) for rank, rows in enumerate(ranks) for row in rows]
    program = replace(step.program, ranks=tuple(tuple(row.op for row in rows) for rows in ranks))
    seconds = {(rank, row.op): row.seconds for rank, row in everything}
    return Fitted(
        program, RecordedCosts(seconds=seconds, exchanged={(rank, row.op): row.bytes for rank, row in everything})
    )


def _as_observed(step: Fitted) -> tuple[Fitted, dict[MeetingOp, Observed]]:
    """The same step, in which no operation needs a sum by its name: the optimizer waits for all sums."""
    names = {op: Observed(str(op), "collective", 2 * number) for number, op in enumerate(step.collectives)}

    def rename(rows: list[_Timed]) -> list[_Timed]:
        renamed = []
        for row in rows:
            if kind_of(row.op) == "optimizer":
                renamed.append(_Timed(Join()))
            renamed.append(replace(row, op=names[row.op]) if is_meeting(row.op) else row)
        return renamed

    assert isinstance(step.program.goal, TrainingStep)
    without = replace(step.program, goal=replace(step.program.goal, buckets=()))
    return _rewritten(replace(step, program=without), rename), names


def _without_waits(rows: list[_Timed], sums: Sequence[Op]) -> list[_Timed]:
    """A rank waits for no sum of gradients before the last."""
    places = [place for place, row in enumerate(rows) if row.op in sums]
    between = {place for first, second in pairwise(places) for place in range(first, second)}
    alone = {place for place in between if isinstance(rows[place].op, Join) and _latest(rows[:place]) in sums}
    return [row for place, row in enumerate(rows) if place not in alone]


def _latest(rows: Sequence[_Timed]) -> Op | None:
    return next((row.op for row in reversed(rows) if is_meeting(row.op)), None)


def _issued_during_work(step: Fitted, sums: Sequence[Op]) -> bool:
    """Whether there is work between sums of gradients, which they could hide behind."""
    for rank, ops in enumerate(step.program.ranks):
        places = [place for place, op in enumerate(ops) if op in sums]
        between = ops[places[0] : places[-1]] if places else ()
        if sum(step.seconds(rank, op) for op in between if computes(op)) > 0.05 * step.work[rank]:
            return True
    return False


def _halved(rows: list[_Timed], sums: Sequence[Op], line: _Line) -> list[_Timed]:
    """Each sum in two: the first half leaves when half of the backward before it is done."""
    at_once = _waits_at_once(rows, sums)
    result: list[_Timed] = []
    begun = 0  # behind what communication was last
    for row in rows:
        if row.op in sums and isinstance(row.op, Observed):
            half = replace(row, seconds=line.as_long(row.bytes / 2), bytes=row.bytes / 2)
            first = replace(half, op=replace(row.op, number=row.op.number + 1))
            place = _cut_in_half(result, begun, row.op.number)
            result[place:place] = [first, _Timed(Join())] if at_once else [first]
            row = half  # noqa: PLW2901
        result.append(row)
        if not computes(row.op) or isinstance(row.op, Join):
            begun = len(result)
    return result


def _cut_in_half(rows: list[_Timed], begun: int, number: int) -> int:
    """The place in the middle of the backward since `begun`; what is computed there becomes two."""
    left = sum(row.seconds for row in rows[begun:] if kind_of(row.op) == "backward") / 2
    for place in range(begun, len(rows)):
        row = rows[place]
        if kind_of(row.op) != "backward":
            continue
        if left < row.seconds:
            before = _Timed(Observed(f"half of {row.op}", "backward", number), left)
            rows[place : place + 1] = [before, replace(row, seconds=row.seconds - left)]
            return place + 1
        left -= row.seconds
    return len(rows)


def _waits_at_once(rows: Sequence[_Timed], sums: Sequence[Op]) -> bool:
    """Whether a rank waits for each sum as soon as it has asked for it."""
    behind = [second.op for first, second in pairwise([*rows, _Timed(Join())]) if first.op in sums]
    return all(isinstance(op, Join) for op in behind)


def _merged(rows: list[_Timed], sums: Sequence[Op], line: _Line) -> list[_Timed]:
    """Two neighbours as one, which leaves when the second did."""
    partner = dict(zip(sums[1::2], sums[::2], strict=False))
    first = set(partner.values())
    sizes = {row.op: row.bytes for row in rows}
    result = []
    for place, row in enumerate(rows):
        if row.op in first or (isinstance(row.op, Join) and _latest(rows[:place]) in first):
            continue
        if row.op in sums:
            size = row.bytes + (sizes.get(partner[row.op], 0.0) if row.op in partner else 0.0)
            row = replace(row, seconds=line.as_long(size), bytes=size)  # noqa: PLW2901
        result.append(row)
    return result


# ── pipelines ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _of_pipeline(pipe: Fitted) -> Iterator[_Row]:
    yield TWICE_THE_SPEED, "", pipe.scaled(lambda _, op: 0.5 if computes(op) else 1.0).makespan, 1.0
    yield NO_COMMUNICATION, "", _without_communication(pipe).makespan, 1.0
    advice = "use a faster transport or network"
    yield TWICE_THE_BANDWIDTH, advice, pipe.scaled(lambda _, op: 1.0 if computes(op) else 0.5).makespan, 1.0
    slow = slowest_rank(pipe)
    yield ALL_ALIKE, f"move layers away from rank {slow} (--balance time)", _balanced(pipe).makespan, 1.0
    yield NO_BUBBLE, "", pipe.makespan - bubble_of(pipe), 1.0
    if (more := _more_microbatches(pipe)) is not None:
        yield TWICE_THE_MICROBATCHES, "cut the batch into twice as many (--microbatches)", more, 1.0


def bubble_of(pipe: Fitted) -> float:
    """How long ranks are idle by the schedule alone: with stages all alike, and messages that take no time."""
    ideal = _balanced(pipe).scaled(lambda _, op: 1.0 if halves(op) else 0.0)
    return max(0.0, ideal.makespan - max(ideal.work))


def _balanced(pipe: Fitted) -> Fitted:
    """Every rank's stages compute as long as the mean of all."""
    work = pipe.work
    mean = statistics.fmean(work)
    return pipe.scaled(lambda rank, op: mean / work[rank] if halves(op) and work[rank] else 1.0)


def _more_microbatches(pipe: Fitted) -> float | None:
    """The step with twice as many micro-batches, each of half the samples, where its schedule is one that is known."""
    first = [[op for op in ops if halves(op)] for ops in pipe.program.ranks[: pipe.pipeline]]
    microbatches = 1 + max(half.microbatch for ops in first for op in ops for half in halves(op))
    name = _schedule_of(first, microbatches)
    if name is None:
        return None
    means = _means(pipe)

    def of(count: int, share: float) -> float:
        program = build(name, len(first), count)
        seconds = {(rank, op): means.get(_key(op), 0.0) * share for rank, ops in enumerate(program.ranks) for op in ops}
        return Fitted(program, RecordedCosts(seconds=seconds)).makespan

    # Means are not what was recorded, and what comes after the schedule stays as it is: so only the difference counts.
    return max(0.0, pipe.makespan + of(2 * microbatches, 0.5) - of(microbatches, 1.0))


def _key(op: Op) -> tuple[type, tuple[int, ...]]:
    """What takes equally long: the same of the same stages, and all messages."""
    return type(op), tuple(half.stage for half in halves(op))


def _means(pipe: Fitted) -> dict[tuple[type, tuple[int, ...]], float]:
    found: dict[tuple[type, tuple[int, ...]], list[float]] = {}
    for (_, op), seconds in pipe.costs.seconds.items():
        if halves(op) or isinstance(op, Send):
            found.setdefault(_key(op), []).append(seconds)
    return {key: statistics.fmean(seconds) for key, seconds in found.items()}


def _schedule_of(computations: Sequence[Sequence[Op]], microbatches: int) -> str | None:
    """The name of the schedule that has these computations in this order."""
    for name in PIPELINES:
        candidate = build(name, len(computations), microbatches)
        if [[op for op in ops if halves(op)] for ops in candidate.ranks] == list(computations):
            return name
    return None
