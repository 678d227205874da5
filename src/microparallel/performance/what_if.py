"""What would a step take if something were different? Each change is simulated on the recorded step."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from microparallel.performance.fit import fit_line
from microparallel.performance.fitted_pipeline import FittedPipeline, with_update
from microparallel.performance.fitted_step import Fitted, FittedStep, RankWork
from microparallel.program import Named, Op, OptimizerStep, Value, halves
from microparallel.schedules import PIPELINES, build


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


def changes(fitted: Fitted, outside: float = 0.0) -> list[Change]:
    """All changes that mean something to this step.

    Args:
        fitted: the step.
        outside: seconds before and after it that nothing changes, but for more samples.
    """
    base = fitted.makespan + outside
    if not base:
        return []
    found = _of_pipeline(fitted) if isinstance(fitted, FittedPipeline) else _of_collectives(fitted)
    with_all = ((name, advice, took + outside * samples, samples) for name, advice, took, samples in found)
    return [
        Change(name, advice, took, samples * base / took if took else 1.0, samples)
        for name, advice, took, samples in with_all
    ]


_Row = tuple[str, str, float, float]


# ── data parallelism ────────────────────────────────────────────────────────────────────────────────────────────────


def _of_collectives(step: FittedStep) -> Iterator[_Row]:
    ranks = len(step.work)
    yield TWICE_THE_SPEED, "", replace(step, work=tuple(one.times(0.5) for one in step.work)).makespan, 1.0
    yield TWICE_THE_BATCH, "give each rank twice the samples (--batch)", _twice_the_batch(step).makespan, 2.0
    if ranks == 1:
        return
    slow = slowest_rank(step)
    yield ALL_ALIKE, f"find out what slows rank {slow} down", _without_straggler(step).makespan, 1.0
    yield SHARES, f"give rank {slow} fewer samples than the others", _fair_shares(step).makespan, 1.0
    if not step.seconds:
        return
    yield NO_COMMUNICATION, "", replace(step, seconds=(0.0,) * len(step.seconds)).makespan, 1.0
    quicker = replace(step, seconds=_resized(step, step.bytes, bandwidth=2.0))
    yield TWICE_THE_BANDWIDTH, "use a faster transport or network", quicker.makespan, 1.0
    if any(any(work.waits[:-1]) for work in step.work) and _issued_during_work(step):
        advice = "let buckets travel while backward computes (DataParallel(overlap=True))"
        yield OVERLAP, advice, _overlapped(step).makespan, 1.0
    yield (
        HALF_BUCKETS,
        "halve the buckets (bucket_mb), so that communication begins sooner",
        _halved(step).makespan,
        1.0,
    )
    if len(step.seconds) > 1:
        yield (
            DOUBLE_BUCKETS,
            "let gradients travel in buckets twice as large (--strategy ddp, bucket_mb)",
            _merged(step).makespan,
            1.0,
        )


def slowest_rank(step: FittedStep) -> int:
    """The rank that works longest by itself."""
    totals = [work.total for work in step.work]
    return totals.index(max(totals))


def _without_straggler(step: FittedStep) -> FittedStep:
    """The slowest rank does its work as fast as the others on average."""
    slow = slowest_rank(step)
    usual = statistics.fmean(work.total for rank, work in enumerate(step.work) if rank != slow)
    factor = usual / step.work[slow].total if step.work[slow].total else 1.0
    quick = step.work[slow].times(factor)
    return replace(step, work=tuple(quick if rank == slow else work for rank, work in enumerate(step.work)))


def _fair_shares(step: FittedStep) -> FittedStep:
    """Ranks have so many samples that all come to the optimizer at the same time, each as slow as it was."""
    times = [work.total - work.last for work in step.work]
    if not all(times):
        return step
    # With shares s of the samples, s × time is the same for all, and the shares sum to what they were.
    same = len(times) / sum(1 / one for one in times)
    shared = zip(step.work, times, strict=True)
    return replace(step, work=tuple(replace(work.times(same / one), last=work.last) for work, one in shared))


def _twice_the_batch(step: FittedStep) -> FittedStep:
    """Forward and backward take twice as long; the optimizer, and all messages, as long as before."""
    return replace(step, work=tuple(replace(work.times(2), last=work.last) for work in step.work))


def _issued_during_work(step: FittedStep) -> bool:
    """Whether there is work between collectives, which they could hide behind."""
    return any(sum(work.before[1:]) > 0.05 * work.total for work in step.work)


def _overlapped(step: FittedStep) -> FittedStep:
    def patient(work: RankWork) -> RankWork:
        return replace(work, waits=(*(False for _ in work.waits[1:]), True))

    return replace(step, work=tuple(patient(work) for work in step.work))


def _resized(step: FittedStep, sizes: Sequence[float], bandwidth: float = 1.0) -> tuple[float, ...]:
    """How long collectives of other sizes take, or over faster links: by the line through those that were recorded."""
    line = fit_line([(size, seconds) for size, seconds in zip(step.bytes, step.seconds, strict=True) if seconds > 0])
    known = sum(step.seconds) / sum(step.bytes) if sum(step.bytes) else 0.0
    latency, per_byte = line if line is not None else (0.0, known)
    return tuple(latency + size * per_byte / bandwidth for size in sizes)


def _as_fitted(step: FittedStep) -> FittedStep:
    """The step with times from the line, which changed sizes are compared with."""
    return replace(step, seconds=_resized(step, step.bytes))


def _halved(step: FittedStep) -> FittedStep:
    """Each collective in two: the first half leaves when half of its work is done."""
    seconds = [one for one in _resized(step, [size / 2 for size in step.bytes]) for _ in range(2)]

    def split(work: RankWork) -> RankWork:
        return replace(
            work,
            before=tuple(one / 2 for one in work.before for _ in range(2)),
            after=tuple(one for after in work.after for one in (0.0, after)),
            waits=tuple(one for wait in work.waits for one in (_at_once(work), wait)),
        )

    halves_of = tuple(size // 2 for size in step.bytes for _ in range(2))
    return _scaled_like(step, FittedStep(tuple(split(work) for work in step.work), tuple(seconds), halves_of))


def _at_once(work: RankWork) -> bool:
    """Whether a rank waits for each collective as soon as it has issued it."""
    return all(work.waits) and not any(work.after)


def _merged(step: FittedStep) -> FittedStep:
    """Two neighbours as one, which leaves when the second did."""
    pairs = [slice(first, first + 2) for first in range(0, len(step.seconds), 2)]
    sizes = tuple(sum(step.bytes[pair]) for pair in pairs)

    def join(work: RankWork) -> RankWork:
        inner = [sum(work.after[pair][:-1]) for pair in pairs]
        return replace(
            work,
            before=tuple(sum(work.before[pair]) + more for pair, more in zip(pairs, inner, strict=True)),
            after=tuple(work.after[pair][-1] for pair in pairs),
            waits=tuple(work.waits[pair][-1] for pair in pairs),
        )

    return _scaled_like(step, FittedStep(tuple(join(work) for work in step.work), _resized(step, sizes), sizes))


def _scaled_like(step: FittedStep, changed: FittedStep) -> FittedStep:
    """Take out what the line is off by: its times for what was recorded must sum to what they took."""
    by_line = sum(_as_fitted(step).seconds)
    factor = sum(step.seconds) / by_line if by_line else 1.0
    return replace(changed, seconds=tuple(one * factor for one in changed.seconds))


# ── pipelines ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _of_pipeline(pipe: FittedPipeline) -> Iterator[_Row]:
    halved = {key: seconds / 2 for key, seconds in pipe.times.items()}
    yield TWICE_THE_SPEED, "", replace(pipe, times=halved).makespan, 1.0
    yield NO_COMMUNICATION, "", pipe.with_messages(0.0).makespan, 1.0
    advice = "use a faster transport or network"
    yield TWICE_THE_BANDWIDTH, advice, pipe.with_messages(0.5).makespan, 1.0
    slow = busiest(pipe)
    yield ALL_ALIKE, f"move layers away from rank {slow} (--balance time)", _balanced(pipe).makespan, 1.0
    yield NO_BUBBLE, "", pipe.makespan - bubble_of(pipe), 1.0
    if (more := _more_microbatches(pipe)) is not None:
        yield TWICE_THE_MICROBATCHES, "cut the batch into twice as many (--microbatches)", more, 1.0


def work_of(pipe: FittedPipeline) -> list[float]:
    """How long each rank's stages compute, in seconds."""
    return [
        sum(pipe.times.get((rank, op), 0.0) for op in ops if halves(op)) for rank, ops in enumerate(pipe.program.ranks)
    ]


def bubble_of(pipe: FittedPipeline) -> float:
    """How long ranks are idle by the schedule alone: with stages all alike, and messages that take no time."""
    balanced = _balanced(pipe).with_messages(0.0)
    ideal = replace(balanced, times={key: seconds for key, seconds in balanced.times.items() if halves(key[1])})
    return max(0.0, ideal.makespan - max(work_of(ideal)))


def busiest(pipe: FittedPipeline) -> int:
    """The rank that computes longest."""
    work = work_of(pipe)
    return work.index(max(work))


def _balanced(pipe: FittedPipeline) -> FittedPipeline:
    """Every rank's stages compute as long as the mean of all."""
    work = work_of(pipe)
    mean = statistics.fmean(work)

    def seconds(rank: int, op: Op) -> float:
        return pipe.times[rank, op] * (mean / work[rank] if halves(op) and work[rank] else 1)

    return replace(pipe, times={key: seconds(*key) for key in pipe.times})


def _more_microbatches(pipe: FittedPipeline) -> float | None:
    """The step with twice as many micro-batches, each of half the samples, where its schedule is one that is known."""
    microbatches, ranks = pipe.shift
    first = [[op for op in ops if halves(op)] for ops in pipe.program.ranks[:ranks]]
    name = _schedule_of(first, microbatches)
    if name is None:
        return None
    means = _means(pipe)
    sums: dict[Value, float] = {value: seconds for value, seconds in pipe.messages.items() if isinstance(value, Named)}

    def of(count: int, share: float) -> float:
        program = with_update(build(name, ranks, count), summed=bool(sums))
        times = {
            (rank, op): means[_key(op)] * share if halves(op) else pipe.times.get((rank, op), 0.0)
            for rank, ops in enumerate(program.ranks)
            for op in ops
            if halves(op) or isinstance(op, OptimizerStep)
        }
        return FittedPipeline(program, times, pipe.message * share, sums).makespan

    # Means are not what was recorded, so only the ratio counts.
    now = of(microbatches, 1.0)
    return pipe.makespan * of(2 * microbatches, 0.5) / now if now else None


def _key(op: Op) -> tuple[type, tuple[int, ...]]:
    return type(op), tuple(half.stage for half in halves(op))


def _means(pipe: FittedPipeline) -> dict[tuple[type, tuple[int, ...]], float]:
    found: dict[tuple[type, tuple[int, ...]], list[float]] = {}
    for (_, op), seconds in pipe.times.items():
        found.setdefault(_key(op), []).append(seconds)
    return {key: statistics.fmean(seconds) for key, seconds in found.items()}


def _schedule_of(computations: Sequence[Sequence[Op]], microbatches: int) -> str | None:
    """The name of the schedule that has these computations in this order."""
    for name in PIPELINES:
        candidate = build(name, len(computations), microbatches)
        if [[op for op in ops if halves(op)] for ops in candidate.ranks] == list(computations):
            return name
    return None
