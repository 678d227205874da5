"""What `bench dp` shows: what synchronising costs each method, and which bucket size costs least."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from microparallel.bench import report
from microparallel.bench.data_parallel import DDP, NONE, TORCH_DDP, Measurements, Result, Timing
from microparallel.bench.gpu_use import GpuUse
from microparallel.bench.report import (
    Column,
    Times,
    compared_in_float64,
    cores_are_shared,
    few_steps,
    gpu_columns,
    legend,
    make_table,
    times_of,
)
from microparallel.text import count, show_seconds, show_size


@dataclass(frozen=True, kw_only=True)
class Row(Times):
    """One method on one model."""

    model: str
    method: str
    bucket_cap_mb: float | None
    label: str  # both, for people
    seconds_minus_none: float  # the exposed communication, and what arranging it costs
    ratio_to_none: float
    ratio_to_torch_ddp: float
    apart_from_torch_ddp: float  # at the end, as a part of the way that one has come
    use: GpuUse | None = None  # what the method takes of the GPU


@dataclass(frozen=True)
class Report(report.Report[Measurements]):
    """All rows, model by model."""

    title = "data-parallel step"

    rows: list[Row]
    best_bucket_mb: dict[str, float]  # of ddp, for each model that has a choice

    def details(self) -> dict[str, Any]:
        """The models, and every row with its steps."""
        models = [
            {
                "name": result.model,
                "text": result.text,
                "batch": result.batch,
                "gradient_bytes": result.gradient_bytes,
                "steps": result.steps,
                "best_bucket_mb": self.best_bucket_mb.get(result.model),
            }
            for result in self.measurements.results
        ]
        return {"models": models, "results": [asdict(row) for row in self.rows]}

    def show_body(self, console: Console) -> None:
        """Print a table for each model, what its columns mean, the best bucket sizes, and what was checked."""
        for result in self.measurements.results:
            console.print(self._heading(result), soft_wrap=True)
            console.print(self.table(result))
            console.print()
        console.print(f"[dim]{legend(self._columns(), group=self.measurements.torch_group)}[/]")
        if self.best_bucket_mb:
            best = ", ".join(f"{model} {size:g} MB" for model, size in self.best_bucket_mb.items())
            console.print(f"[bold]best bucket size of ddp[/]  {best}")
        apart = max(row.apart_from_torch_ddp for row in self.rows if row.method != NONE)
        console.print(
            "[bold]checked[/]  each method's ranks ended with the same weights, bit for bit;\n"
            f"         all methods ended where torch-ddp did, {apart:.1g} of the way apart at most"
        )

    def table(self, result: Result) -> Table:
        """One row for each method on one model; the fastest bucket size is green, `none` is dim."""
        rows = self._rows_of(result)
        fastest = min((row.seconds for row in rows if row.method == DDP), default=None)

        def style(row: Row) -> str | None:
            return "dim" if row.method == NONE else "green" if row.seconds == fastest else None

        return make_table(self._columns(), rows, style)

    def _rows_of(self, result: Result) -> list[Row]:
        return [row for row in self.rows if row.model == result.model]

    def _heading(self, result: Result) -> str:
        gradients, samples = show_size(result.gradient_bytes), count(result.batch, "sample")
        steps = count(self._rows_of(result)[0].counted, "step")
        return f"[bold]{result.model}[/]  {result.text}, {gradients} of gradients, {samples} a rank, {steps}"

    def _columns(self) -> list[Column[Row]]:
        longest = max(len(f" {row.label}") for row in self.rows)
        name: Column[Row] = Column("method", lambda row: f" {row.label}", width=longest, on_the_left=True)
        return [name, *_COLUMNS, *gpu_columns(self.rows)]


def report_on(measurements: Measurements) -> Report:
    """Work out everything that follows from the measured times."""
    results = measurements.results
    rows = [_row(timing, result) for result in results for timing in result.timings]
    best = {result.model: found for result in results if (found := _best_bucket(rows, result)) is not None}
    notes = [note for result in results for note in few_steps(result.model, len(result.timings[0].seconds))]
    dtype = measurements.dtype_of_model
    notes += [note for result in results for note in compared_in_float64(result.model, result.in_float64, dtype)]
    return Report(measurements, notes + cores_are_shared(measurements), rows, best)


def _row(timing: Timing, result: Result) -> Row:
    medians = {other.method.name: statistics.median(other.seconds) for other in result.timings}
    seconds = statistics.median(timing.seconds)
    return Row(
        model=result.model,
        method=timing.method.name,
        bucket_cap_mb=timing.method.bucket_cap_mb,
        label=timing.method.label,
        seconds_minus_none=seconds - medians[NONE],
        ratio_to_none=seconds / medians[NONE],
        ratio_to_torch_ddp=seconds / medians[TORCH_DDP],
        apart_from_torch_ddp=timing.apart,
        use=timing.use,
        **times_of(timing.seconds),
    )


def _best_bucket(rows: list[Row], result: Result) -> float | None:
    """The bucket size with the fastest step; None where there was nothing to choose from."""
    sizes = {row.bucket_cap_mb: row.seconds for row in rows if row.model == result.model and row.method == DDP}
    return min(sizes, key=lambda size: sizes[size]) if len(sizes) > 1 else None


def _minus_none(row: Row) -> str:
    """A difference: one may come out below zero, by chance."""
    sign = "−" if row.seconds_minus_none < 0 else ""
    return "" if row.method == NONE else f"{sign}{show_seconds(abs(row.seconds_minus_none))}"


_COLUMNS: list[Column[Row]] = [  # the widths make all models' tables align
    Column(
        "step",
        lambda row: show_seconds(row.seconds),
        "forward, backward and optimizer: the median; half of the steps lie between the quartiles",
        width=8,
    ),
    Column("quartiles", Times.show_quartiles, width=11),
    Column(
        "−none",
        _minus_none,
        "step − the step of none: the exposed communication, and what arranging it costs",
        width=8,
    ),
    Column(
        "÷none", lambda row: f"{row.ratio_to_none:.2f}", "step ÷ the step of none, which synchronises nothing", width=6
    ),
    Column(
        "÷torch",
        lambda row: f"{row.ratio_to_torch_ddp:.2f}",
        "step ÷ the step of torch-ddp: torch's DDP on {group}, with bucket views (ddp: without)",
        width=6,
    ),
]
