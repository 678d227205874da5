"""What `bench compress` shows: what each method sends and learns, and how long its steps take over each link."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from microparallel.bench import report
from microparallel.bench.compress import AGAIN, NONE, Learned, Measurements, Result, Timing
from microparallel.bench.report import Column, Times, cores_are_shared, few_steps, legend, make_table, times_of
from microparallel.bench.settings import TRANSPORT, injected_link
from microparallel.text import count, show_seconds, show_size, without_nan
from microparallel.topology import Link
from microparallel.trace import Difference

_AIM = 0.1  # the error, in either direction, that a good prediction stays within


@dataclass(frozen=True, kw_only=True)
class Row(Times):
    """One method over one link."""

    model: str
    method: str
    link: str
    ratio_to_none: float
    predicted_seconds: float | None
    error: float | None  # how much too long the prediction is, as a share of what was measured

    @property
    def repeats(self) -> bool:
        """Whether it is a method that stands in another row, too."""
        return self.method.endswith(AGAIN)


@dataclass(frozen=True)
class Report(report.Report[Measurements]):
    """All rows, model by model and link by link."""

    title = "training step with compressed gradients"
    width_of_files = 100

    rows: list[Row]

    def details(self) -> dict[str, Any]:
        """The models with what each method sends and learns, and every row with its steps."""
        models = [
            {
                "name": result.model,
                "text": result.text,
                "batch": result.batch,
                "gradient_bytes": result.gradient_bytes,
                "train_steps": result.train_steps,
                "loss_at_first": result.loss_at_first,
                "methods": [asdict(learned) for learned in result.learned],
            }
            for result in self.measurements.results
        ]
        whole: dict[str, Any] = without_nan({"models": models, "results": [asdict(row) for row in self.rows]})
        return whole

    def show_body(self, console: Console) -> None:
        """Print for each model what is sent and learned, a table for each link, and what their columns mean."""
        for result in self.measurements.results:
            console.print(self._heading(result), soft_wrap=True)
            console.print(self.learned(result))
            console.print()
            for link in dict.fromkeys(timing.link for timing in result.timings):
                console.print(self.times(result, link))
                console.print()
        console.print(f"[dim]{legend(_LEARNED)}\n{legend(_TIMES)}[/]")
        predicted = [row.error for row in self.rows if row.error is not None]
        if predicted:
            typical = statistics.median(map(abs, predicted))
            within = sum(abs(error) <= _AIM for error in predicted)
            console.print(
                f"[bold]predicted[/]  typically off by {typical:.1%}; within {_AIM:.0%}: {within} of {len(predicted)}"
            )
        console.print("[bold]checked[/]    each method's ranks ended with the same weights, bit for bit")

    def learned(self, result: Result) -> Table:
        """What each method sends and learns; one that ran twice stands there once."""
        name: Column[Learned] = Column("method", lambda one: f" {one.method}", width=self._longest, on_the_left=True)
        rows = [one for one in result.learned if not one.method.endswith(AGAIN)]
        steps = count(result.train_steps, "step")
        columns = [name, *_LEARNED, Column(f"loss after {steps}", _loss)]
        return make_table(columns, rows)

    def times(self, result: Result, link: str) -> Table:
        """How long a step takes over one link."""
        rows = [row for row in self.rows if (row.model, row.link) == (result.model, link)]
        heading = describe_link(link, self.measurements.transport)
        name: Column[Row] = Column(heading, lambda row: f" {row.method}", width=self._longest, on_the_left=True)
        return make_table([name, *_TIMES], rows, lambda row: "dim" if row.repeats else None)

    def _heading(self, result: Result) -> str:
        gradients, samples = show_size(result.gradient_bytes), count(result.batch, "sample")
        text = f"{result.text}, {gradients} of gradients, {samples} a rank, loss {result.loss_at_first:.3f} at first"
        return f"[bold]{result.model}[/]  {text}"

    @property
    def _longest(self) -> int:
        links = {row.link for row in self.rows}
        headings = [len(describe_link(link, self.measurements.transport)) for link in links]
        return max(*headings, *(len(f" {row.method}") for row in self.rows))


def describe_link(name: str, transport: str) -> str:
    """A link in the heading of a table: `over 100mbit (1.00 ms)`, `over shm`."""
    link: Link | None = injected_link(name)
    if link is None:
        return f"over {transport if name == TRANSPORT else name}"
    return f"over {name}" if not link.latency or "+" in name else f"over {name} ({show_seconds(link.latency)})"


def report_on(measurements: Measurements) -> Report:
    """Work out everything that follows from what was measured."""
    results = measurements.results
    rows = [_row(timing, result) for result in results for timing in result.timings]
    fewest = {result.model: min(len(timing.seconds) for timing in result.timings) for result in results}
    notes = [note for model, counted in fewest.items() for note in few_steps(model, counted)]
    return Report(measurements, notes + cores_are_shared(measurements), rows)


def _row(timing: Timing, result: Result) -> Row:
    seconds = statistics.median(timing.seconds)
    [plain] = [other for other in result.timings if (other.method, other.link) == (NONE, timing.link)]
    predicted = timing.predicted
    return Row(
        model=result.model,
        method=timing.method,
        link=timing.link,
        ratio_to_none=seconds / statistics.median(plain.seconds),
        predicted_seconds=predicted,
        error=None if predicted is None else Difference("step", predicted, seconds).error,
        **times_of(timing.seconds),
    )


def _loss(learned: Learned) -> str:
    return f"{learned.loss:.3f}" if math.isfinite(learned.loss) else "[red]not finite[/]"


def _error(row: Row) -> str:
    if row.error is None:
        return "–"
    return f"[{'green' if abs(row.error) <= _AIM else 'yellow'}]{row.error:+.1%}[/]"


_LEARNED: list[Column[Learned]] = [
    Column("sent", lambda one: show_size(one.sent), "bytes that a rank sent in a step, counted", width=8),
    Column(
        "by formula",
        lambda one: show_size(one.sent_by_formula),
        "2(p−1)/p of a payload that is summed, p−1 payloads of one that is gathered;\n"
        "and 2(p−1)/p of what is left alone, since it is small",
        width=10,
    ),
]
_TIMES: list[Column[Row]] = [
    Column(
        "step",
        lambda row: show_seconds(row.seconds),
        "forward, backward and AdamW: the median; half of the steps lie between the quartiles",
        width=8,
    ),
    Column("quartiles", Times.show_quartiles, width=11),
    Column(
        "÷none",
        lambda row: f"{row.ratio_to_none:.2f}",
        "step ÷ the step of none, whose gradients are sent as they are",
        {"again": "the same method once more: its ratio to itself is chance"},
        width=6,
    ),
    Column(
        "predicted",
        lambda row: "–" if row.predicted_seconds is None else show_seconds(row.predicted_seconds),
        "a step that was recorded over links without delay, and each sum's program\nsimulated on this one",
        width=9,
    ),
    Column("error", _error, width=6),
]
