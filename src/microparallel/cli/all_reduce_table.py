"""How the results of `bench allreduce` are shown: as a table for people, as JSON for scripts."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from microparallel import __version__
from microparallel.performance.all_reduce_report import Report, Row
from microparallel.performance.case import calls_in_a_row
from microparallel.performance.methods import BOUNDS, TORCH
from microparallel.text import count, show_number, show_seconds, show_size, time_unit

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
        _quartiles(row),
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


def _quartiles(row: Row) -> str:
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
