"""How the results of `bench dp` are shown: as a table for people, as JSON for scripts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from rich import box
from rich.table import Table

from microparallel.cli.bench_output import console_for_results, machine, show_step
from microparallel.performance.data_parallel_bench import Result
from microparallel.performance.data_parallel_bench_methods import DDP, NONE
from microparallel.performance.data_parallel_bench_report import Report, Row, rows_of
from microparallel.text import count, show_seconds, show_size

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
