"""What the measured steps of data parallelism say: what synchronising costs, and which bucket size costs least."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich import box
from rich.table import Table

from microparallel.bench.data_parallel import DDP, NONE, TORCH_DDP, Measurements, Result, Timing
from microparallel.bench.engine import chance_speaks, cores_are_shared, quartiles
from microparallel.bench.output import console_for_results, machine, show_step
from microparallel.text import count, show_seconds, show_size


@dataclass(frozen=True)
class Row:
    """One method on one model: times in seconds."""

    model: str
    method: str
    bucket_cap_mb: float | None
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
        bucket_cap_mb=timing.method.bucket_cap_mb,
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
    sizes = {row.bucket_cap_mb: row.seconds for row in rows if row.model == result.model and row.method == DDP}
    return min(sizes, key=lambda size: sizes[size]) if len(sizes) > 1 else None


def _notes(measurements: Measurements) -> list[str]:
    """What a reader must know about these numbers."""
    notes = []
    for result in measurements.results:
        notes += chance_speaks(result.model, len(result.timings[0].seconds))
    return notes + cores_are_shared(measurements.ranks_here, measurements.cores, measurements.device)


# How the results of `bench dp` are shown: as a table for people, as JSON for scripts.


_WIDTHS = {"step": 8, "quartiles": 11, "−none": 8, "÷none": 6, "÷torch": 6}  # so that all models' tables align
_CAPTION = """\
step    forward, backward and optimizer: the median; half of the steps lie between the quartiles
−none   step − the step of none: the exposed communication, and what arranging it costs
÷none   step ÷ the step of none, which synchronises nothing
÷torch  step ÷ the step of torch-ddp: torch's DistributedDataParallel on {group}, with bucket views"""


def as_json(report: Report) -> dict[str, Any]:
    """Everything that was measured and worked out, in plain types."""
    measured = report.measurements
    steps = {
        (result.model, timing.method.label): list(timing.seconds)
        for result in measured.results
        for timing in result.timings
    }
    return {
        "machine": machine(measured.cores),
        "ranks": measured.ranks,
        "transport": measured.transport,
        "device": measured.device,
        "models": [
            {
                "name": result.model,
                "text": result.text,
                "batch": result.batch,
                "gradient_bytes": result.gradient_bytes,
                "steps": result.steps,
                "best_bucket_mb": report.best_bucket_mb.get(result.model),
            }
            for result in measured.results
        ],
        "results": [asdict(row) | {"steps": steps[row.model, row.label]} for row in report.rows],
        "notes": report.notes,
    }


def show(report: Report) -> None:
    """Print the table, what its columns mean, the best bucket sizes, and what a reader must know."""
    console = console_for_results()
    measured = report.measurements
    ranks, cores = count(measured.ranks, "rank"), count(measured.cores, "core")
    where = f"{measured.transport}, float32 on {measured.device}, torch {torch.__version__}"
    console.print(f"[bold]data-parallel step[/], {ranks} on {cores}: {where}\n")
    for result in measured.results:
        console.print(heading_of(report, result), soft_wrap=True)
        console.print(table_of(report, result))
        console.print()
    group = "gloo" if measured.transport == "shm" else measured.transport
    console.print(f"[dim]{_CAPTION.format(group=group)}[/]")
    if report.best_bucket_mb:
        best = ", ".join(f"{model} {size:g} MB" for model, size in report.best_bucket_mb.items())
        console.print(f"[bold]best bucket size of ddp[/]  {best}")
    console.print(f"[bold]checked[/]  {_checked(report)}")
    for note in report.notes:
        console.print(f"[yellow]![/] {note}")


def _checked(report: Report) -> str:
    apart = max(row.apart_from_torch_ddp for row in report.rows if row.method != NONE)
    return (
        "each method's ranks ended with the same weights, bit for bit;\n"
        f"         all methods ended where torch-ddp did, {apart:.1g} of the way apart at most"
    )


def heading_of(report: Report, result: Result) -> str:
    """What the model is, and how often it was stepped."""
    made_of = f"{result.text}, {show_size(result.gradient_bytes)} of gradients, {count(result.batch, 'sample')} a rank"
    return f"[bold]{result.model}[/]  {made_of}, {count(rows_of(report, result)[0].counted, 'step')}"


def table_of(report: Report, result: Result) -> Table:
    """One row for each method on one model; the fastest bucket size is green, what nobody can beat is dim."""
    rows = rows_of(report, result)
    width = max(len(f" {row.label}") for row in report.rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("method", min_width=width, no_wrap=True)
    for heading in ("step", "quartiles", "−none", "÷none", "÷torch"):
        table.add_column(heading, min_width=_WIDTHS[heading], justify="right", no_wrap=True)
    fastest = min((row.seconds for row in rows if row.method == DDP), default=None)
    for row in rows:
        style = "dim" if row.method == NONE else "green" if row.seconds == fastest else None
        table.add_row(*_cells(row), style=style)
    return table


def _cells(row: Row) -> list[str]:
    difference = "" if row.method == NONE else _signed(row.seconds_minus_none)
    return [
        f" {row.label}",
        *show_step(row.seconds, row.lower_quartile, row.upper_quartile, row.counted),
        difference,
        f"{row.ratio_to_none:.2f}",
        f"{row.ratio_to_torch_ddp:.2f}",
    ]


def _signed(seconds: float) -> str:
    """A difference: one may come out below zero, by chance."""
    return f"{'−' if seconds < 0 else ''}{show_seconds(abs(seconds))}"
