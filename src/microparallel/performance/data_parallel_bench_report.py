"""What the measured steps of data parallelism say: what synchronising costs, and which bucket size costs least."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from microparallel.performance.caveats import chance_speaks, cores_are_shared, quartiles
from microparallel.performance.data_parallel_bench import Measurements, Result, Timing
from microparallel.performance.data_parallel_bench_methods import DDP, NONE, TORCH_DDP


@dataclass(frozen=True)
class Row:
    """One method on one model: times in seconds."""

    model: str
    method: str
    bucket_mb: float | None
    label: str  # both, for people
    counted: int
    seconds: float  # the median
    lower_quartile: float
    upper_quartile: float
    fastest: float
    slowest: float
    seconds_minus_none: float  # the exposed communication, and what arranging it costs
    ratio_to_none: float
    ratio_to_torch_ddp: float
    apart_from_torch_ddp: float  # at the end, as a part of the way that one has come


@dataclass(frozen=True)
class Report:
    """All rows, model by model."""

    measurements: Measurements
    rows: list[Row]
    best_bucket_mb: dict[str, float]  # of ddp, for each model that has a choice
    notes: list[str]


def report_on(measurements: Measurements) -> Report:
    """Work out everything that follows from the measured times."""
    rows = [_row(timing, result) for result in measurements.results for timing in result.timings]
    best = {result.model: found for result in measurements.results if (found := _best_bucket(rows, result)) is not None}
    return Report(measurements, rows, best, _notes(measurements))


def rows_of(report: Report, result: Result) -> list[Row]:
    """Those of one model."""
    return [row for row in report.rows if row.model == result.model]


def _row(timing: Timing, result: Result) -> Row:
    medians = {other.method.name: statistics.median(other.seconds) for other in result.timings}
    lower, seconds, upper = quartiles(timing.seconds)
    return Row(
        model=result.model,
        method=timing.method.name,
        bucket_mb=timing.method.bucket_mb,
        label=timing.method.label,
        counted=len(timing.seconds),
        seconds=seconds,
        lower_quartile=lower,
        upper_quartile=upper,
        fastest=min(timing.seconds),
        slowest=max(timing.seconds),
        seconds_minus_none=seconds - medians[NONE],
        ratio_to_none=seconds / medians[NONE],
        ratio_to_torch_ddp=seconds / medians[TORCH_DDP],
        apart_from_torch_ddp=timing.apart,
    )


def _best_bucket(rows: list[Row], result: Result) -> float | None:
    """The bucket size with the fastest step; None where there was nothing to choose from."""
    sizes = {row.bucket_mb: row.seconds for row in rows if row.model == result.model and row.method == DDP}
    return min(sizes, key=lambda size: sizes[size]) if len(sizes) > 1 else None


def _notes(measurements: Measurements) -> list[str]:
    """What a reader must know about these numbers."""
    notes = []
    for result in measurements.results:
        notes += chance_speaks(result.model, len(result.timings[0].seconds))
    return notes + cores_are_shared(measurements.ranks_here, measurements.cores, measurements.device)
