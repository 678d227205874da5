"""What the measured times of an all-reduce say: bandwidths, ratios, and how well they were predicted."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from itertools import groupby

from microparallel.collectives import ALL_REDUCES, all_reduce_program
from microparallel.performance.all_reduce_bench import Measurements, Timing
from microparallel.performance.fit import MessageCosts, fit_messages, typical_factor
from microparallel.performance.methods import ADD, BOUNDS, TORCH
from microparallel.performance.time_budget import FEWEST_REPEATS
from microparallel.program import Program
from microparallel.simulator import Costs, simulate
from microparallel.text import count, show_size


@dataclass(frozen=True)
class Row:
    """One method at one size: times in seconds, bandwidths in bytes a second, None where there is nothing to say."""

    algorithm: str  # or another method
    label: str  # the same for people
    size: int
    repeats: int
    seconds: float | None = None  # the median
    lower_quartile: float | None = None
    upper_quartile: float | None = None
    fastest: float | None = None
    slowest: float | None = None
    algorithm_bandwidth: float | None = None
    bus_bandwidth: float | None = None
    messages_sent: list[int] | None = None  # by each rank; nobody knows those of torch's own
    bytes_sent: list[float] | None = None
    ratio_to_torch: float | None = None
    bound_seconds: float | None = None  # what memory alone would take; known where ranks share it
    share_of_bound: float | None = None  # that, divided by what it took
    predicted_seconds: float | None = None
    predicted_over_measured: float | None = None
    left_out: str | None = None  # the reason


@dataclass(frozen=True)
class Report:
    """All rows, from small sizes to large, and the costs that were fitted to them."""

    measurements: Measurements
    rows: list[Row]
    bounds: list[Row]  # no all-reduces: what limits them
    costs: MessageCosts | None
    typical_factor: float | None  # by which predictions are off, in either direction
    notes: list[str]


def report_on(measurements: Measurements) -> Report:
    """Work out everything that follows from the measured times."""
    costs = _fit(measurements)
    every = [
        _row(timing, measurements, costs, _medians_at(timing.size, measurements))
        for timing in measurements.timings
        if timing.method != ADD
    ]
    rows = [row for row in every if row.algorithm not in BOUNDS.values()]
    bounds = [row for row in every if row.algorithm in BOUNDS.values()]
    pairs = [(row.predicted_seconds, row.seconds) for row in rows if row.predicted_seconds and row.seconds]
    factor = typical_factor(pairs) if pairs else None
    return Report(measurements, rows, bounds, costs, factor, _notes(measurements, rows, costs))


def median(timing: Timing) -> float:
    """The time of a call that half of the calls stay below."""
    return statistics.median(timing.seconds)


def bus_bandwidth(size: float, seconds: float, ranks: int) -> float:
    """The bytes a second that each rank's connection would carry, had the all-reduce sent no byte too many.

    Every rank must send and receive at least 2(p−1)/p times the tensor, so this number, the convention of nccl-tests,
    compares algorithms and numbers of ranks with each other and with what the hardware can do.
    """
    return size / seconds * 2 * (ranks - 1) / ranks


def _medians_at(size: int, measurements: Measurements) -> dict[str, float]:
    return {timing.method: median(timing) for timing in measurements.timings if timing.size == size and timing.seconds}


def _fit(measurements: Measurements) -> MessageCosts | None:
    """Fit the costs of a message over this run's transport, so to the algorithms alone: they all went that way."""
    measured: list[tuple[Program, int, float]] = []
    adds: list[tuple[int, float]] = []
    for timing in measurements.timings:
        if timing.method == ADD and timing.seconds:
            adds.append((timing.size, median(timing)))
        elif timing.method in ALL_REDUCES and timing.seconds:
            program = all_reduce_program(timing.method, measurements.ranks)
            measured.append((program, timing.size, median(timing)))
    return fit_messages(measured, adds)


def _row(timing: Timing, measurements: Measurements, costs: MessageCosts | None, medians: dict[str, float]) -> Row:
    row = Row(timing.method, _label(timing.method, measurements), timing.size, len(timing.seconds))
    row = replace(row, left_out=timing.left_out)
    if timing.method in ALL_REDUCES:
        program = all_reduce_program(timing.method, measurements.ranks)
        row = replace(
            row,
            messages_sent=program.messages_sent(),
            bytes_sent=simulate(program, Costs(bytes_per_value=timing.size)).bytes_sent,
            predicted_seconds=None if costs is None else costs.predict(program, timing.size),
        )
    return _with_times(row, timing.seconds, measurements.ranks, medians) if timing.seconds else row


def _with_times(row: Row, calls: tuple[float, ...], ranks: int, medians: dict[str, float]) -> Row:
    seconds = statistics.median(calls)
    lower, upper = _quartiles(calls)
    bound = medians.get(BOUNDS.get(row.algorithm, ""))
    return replace(
        row,
        seconds=seconds,
        lower_quartile=lower,
        upper_quartile=upper,
        fastest=min(calls),
        slowest=max(calls),
        algorithm_bandwidth=row.size / seconds,
        bus_bandwidth=bus_bandwidth(row.size, seconds, ranks),
        ratio_to_torch=seconds / medians[TORCH],
        bound_seconds=bound,
        share_of_bound=None if bound is None else bound / seconds,
        predicted_over_measured=None if row.predicted_seconds is None else row.predicted_seconds / seconds,
    )


def _label(method: str, measurements: Measurements) -> str:
    """What people call a method: where ranks share memory, torch's own does not, and runs beside."""
    return "torch on gloo" if method == TORCH and measurements.transport == "shm" else method


def _quartiles(seconds: tuple[float, ...]) -> tuple[float, float]:
    """Half of the calls took at least the first and at most the second."""
    if len(seconds) == 1:
        return seconds[0], seconds[0]
    lower, _, upper = statistics.quantiles(seconds, n=4, method="inclusive")
    return lower, upper


def _notes(measurements: Measurements, rows: list[Row], costs: MessageCosts | None) -> list[str]:
    """What a reader must know about these numbers."""
    notes = [f"{row.label} at {show_size(row.size)} was left out: {row.left_out}" for row in rows if row.left_out]
    for size, same_size in groupby(rows, key=lambda row: row.size):
        notes += _few_calls(show_size(size), list(same_size))
    if measurements.ranks_here > measurements.cores and measurements.device == "cpu":
        cores = count(measurements.cores, "core")
        note = f"{measurements.ranks_here} ranks share {cores} and take turns: times say more about that than about "
        note += "the methods" if costs is None else "the algorithms, and the model behind the predictions gives each "
        notes.append(note + ("" if costs is None else "rank a core of its own"))
    if costs is None and measurements.ranks > 1 and any(row.algorithm in ALL_REDUCES for row in rows):
        notes.append("no latency and bandwidth were fitted: that takes at least one algorithm and two sizes")
    return notes


def _few_calls(size: str, rows: list[Row]) -> list[str]:
    """Name the methods that were called so few times that chance speaks loudly."""
    notes = []
    measured = [row for row in rows if row.repeats]
    for repeats in sorted({row.repeats for row in measured if row.repeats < FEWEST_REPEATS}):
        few = [row.label for row in measured if row.repeats == repeats]
        which = "each method was" if len(few) == len(measured) else f"{', '.join(few)} {'were' if few[1:] else 'was'}"
        notes.append(
            f"at {size} {which} called {repeats}×, so chance speaks loudly; more --seconds or --repeats would help"
        )
    return notes
