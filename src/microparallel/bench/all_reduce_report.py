"""What `bench allreduce` shows: bandwidths, ratios, how well the times were predicted, and a picture of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from microparallel.bench import report
from microparallel.bench.all_reduce import (
    ADD,
    BOUNDS,
    CUDA,
    TORCH,
    TORCH_ON_CUDA,
    TORCH_ON_NCCL,
    TORCH_ON_SHM,
    Measurements,
    Timing,
    calls_in_a_row,
)
from microparallel.bench.chart import Line, Panel, Point, draw_chart
from microparallel.bench.engine import AGAIN, FEWEST_REPEATS, has_gloo_beside
from microparallel.bench.messages import MessageCosts, fit_messages, typical_factor
from microparallel.bench.report import Column, cores_are_shared, fitting, legend, make_table, show_quartiles, spread
from microparallel.collectives import ALL_REDUCES, all_reduce_program
from microparallel.program import Program
from microparallel.simulator import Costs, simulate
from microparallel.text import count, show_number, show_seconds, show_size


@dataclass(frozen=True)
class Row:
    """One method at one size: times in seconds, bandwidths in bytes a second, None where there is nothing to say."""

    algorithm: str  # or another method
    label: str  # the same for people
    size: int
    repeats: int
    calls: tuple[float, ...] = ()
    calls_in_a_row: int = 1
    seconds: float | None = None  # the median
    lower_quartile: float | None = None
    upper_quartile: float | None = None
    fastest: float | None = None
    slowest: float | None = None
    algorithm_bandwidth: float | None = None
    bus_bandwidth: float | None = None
    messages_sent: list[int] | None = None  # by each rank; those of torch's own are not known
    bytes_sent: list[float] | None = None
    ratio_to_torch: float | None = None
    bound_seconds: float | None = None  # what memory alone would take; known where ranks share it
    share_of_bound: float | None = None  # that, divided by what it took
    predicted_seconds: float | None = None
    predicted_over_measured: float | None = None
    left_out: str | None = None  # the reason

    @property
    def is_bound(self) -> bool:
        """Whether this is no all-reduce, but what limits one."""
        return self.algorithm in BOUNDS.values()


@dataclass(frozen=True)
class Report(report.Report[Measurements]):
    """All rows, from small sizes to large, and the costs that were fitted to them."""

    title = "all-reduce"

    rows: list[Row]
    bounds: list[Row]  # no all-reduces: what limits them
    costs: MessageCosts | None
    typical_factor: float | None  # by which predictions are off, in either direction

    @property
    def dtype(self) -> str:
        """Of the tensors that were summed."""
        return self.measurements.dtype

    def details(self) -> dict[str, Any]:
        """The fitted costs, and every row with its calls."""
        fit = None if self.costs is None else asdict(self.costs) | {"predictions_off_by": self.typical_factor}
        return {
            "dtype": self.dtype,
            "fit": fit,
            "results": [asdict(row) for row in self.rows],
            "bounds": [asdict(row) for row in self.bounds],
        }

    def show_body(self, console: Console) -> None:
        """Print the table, what its columns mean, and the fitted costs."""
        console.print(self.table(console.width))
        console.print(f"\n[dim]{legend(self.columns(console.width))}[/]")
        for line in self._fit_lines():
            console.print(line)

    def columns(self, width: int) -> list[Column[Row]]:
        """The columns that a terminal of this width has room for."""
        columns = [_on_a_gpu(one) for one in _COLUMNS] if self.measurements.transport == "cuda" else _COLUMNS
        return fitting(columns, [*self.rows, *self.bounds], width, _GAP)

    def table(self, width: int) -> Table:
        """One row for each method, under a heading for each size; the fastest is green, what limits it is dim."""
        columns = self.columns(width)
        table = make_table(columns, gap=_GAP)
        for size, group in groupby(self._in_order(), key=lambda row: row.size):
            rows = list(group)
            calls = _calls(max(row.repeats for row in rows), calls_in_a_row(size))
            table.add_row(f"[bold]{show_size(size)}[/] [dim]{calls}[/]")
            fastest = min(row.seconds for row in rows if row.seconds and not row.is_bound)
            for row in rows:
                style = "dim" if row.is_bound else "green" if row.seconds == fastest else None
                table.add_row(*(column.cell(row) for column in columns), style=style)
            table.add_section()
        return table

    def _in_order(self) -> list[Row]:
        """Size by size: torch's own, and what goes through shared memory; the bounds of that; the algorithms."""
        order = [TORCH, TORCH + AGAIN, TORCH_ON_NCCL, *BOUNDS, *dict.fromkeys(BOUNDS.values())]
        place = {method: index for index, method in enumerate(order)}
        return sorted([*self.rows, *self.bounds], key=lambda row: (row.size, place.get(row.algorithm, len(order))))

    def _fit_lines(self) -> list[str]:
        costs = self.costs
        if costs is None or self.typical_factor is None:
            return []
        bandwidth = f"{show_number(1e-9 / costs.seconds_per_byte)} GB/s" if costs.seconds_per_byte else "no limit"
        message = f"{show_seconds(costs.latency)} + {costs.seconds_per_byte * 1e9:.3g} ns a byte ({bandwidth})"
        return [
            f"[bold]fitted[/]    a message takes {message}, adding {costs.add_seconds_per_byte * 1e9:.2g} ns a byte;",
            f"          predictions from these are typically off by a factor of {self.typical_factor:.2f}",
        ]


# ── from measurements to rows ───────────────────────────────────────────────────────────────────────────────────────


def report_on(measurements: Measurements) -> Report:
    """Work out everything that follows from the measured times."""
    costs = _fit(measurements)
    every = [_row(timing, measurements, costs) for timing in measurements.timings if timing.method != ADD]
    rows = [row for row in every if not row.is_bound]
    pairs = [(row.predicted_seconds, row.seconds) for row in rows if row.predicted_seconds and row.seconds]
    factor = typical_factor(pairs) if pairs else None
    notes = _notes(measurements, rows, costs)
    return Report(measurements, notes, rows, [row for row in every if row.is_bound], costs, factor)


def bus_bandwidth(size: float, seconds: float, ranks: int) -> float:
    """The bytes a second that each rank's connection would carry, had the all-reduce sent no byte too many.

    Every rank must send and receive at least 2(p−1)/p times the tensor, so this number, the convention of nccl-tests,
    compares algorithms and numbers of ranks with each other and with what the hardware can do.
    """
    return size / seconds * 2 * (ranks - 1) / ranks


def _fit(measurements: Measurements) -> MessageCosts | None:
    """Fit the costs of a message over this run's transport, so to the algorithms alone: they all went that way."""
    measured: list[tuple[Program, int, float]] = []
    adds: list[tuple[int, float]] = []
    for timing in measurements.timings:
        if timing.method == ADD and timing.seconds:
            adds.append((timing.size, statistics.median(timing.seconds)))
        elif timing.method in ALL_REDUCES and timing.seconds:
            program = all_reduce_program(timing.method, measurements.ranks)
            measured.append((program, timing.size, statistics.median(timing.seconds)))
    return fit_messages(measured, adds)


def _row(timing: Timing, measurements: Measurements, costs: MessageCosts | None) -> Row:
    size, calls = timing.size, timing.seconds
    row = Row(
        algorithm=timing.method,
        label=_label(timing.method, measurements.transport),
        size=size,
        repeats=len(calls),
        calls=calls,
        calls_in_a_row=calls_in_a_row(size),
        left_out=timing.left_out,
    )
    if timing.method in ALL_REDUCES:
        program = all_reduce_program(timing.method, measurements.ranks)
        row = replace(
            row,
            messages_sent=program.messages_sent(),
            bytes_sent=simulate(program, Costs(bytes_per_value=size)).bytes_sent,
            predicted_seconds=None if costs is None else costs.predict(program, size),
        )
    return _with_times(row, measurements) if calls else row


def _label(method: str, transport: str) -> str:
    """What people read: torch's own is on gloo where ours share memory."""
    plain = method.removesuffix(AGAIN)
    if plain != TORCH or not has_gloo_beside(transport):
        return method
    return "torch on gloo" + method.removeprefix(plain)


def _with_times(row: Row, measurements: Measurements) -> Row:
    seconds = statistics.median(row.calls)
    at_this_size = [timing for timing in measurements.timings if timing.size == row.size and timing.seconds]
    medians = {timing.method: statistics.median(timing.seconds) for timing in at_this_size}
    bound = medians.get(BOUNDS.get(row.algorithm, ""))
    return replace(
        row,
        **spread(row.calls),
        algorithm_bandwidth=row.size / seconds,
        bus_bandwidth=bus_bandwidth(row.size, seconds, measurements.ranks),
        ratio_to_torch=seconds / medians[TORCH],
        bound_seconds=bound,
        share_of_bound=None if bound is None else bound / seconds,
        predicted_over_measured=None if row.predicted_seconds is None else row.predicted_seconds / seconds,
    )


def _notes(measurements: Measurements, rows: list[Row], costs: MessageCosts | None) -> list[str]:
    notes = [f"{row.label} at {show_size(row.size)} was left out: {row.left_out}" for row in rows if row.left_out]
    if measurements.without is not None:
        notes.append(f"{TORCH_ON_NCCL} was left out: {measurements.without}")
    for size, same_size in groupby(rows, key=lambda row: row.size):
        notes += _few_calls(show_size(size), list(same_size))
    of_model = "the algorithms, and the model behind the predictions gives each rank a core of its own"
    notes += cores_are_shared(measurements, "the methods" if costs is None else of_model)
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


# ── the columns ─────────────────────────────────────────────────────────────────────────────────────────────────────

_GAP = 1  # blanks between two columns
_RATES = ((1e9, "G"), (1e6, "M"), (1e3, "K"))


def _rate(bandwidth: float | None) -> str:
    """Bytes a second, with their unit as a letter; nothing for what was left out."""
    if bandwidth is None:
        return ""
    length, letter = next(((length, letter) for length, letter in _RATES if bandwidth >= 0.9995 * length), (1, ""))
    return f"{show_number(bandwidth / length)}{letter}"


def _quartiles(row: Row) -> str:
    if row.seconds is None or row.lower_quartile is None or row.upper_quartile is None:
        return ""
    return "one call" if row.repeats == 1 else show_quartiles(row.lower_quartile, row.seconds, row.upper_quartile)


def _of_measured(row: Row, text: str | None) -> str:
    """A cell that only measured rows have: a dash where there is nothing to say of one."""
    return "" if row.seconds is None else "–" if text is None else text


_COLUMNS: list[Column[Row]] = [
    Column("method", lambda row: f" {row.label}", on_the_left=True),
    Column(
        "time",
        lambda row: "left out" if row.seconds is None else show_seconds(row.seconds),
        "of a call: the median; half lie between the quartiles",
        {"× 10": "of so many calls in a row, the mean is one of them"},
    ),
    Column("quartiles", _quartiles, left_out=3),
    Column("alg", lambda row: _rate(row.algorithm_bandwidth), "bytes a second: size ÷ time", left_out=2),
    Column("bus", lambda row: _rate(row.bus_bandwidth), "bytes a second: size ÷ time × 2(p−1)/p"),
    Column(
        "msgs",
        lambda row: "–" if row.messages_sent is None else str(max(row.messages_sent)),
        "the most that one rank sends",
        left_out=1,
    ),
    Column(
        "÷torch",
        lambda row: "" if row.ratio_to_torch is None else show_number(row.ratio_to_torch),
        "time ÷ torch's own",
    ),
    Column(
        "of bound",
        lambda row: _of_measured(row, None if row.share_of_bound is None else f"{100 * row.share_of_bound:.0f} %"),
        "bound ÷ time: the share of the memory's bandwidth that is reached",
        {
            "bound": "what memory allows: each rank, by itself, adds and copies what shm must",
            "shm": "comms.all_reduce over shared memory; in place: a tensor of comms.empty",
        },
    ),
    Column("predicted", lambda row: "–" if row.predicted_seconds is None else show_seconds(row.predicted_seconds)),
    Column(
        "÷time",
        lambda row: _of_measured(
            row, None if row.predicted_over_measured is None else show_number(row.predicted_over_measured)
        ),
        "predicted ÷ measured",
    ),
]


def _on_a_gpu(column: Column[Row]) -> Column[Row]:
    """The same column, with words for what is measured on a GPU."""
    if column.heading == "÷torch":
        return replace(column, also={"again": "the same method once more: its ratio to itself is chance"})
    if column.heading != "of bound":
        return column
    words = {
        "bound": "what the GPU allows: each rank, by itself, adds and copies what cuda must",
        "cuda": "comms.all_reduce: ranks read each other's tensors on the GPU",
        "nccl": "each rank told NCCL that it is on a host of its own (NCCL_HOSTID)",
    }
    return replace(column, meaning="bound ÷ time: the share of the memory's bandwidth that is reached", also=words)


def _calls(repeats: int, in_a_row: int) -> str:
    return count(repeats, "call") if in_a_row == 1 else f"{repeats} × {count(in_a_row, 'call')}"


# ── the picture: time and bus bandwidth over the size of the tensor ─────────────────────────────────────────────────

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
    panels = [Panel("time of a call", _SIZE, times, show_size, _show_seconds_shortly)]
    if measured.ranks > 1:
        panels.append(Panel("bus bandwidth", _SIZE, bandwidths, show_size, lambda rate: f"{show_size(rate)}/s"))
    cores = f"{measured.ranks} ranks on {measured.cores} cores"
    return draw_chart(f"All-reduce, {cores}", _subtitle(report), panels)


def _show_seconds_shortly(seconds: float) -> str:
    """A power of ten: `10 ms`."""
    return show_seconds(seconds).replace(".00", "").replace(".0", "")


def _times(rows: Sequence[Row]) -> Line:
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
        bound=[
            (row.size, row.bound_seconds)
            for row in rows
            if row.bound_seconds and algorithm not in (TORCH_ON_SHM, TORCH_ON_CUDA, CUDA + AGAIN)
        ],
        emphasised=algorithm == TORCH,
        strong=algorithm in BOUNDS,
    )


def _bandwidths(rows: Sequence[Row], ranks: int) -> Line:
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
        per_byte = f"{report.costs.seconds_per_byte * 1e9:.3g} ns a byte"
        costs = f"a latency of {show_seconds(report.costs.latency)} and {per_byte}"
        text += f"; predicted from {costs}, typically off by a factor of {report.typical_factor:.2f}"
    return text
