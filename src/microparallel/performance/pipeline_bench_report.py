"""What the measured steps of pipelines say: how near each is to the ideal, and to torch's same schedule."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from microparallel.performance.caveats import chance_speaks, cores_are_shared, quartiles
from microparallel.performance.pipeline_bench import Look, Measurements, Timing
from microparallel.performance.utilisation import Shares
from microparallel.schedules import build
from microparallel.simulator import simulate
from microparallel.trace import Trace


@dataclass(frozen=True)
class Row:
    """One schedule, run by us or by torch: times in seconds; what only our pipelines tell is None for torch's."""

    schedule: str
    by_torch: bool
    label: str
    counted: int
    seconds: float  # the median
    lower_quartile: float
    upper_quartile: float
    fastest: float
    slowest: float
    ideal_seconds: float  # the measured stage times, simulated without communication
    ratio_to_ideal: float
    ratio_to_torch: float | None  # None where torch has no such schedule
    bubble: float | None
    ideal_bubble: float
    activations: tuple[int, ...] | None  # the most at once, of each rank
    activations_of_program: tuple[int, ...]
    saved_bytes: tuple[int, ...]  # for backward: the most at once, of each rank
    shares: tuple[Shares, ...] | None  # of each rank
    loss_apart: float  # from that of a single process
    gradient_apart: float


@dataclass(frozen=True)
class Against:
    """Is zb-h1 faster than 1f1b: in theory, and here?"""

    simulated: tuple[float, float]  # seconds of zb-h1, and of 1f1b
    measured: tuple[float, float]


@dataclass(frozen=True)
class Formula:
    """The textbook's ideal for gpipe and 1f1b, where all stages take equally long."""

    compute_seconds: float  # of all micro-batches, on the busiest rank, without a message
    seconds: float  # × (m + p − 1) / m
    ratios: dict[str, float]  # of the schedules that it is for


@dataclass(frozen=True)
class Report:
    """All rows, torch's below ours of the same name."""

    measurements: Measurements
    rows: list[Row]
    formula: Formula | None
    zero_bubble: Against | None
    notes: list[str]


def report_on(measurements: Measurements) -> Report:
    """Work out everything that follows from what was measured."""
    ideals = {schedule: ideal_of(schedule, look, measurements) for schedule, look in measurements.looks.items()}
    schedules = list(measurements.looks)
    timings = sorted(measurements.timings, key=lambda one: (schedules.index(one.method.schedule), one.method.by_torch))
    rows = [_row(timing, ideals[timing.method.schedule], measurements) for timing in timings]
    ours = {row.schedule: row for row in rows if not row.by_torch}
    return Report(measurements, rows, _formula(ours, measurements), _zero_bubble(ours), _notes(measurements, rows))


def ideal_of(schedule: str, look: Look, measurements: Measurements) -> Trace:
    """What the simulator makes of the measured stage times, if messages took no time."""
    program = build(schedule, measurements.ranks, measurements.microbatches)
    return simulate(program, look.stage_times.costs)


def _row(timing: Timing, ideal: Trace, measurements: Measurements) -> Row:
    method, look = timing.method, measurements.looks[timing.method.schedule]
    torchs = [
        statistics.median(other.seconds)
        for other in measurements.timings
        if other.method.by_torch and other.method.schedule == method.schedule
    ]
    lower, seconds, upper = quartiles(timing.seconds)
    return Row(
        schedule=method.schedule,
        by_torch=method.by_torch,
        label=method.label,
        counted=len(timing.seconds),
        seconds=seconds,
        lower_quartile=lower,
        upper_quartile=upper,
        fastest=min(timing.seconds),
        slowest=max(timing.seconds),
        ideal_seconds=ideal.makespan,
        ratio_to_ideal=seconds / ideal.makespan,
        ratio_to_torch=seconds / torchs[0] if torchs else None,
        bubble=None if method.by_torch else look.bubble,
        ideal_bubble=ideal.bubble_fraction,
        activations=None if method.by_torch else look.activations,
        activations_of_program=look.activations_of_program,
        saved_bytes=timing.saved_bytes,
        shares=None if method.by_torch else look.shares,
        loss_apart=timing.apart.loss,
        gradient_apart=timing.apart.gradient,
    )


def _formula(ours: dict[str, Row], measurements: Measurements) -> Formula | None:
    named = [name for name in ("gpipe", "1f1b") if name in ours]
    if not named:
        return None
    count = measurements.microbatches
    one = measurements.looks[named[0]].stage_times.busiest_rank
    ideal = one * (count + measurements.ranks - 1)
    return Formula(one * count, ideal, {name: ours[name].seconds / ideal for name in named})


def _zero_bubble(ours: dict[str, Row]) -> Against | None:
    if not {"zb-h1", "1f1b"} <= set(ours):
        return None
    split, whole = ours["zb-h1"], ours["1f1b"]
    return Against((split.ideal_seconds, whole.ideal_seconds), (split.seconds, whole.seconds))


def _notes(measurements: Measurements, rows: list[Row]) -> list[str]:
    """What a reader must know about these numbers."""
    notes = [f"torch refuses {schedule}: {reason}" for schedule, reason in measurements.refused.items()]
    for row in rows:
        if row.activations not in (None, row.activations_of_program):
            notes.append(
                f"{row.schedule} held {row.activations} activations on its ranks, and its program "
                f"{row.activations_of_program}"
            )
    notes += chance_speaks(measurements.model, rows[0].counted)
    return notes + cores_are_shared(measurements.ranks_here, measurements.cores, measurements.device)
