"""The picture of an all-reduce benchmark: time and bus bandwidth over the size of the tensor."""

from __future__ import annotations

from dataclasses import replace

from microparallel.performance.all_reduce_report import Report, Row, bus_bandwidth
from microparallel.performance.chart import Line, Panel, Point, draw_chart
from microparallel.performance.methods import BOUNDS, TORCH, TORCH_ON_SHM
from microparallel.text import show_seconds, show_size

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
