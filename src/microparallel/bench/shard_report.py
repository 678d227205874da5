"""What `bench shard` shows: what a step with parts costs, and what it saves in memory."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from microparallel.bench import report
from microparallel.bench.report import Column, Times, cores_are_shared, few_steps, legend, make_table, times_of
from microparallel.bench.shard import (
    AGAIN,
    DDP,
    GRADIENTS,
    NONE,
    OPTIMIZER,
    TORCH_ZERO,
    TORCH_ZERO_ON_SHM,
    Measurements,
    Result,
    Timing,
)
from microparallel.text import count, show_seconds, show_size

_MOMENTS = 2  # copies of the parameters that AdamW keeps
# By method: what of the gradients and of the optimizer's state a rank keeps in parts, and how often it sends the model
# once all its micro-batches are summed; torch's broadcasts parameters after an all-reduce of gradients.
_PARTS: dict[str, tuple[bool, bool]] = {
    NONE: (False, False),
    DDP: (False, False),
    OPTIMIZER: (False, True),
    GRADIENTS: (True, True),
    TORCH_ZERO: (False, True),
    TORCH_ZERO_ON_SHM: (False, True),
}


@dataclass(frozen=True, kw_only=True)
class Row(Times):
    """One method on one model; bytes are those of the rank that has most."""

    model: str
    method: str
    ratio_to_torch_zero: float
    ratio_to_none: float
    parameter_bytes: float
    parameter_bytes_by_formula: float
    gradient_bytes: float  # the most there were at any time of a step
    gradient_bytes_by_formula: float  # without buckets in flight
    optimizer_bytes: float
    optimizer_bytes_by_formula: float
    sent_bytes: float | None
    sent_bytes_by_formula: float
    apart_from_torch_zero: float  # after three steps, as a part of the way that one has come

    @property
    def repeats(self) -> bool:
        """Whether it is a method that stands in another row, too."""
        return self.method.endswith(AGAIN)

    @property
    def together(self) -> float:
        """Parameters, gradients and optimizer."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def together_by_formula(self) -> float:
        """What these should be."""
        return self.parameter_bytes_by_formula + self.gradient_bytes_by_formula + self.optimizer_bytes_by_formula


@dataclass(frozen=True)
class Report(report.Report[Measurements]):
    """All rows, model by model."""

    title = "training step in parts"

    rows: list[Row]

    def details(self) -> dict[str, Any]:
        """The models, and every row with its steps."""
        models = [
            {
                "name": result.model,
                "text": result.text,
                "batch": result.batch,
                "accumulate": result.accumulate,
                "parameter_bytes": result.parameter_bytes,
                "none_to_itself": self._row(result, NONE + AGAIN).ratio_to_none,
                "torch_zero_to_itself": self._row(result, TORCH_ZERO + AGAIN).ratio_to_torch_zero,
            }
            for result in self.measurements.results
        ]
        return {"models": models, "results": [asdict(row) for row in self.rows]}

    def _row(self, result: Result, method: str) -> Row:
        return next(row for row in self._rows_of(result) if row.method == method)

    def _rows_of(self, result: Result) -> list[Row]:
        return [row for row in self.rows if row.model == result.model]

    def show_body(self, console: Console) -> None:
        """Print two tables for each model, what their columns mean, and what was checked."""
        for result in self.measurements.results:
            console.print(self._heading(result), soft_wrap=True)
            console.print(self.times(result))
            console.print()
            console.print(self.bytes(result))
            console.print()
        group = self.measurements.torch_group
        console.print(f"[dim]{legend([*_TIMES, *_BYTES], group=group)}[/]")
        apart = max(row.apart_from_torch_zero for row in self.rows if not row.method.startswith(NONE))
        console.print(
            "[bold]checked[/]  each method's ranks ended with the same weights, bit for bit;\n"
            f"         after three steps all were where torch-zero was, {apart:.1g} of the way apart at most"
        )

    def times(self, result: Result) -> Table:
        """How long a step takes; what no method can be faster than, and what is chance, is dim."""
        return make_table([*self._name(), *_TIMES], self._rows_of(result), _style)

    def bytes(self, result: Result) -> Table:
        """What a rank keeps and sends, each beside its formula; a method that ran twice stands there once."""
        return make_table([*self._name(), *_BYTES], [row for row in self._rows_of(result) if not row.repeats], _style)

    def _heading(self, result: Result) -> str:
        parameters, samples = show_size(result.parameter_bytes), count(result.batch, "sample")
        cut = f" in {result.accumulate} micro-batches" if result.accumulate > 1 else ""
        steps = count(self._rows_of(result)[0].counted, "step")
        return f"[bold]{result.model}[/]  {result.text}, {parameters} of parameters, {samples} a rank{cut}, {steps}"

    def _name(self) -> list[Column[Row]]:
        longest = max(len(f" {row.method}") for row in self.rows)
        return [Column("method", lambda row: f" {row.method}", width=longest, on_the_left=True)]


def report_on(measurements: Measurements) -> Report:
    """Work out everything that follows from what was measured."""
    results = measurements.results
    rows = [_row(timing, result, measurements.ranks) for result in results for timing in result.timings]
    notes = [note for result in results for note in few_steps(result.model, len(result.timings[0].seconds))]
    return Report(measurements, notes + cores_are_shared(measurements), rows)


def _row(timing: Timing, result: Result, ranks: int) -> Row:
    medians = {other.method.name: statistics.median(other.seconds) for other in result.timings}
    seconds = statistics.median(timing.seconds)
    size, memory = result.parameter_bytes, timing.memory
    name = timing.method.name.removesuffix(AGAIN)
    gradients_in_parts, optimizer_in_parts = _PARTS[name]
    return Row(
        model=result.model,
        method=timing.method.name,
        ratio_to_torch_zero=seconds / medians[TORCH_ZERO],
        ratio_to_none=seconds / medians[NONE],
        parameter_bytes=memory.parameters,
        parameter_bytes_by_formula=size,
        gradient_bytes=memory.gradients,
        gradient_bytes_by_formula=size / (ranks if gradients_in_parts else 1),
        optimizer_bytes=memory.optimizer,
        optimizer_bytes_by_formula=_MOMENTS * size / (ranks if optimizer_in_parts else 1),
        sent_bytes=timing.sent,
        sent_bytes_by_formula=_times_sent(name, result.accumulate) * (ranks - 1) / ranks * size,
        apart_from_torch_zero=timing.apart,
        **times_of(timing.seconds),
    )


def _times_sent(method: str, microbatches: int) -> int:
    """How often a rank sends (p - 1)/p of the model in a step."""
    if method == GRADIENTS:
        return microbatches + 1  # a reduce-scatter for each, and an all-gather
    return {NONE: 0, TORCH_ZERO: 3, TORCH_ZERO_ON_SHM: 3}.get(method, 2)


def _style(row: Row) -> str | None:
    return "dim" if row.method.startswith(NONE) or row.repeats else None


def _sent(row: Row) -> str:
    return "–" if row.sent_bytes is None else show_size(row.sent_bytes)


_TIMES: list[Column[Row]] = [
    Column(
        "step",
        lambda row: show_seconds(row.seconds),
        "forward, backward and AdamW: the median; half of the steps lie between the quartiles",
        width=8,
    ),
    Column("quartiles", Times.show_quartiles, width=11),
    Column(
        "÷zero",
        lambda row: f"{row.ratio_to_torch_zero:.2f}",
        "step ÷ the step of torch-zero: torch's DDP and ZeroRedundancyOptimizer on {group}",
        {"again": "the same method once more: its ratio to itself is chance"},
        width=6,
    ),
    Column(
        "÷none",
        lambda row: f"{row.ratio_to_none:.2f}",
        "step ÷ the step of none, in which each rank trains alone",
        width=6,
    ),
]
_BYTES: list[Column[Row]] = [
    Column("weights", lambda row: show_size(row.parameter_bytes), width=8),
    Column(
        "gradients",
        lambda row: show_size(row.gradient_bytes),
        "the most at any time of a step: kept, in buckets, or just computed",
        width=9,
    ),
    Column("optimizer", lambda row: show_size(row.optimizer_bytes), width=9),
    Column("together", lambda row: show_size(row.together), width=8),
    Column(
        "formula",
        lambda row: show_size(row.together_by_formula),
        "weights n, gradients n, AdamW 2n; what is in parts ÷ p; without buckets",
        width=8,
    ),
    Column("sent", _sent, "bytes that a rank sent in a step, as recorded; torch's own does not tell", width=8),
    Column(
        "by formula",
        lambda row: show_size(row.sent_bytes_by_formula),
        "2(p−1)/p·n; shard gradients, with m micro-batches: (m+1)(p−1)/p·n;\n"
        "torch-zero, which all-reduces gradients and broadcasts weights: 3(p−1)/p·n",
        width=10,
    ),
]
