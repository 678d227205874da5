"""What the measured times of an all-reduce say: bandwidths, ratios, and how well they were predicted."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from microparallel import __version__
from microparallel.bench.all_reduce import ADD, BOUNDS, TORCH, TORCH_ON_SHM, Measurements, Timing
from microparallel.bench.chart import Line, Panel, Point, draw_chart
from microparallel.bench.engine import FEWEST_REPEATS, calls_in_a_row
from microparallel.bench.messages import MessageCosts, fit_messages, typical_factor
from microparallel.collectives import ALL_REDUCES, all_reduce_program
from microparallel.program import Program
from microparallel.simulator import Costs, simulate
from microparallel.text import count, show_number, show_seconds, show_size, time_unit


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


# The picture of an all-reduce benchmark: time and bus bandwidth over the size of the tensor.


_SIZE = "size of the tensor"


def plot_all_reduce(report: Report) -> str:
    """Draw one line for each method as SVG: torch's own emphasised, predictions dashed, what memory allows dotted."""
    measured = report.measurements
    times, bandwidths = [], []
    for algorithm in dict.fromkeys(row.algorithm for row in report.rows):
        rows = [row for row in report.rows if row.algorithm == algorithm and row.seconds]
        if rows:
            times.append(_times(rows))
            bandwidths.append(_bandwidths(rows, measured.ranks))
    panels = [Panel("time of a call", _SIZE, times, show_size, show_seconds_shortly)]
    if measured.ranks > 1:
        panels.append(Panel("bus bandwidth", _SIZE, bandwidths, show_size, lambda rate: f"{show_size(rate)}/s"))
    cores = f"{measured.ranks} ranks on {measured.cores} cores"
    return draw_chart(f"All-reduce, {cores}", _subtitle(report), panels)


def show_seconds_shortly(seconds: float) -> str:
    """A power of ten: `10 ms`."""
    return show_seconds(seconds).replace(".00", "").replace(".0", "")


def _times(rows: list[Row]) -> Line:
    points = [
        Point(row.size, row.seconds, row.lower_quartile, row.upper_quartile)
        for row in rows
        if row.seconds and row.lower_quartile and row.upper_quartile
    ]
    algorithm = rows[0].algorithm
    return Line(
        rows[0].label,
        points,
        predicted=[(row.size, row.predicted_seconds) for row in rows if row.predicted_seconds],
        # Those of one kind have one bound, which is drawn once.
        bound=[(row.size, row.bound_seconds) for row in rows if row.bound_seconds and algorithm != TORCH_ON_SHM],
        emphasised=algorithm == TORCH,
        strong=algorithm in BOUNDS,
    )


def _bandwidths(rows: list[Row], ranks: int) -> Line:
    """The same line in another measure; the predictions are left to the first panel."""
    line = _times(rows)
    points = [
        Point(point.x, *(bus_bandwidth(point.x, seconds, ranks) for seconds in (point.y, point.high, point.low)))
        for point in line.points
    ]
    bound = [(size, bus_bandwidth(size, seconds, ranks)) for size, seconds in line.bound]
    return replace(line, points=points, predicted=(), bound=bound)


def _subtitle(report: Report) -> str:
    measured = report.measurements
    text = f"{measured.transport}, {measured.dtype}, {measured.device}"
    if report.costs is not None and report.typical_factor is not None:
        costs = (
            f"a latency of {show_seconds(report.costs.latency)} and {report.costs.seconds_per_byte * 1e9:.3g} ns a byte"
        )
        text += f"; predicted from {costs}, typically off by a factor of {report.typical_factor:.2f}"
    return text


# How the results of `bench allreduce` are shown: as a table for people, as JSON for scripts.


_COLUMNS = ("method", "time", "quartiles", "alg", "bus", "msgs", "÷torch", "of bound", "predicted", "÷time")
_LEAST_IMPORTANT_FIRST = ("msgs", "alg", "quartiles")  # left out where the terminal is narrow
_NOTHING = ("–", "")
_WIDTH_OF_FILES = 96
_RATES = ((1e9, "G"), (1e6, "M"), (1e3, "K"))
_CAPTIONS = {
    "time": """\
time      of a call: the median; half lie between the quartiles
× 10      of so many calls in a row, the mean is one of them""",
    "alg": "alg       bytes a second: size ÷ time",
    "bus": "bus       bytes a second: size ÷ time × 2(p−1)/p",
    "msgs": "msgs      the most that one rank sends",
    "÷torch": "÷torch    time ÷ torch's own",
    "÷time": "÷time     predicted ÷ measured",
    "of bound": """\
shm       comms.all_reduce over shared memory; in place: a tensor of comms.empty
bound     what memory allows: each rank, by itself, adds and copies what shm must
of bound  bound ÷ time: the share of the memory's bandwidth that is reached""",
}


def as_json(report: Report) -> dict[str, Any]:
    """Everything that was measured and worked out, in plain types."""
    measured = report.measurements
    calls = {(timing.method, timing.size): list(timing.seconds) for timing in measured.timings}
    return {
        "machine": _machine(measured.cores),
        "ranks": measured.ranks,
        "transport": measured.transport,
        "device": measured.device,
        "dtype": measured.dtype,
        "fit": None if report.costs is None else asdict(report.costs) | {"predictions_off_by": report.typical_factor},
        "results": [_row_as_json(row, calls[row.algorithm, row.size]) for row in report.rows],
        "bounds": [_row_as_json(row, calls[row.algorithm, row.size]) for row in report.bounds],
        "notes": report.notes,
    }


def _row_as_json(row: Row, calls: list[float]) -> dict[str, Any]:
    return asdict(row) | {"calls": calls, "calls_in_a_row": calls_in_a_row(row.size)}


def show(report: Report) -> None:
    """Print the table, what its columns mean, the fitted costs, and what a reader must know."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH_OF_FILES)
    console.print(_headline(report))
    console.print()
    table = table_of(report, console.width)
    console.print(table)
    shown = [str(column.header) for column in table.columns]
    console.print("\n[dim]" + "\n".join(text for heading, text in _CAPTIONS.items() if heading in shown) + "[/]")
    for line in [*_fit_lines(report), *(f"[yellow]![/] {note}" for note in report.notes)]:
        console.print(line)


def _machine(cores: int) -> dict[str, Any]:
    """What the numbers depend on, without a name that says whose machine it was."""
    return {
        "cores": cores,
        "system": f"{platform.system()}, {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "microparallel": __version__,
    }


def _headline(report: Report) -> str:
    measured = report.measurements
    ranks, cores = count(measured.ranks, "rank"), count(measured.cores, "core")
    where = f"{measured.transport}, {measured.dtype} on {measured.device}, torch {torch.__version__}"
    return f"[bold]all-reduce[/], {ranks} on {cores}: {where}"


def table_of(report: Report, width: int) -> Table:
    """One row for each method, under a heading for each size; the fastest is green, what limits it is dim."""
    rows = _every_row(report)
    cells = [dict(zip(_COLUMNS, _cells(row), strict=True)) for row in rows]
    shown = _columns(cells, width)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, show_edge=False)
    for heading in shown:
        table.add_column(heading, justify="left" if heading == _COLUMNS[0] else "right", no_wrap=True)
    for size, group in groupby(zip(rows, cells, strict=True), key=lambda pair: pair[0].size):
        pairs = list(group)
        repeats = max(row.repeats for row, _ in pairs)
        table.add_row(f"[bold]{show_size(size)}[/] [dim]{_calls(repeats, calls_in_a_row(size))}[/]")
        fastest = min(row.seconds for row, _ in pairs if row.seconds and not _is_bound(row))
        for row, texts in pairs:
            style = "dim" if _is_bound(row) else "green" if row.seconds == fastest else None
            table.add_row(*(texts[heading] for heading in shown), style=style)
        table.add_section()
    return table


def _calls(repeats: int, in_a_row: int) -> str:
    return count(repeats, "call") if in_a_row == 1 else f"{repeats} × {count(in_a_row, 'call')}"


def _columns(cells: Sequence[dict[str, str]], width: int) -> list[str]:
    """The columns that have something to say; and where they do not fit, not the least important ones."""
    shown = [heading for heading in _COLUMNS if any(texts[heading] not in _NOTHING for texts in cells)]
    for heading in _LEAST_IMPORTANT_FIRST:
        if heading in shown and _width(shown, cells) > width:
            shown.remove(heading)
    return shown


def _width(headings: Sequence[str], cells: Sequence[dict[str, str]]) -> int:
    """How wide a table of these columns is, with a space between them."""
    widths = [max(len(heading), *(len(texts[heading]) for texts in cells)) for heading in headings]
    return sum(widths) + len(widths) - 1


def _every_row(report: Report) -> list[Row]:
    """Size by size: torch's own, and what goes through shared memory; the bounds of that; the algorithms."""
    order = [TORCH, *BOUNDS, *dict.fromkeys(BOUNDS.values())]
    place = {method: index for index, method in enumerate(order)}
    return sorted([*report.rows, *report.bounds], key=lambda row: (row.size, place.get(row.algorithm, len(order))))


def _is_bound(row: Row) -> bool:
    return row.algorithm in BOUNDS.values()


def _cells(row: Row) -> list[str]:
    predicted = "–" if row.predicted_seconds is None else show_seconds(row.predicted_seconds)
    messages = "–" if row.messages_sent is None else str(max(row.messages_sent))
    if row.seconds is None:
        return [f" {row.label}", "left out", "", "", "", messages, "", "", predicted, ""]
    return [
        f" {row.label}",
        show_seconds(row.seconds),
        _shown_quartiles(row),
        _rate(row.algorithm_bandwidth),
        _rate(row.bus_bandwidth),
        messages,
        show_number(row.ratio_to_torch or 0),
        "–" if row.share_of_bound is None else f"{row.share_of_bound:.0%}".replace("%", " %"),
        predicted,
        "–" if row.predicted_over_measured is None else show_number(row.predicted_over_measured),
    ]


def _rate(bandwidth: float | None) -> str:
    """Bytes a second, with their unit as a letter."""
    rate = bandwidth or 0
    length, letter = next(((length, letter) for length, letter in _RATES if rate >= 0.9995 * length), (1, ""))
    return f"{show_number(rate / length)}{letter}"


def _shown_quartiles(row: Row) -> str:
    """Both in the unit of the median, which stands beside them."""
    if row.repeats == 1:
        return "one call"
    length, _ = time_unit(row.seconds or 0)
    return "–".join(show_number((quartile or 0) / length) for quartile in (row.lower_quartile, row.upper_quartile))


def _fit_lines(report: Report) -> list[str]:
    costs = report.costs
    if costs is None or report.typical_factor is None:
        return []
    bandwidth = f"{show_number(1e-9 / costs.seconds_per_byte)} GB/s" if costs.seconds_per_byte else "no limit"
    message = f"{show_seconds(costs.latency)} + {costs.seconds_per_byte * 1e9:.3g} ns a byte ({bandwidth})"
    return [
        f"[bold]fitted[/]    a message takes {message}, adding {costs.add_seconds_per_byte * 1e9:.2g} ns a byte;",
        f"          predictions from these are typically off by a factor of {report.typical_factor:.2f}",
    ]
