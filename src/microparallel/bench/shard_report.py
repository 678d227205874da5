"""What `bench shard` shows: what a step with parts costs, and what it saves in memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from microparallel.bench import report
from microparallel.bench.engine import AGAIN
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
from microparallel.bench.shard import (
    DDP,
    GRADIENTS,
    NONE,
    OPTIMIZER,
    PARAMETERS,
    PARAMETERS_KEPT,
    PREFETCH,
    TORCH_FSDP,
    TORCH_FSDP_ON_SHM,
    TORCH_ZERO,
    TORCH_ZERO_ON_SHM,
    Measurements,
    Result,
    Timing,
    plain_name,
)
from microparallel.text import count, show_seconds, show_size
from microparallel.trace.parts import Parts

_MOMENTS = 2  # copies of the parameters that AdamW keeps
_KINDS = ("parameters", "gradients", "optimizer")
# By method, what a rank keeps in parts.
_PARTS: dict[str, frozenset[str]] = {
    NONE: frozenset(),
    DDP: frozenset(),
    OPTIMIZER: frozenset({"optimizer"}),
    GRADIENTS: frozenset({"optimizer", "gradients"}),
    TORCH_ZERO: frozenset({"optimizer"}),
    TORCH_ZERO_ON_SHM: frozenset({"optimizer"}),
    **dict.fromkeys((PARAMETERS, PARAMETERS_KEPT, TORCH_FSDP, TORCH_FSDP_ON_SHM), frozenset(_KINDS)),
}


@dataclass(frozen=True, kw_only=True)
class Row(Times):
    """One method on one model; bytes are those of the rank that has most."""

    model: str
    method: str
    ratio_to_torch_zero: float
    ratio_to_torch_fsdp: float | None  # None where torch refused it
    ratio_to_none: float
    parameter_bytes: float
    parameter_bytes_by_formula: float
    gradient_bytes: float  # the most there were at any time of a step
    gradient_bytes_by_formula: float  # without buckets in flight; with the unit in flight where parameters are in parts
    optimizer_bytes: float
    optimizer_bytes_by_formula: float
    sent_bytes: float | None
    sent_bytes_by_formula: float
    parts: Parts | None  # where the time of a recorded step went, as the mean over the ranks
    apart_from_torch_zero: float  # after three steps, as a part of the way that one has come
    use: GpuUse | None = None  # what the method takes of the GPU

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
    width_of_files = 100

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
                "unit_bytes": list(result.units),
                "none_to_itself": self._row(result, NONE + AGAIN).ratio_to_none,
                "torch_zero_to_itself": self._row(result, TORCH_ZERO + AGAIN).ratio_to_torch_zero,
                "torch_fsdp_to_itself": next(
                    (row.ratio_to_torch_fsdp for row in self._rows_of(result) if row.method == TORCH_FSDP + AGAIN), None
                ),
            }
            for result in self.measurements.results
        ]
        return {"models": models, "results": [asdict(row) for row in self.rows]}

    def _row(self, result: Result, method: str) -> Row:
        return next(row for row in self._rows_of(result) if row.method == method)

    def _rows_of(self, result: Result) -> list[Row]:
        return [row for row in self.rows if row.model == result.model]

    def show_body(self, console: Console) -> None:
        """Print three tables for each model, what their columns mean, and what was checked."""
        for result in self.measurements.results:
            console.print(self._heading(result), soft_wrap=True)
            console.print(self.times(result))
            console.print()
            console.print(self.parts(result))
            console.print()
            console.print(self.bytes(result))
            console.print()
            if (table := self.of_gpu(result)) is not None:
                console.print(table)
                console.print()
        group = self.measurements.torch_group
        console.print(f"[dim]{legend([*_TIMES, *_SPENT, *_BYTES, *gpu_columns(self.rows)], group=group)}[/]")
        apart = max(row.apart_from_torch_zero for row in self.rows if not row.method.startswith(NONE))
        console.print(
            "[bold]checked[/]  each method's ranks ended with the same weights, bit for bit;\n"
            f"         after three steps all were where torch-zero was, {apart:.1g} of the way apart at most"
        )

    def times(self, result: Result) -> Table:
        """How long a step takes; what no method can be faster than, and what is chance, is dim."""
        return make_table([*self._name(), *_TIMES], self._rows_of(result), _style)

    def parts(self, result: Result) -> Table:
        """Where the time of a recorded step went, of those methods that can be recorded."""
        rows = [row for row in self._rows_of(result) if row.parts is not None and not row.repeats]
        return make_table([*self._name("recorded"), *_SPENT], rows, _style)

    def bytes(self, result: Result) -> Table:
        """What a rank keeps and sends, each beside its formula; a method that ran twice stands there once."""
        rows = [row for row in self._rows_of(result) if not row.repeats]
        return make_table([*self._name(), *_BYTES], rows, _style)

    def of_gpu(self, result: Result) -> Table | None:
        """What a method takes of the GPU; None where ranks are on the CPU."""
        columns = gpu_columns(self.rows)
        rows = [row for row in self._rows_of(result) if not row.repeats]
        return make_table([*self._name("alone"), *columns], rows, _style) if columns else None

    def _heading(self, result: Result) -> str:
        parameters, samples = show_size(result.parameter_bytes), count(result.batch, "sample")
        cut = f" in {result.accumulate} micro-batches" if result.accumulate > 1 else ""
        steps = count(self._rows_of(result)[0].counted, "step")
        return f"[bold]{result.model}[/]  {result.text}, {parameters} of parameters, {samples} a rank{cut}, {steps}"

    def _name(self, heading: str = "method") -> list[Column[Row]]:
        longest = max(len(f" {row.method}") for row in self.rows)
        return [Column(heading, lambda row: f" {row.method}", width=longest, on_the_left=True)]


def report_on(measurements: Measurements) -> Report:
    """Work out everything that follows from what was measured."""
    results = measurements.results
    rows = [_row(timing, result, measurements.ranks) for result in results for timing in result.timings]
    notes = [note for result in results for note in few_steps(result.model, len(result.timings[0].seconds))]
    dtype = measurements.dtype_of_model
    notes += [note for result in results for note in compared_in_float64(result.model, result.in_float64, dtype)]
    notes += [f"{result.model}: torch refuses {what}" for result in results for what in result.refused]
    return Report(measurements, notes + cores_are_shared(measurements), rows)


def _row(timing: Timing, result: Result, ranks: int) -> Row:
    medians = {other.method.name: statistics.median(other.seconds) for other in result.timings}
    seconds = statistics.median(timing.seconds)
    size, memory = result.parameter_bytes, timing.memory
    name = plain_name(timing.method.name)
    in_parts = {kind: size / ranks if kind in _PARTS[name] else size for kind in _KINDS}
    gathered, in_flight = _units_there(name, result.units)
    return Row(
        model=result.model,
        method=timing.method.name,
        ratio_to_torch_zero=seconds / medians[TORCH_ZERO],
        ratio_to_torch_fsdp=seconds / medians[TORCH_FSDP] if TORCH_FSDP in medians else None,
        ratio_to_none=seconds / medians[NONE],
        parameter_bytes=memory.parameters,
        parameter_bytes_by_formula=in_parts["parameters"] + gathered,
        gradient_bytes=memory.gradients,
        gradient_bytes_by_formula=in_parts["gradients"] + in_flight,
        optimizer_bytes=memory.optimizer,
        optimizer_bytes_by_formula=_MOMENTS * in_parts["optimizer"],
        sent_bytes=timing.sent,
        sent_bytes_by_formula=_times_sent(name, result.accumulate) * (ranks - 1) / ranks * size,
        parts=timing.parts,
        apart_from_torch_zero=timing.apart,
        use=timing.use,
        **times_of(timing.seconds),
    )


def _units_there(method: str, units: Sequence[int]) -> tuple[int, int]:
    """Bytes beside a rank's parts, at most: of units that are whole at a time, and of a unit's gradients in flight."""
    if "parameters" not in _PARTS[method]:
        return 0, 0
    ahead = {PARAMETERS: PREFETCH + 1, PARAMETERS_KEPT: len(units)}.get(method, 1)  # torch's next one is in a buffer
    return max(sum(units[first : first + ahead]) for first in range(len(units))), max(units)


def _times_sent(method: str, microbatches: int) -> int:
    """How often a rank sends (p - 1)/p of the model in a step."""
    times = {
        NONE: 0,
        GRADIENTS: microbatches + 1,  # a reduce-scatter for each, and an all-gather
        PARAMETERS: 3 * microbatches,  # two gathers and a reduce-scatter for each
        PARAMETERS_KEPT: 2 * microbatches,
        TORCH_ZERO: 3,  # an all-reduce of gradients, and broadcasts of parameters
        TORCH_ZERO_ON_SHM: 3,
        TORCH_FSDP: 3 * microbatches,
        TORCH_FSDP_ON_SHM: 3 * microbatches,
    }
    return times.get(method, 2)


def _style(row: Row) -> str | None:
    return "dim" if row.method.startswith(NONE) or row.repeats else None


def _sent(row: Row) -> str:
    return "–" if row.sent_bytes is None else show_size(row.sent_bytes)


def _spent(part: str) -> Callable[[Row], str]:
    return lambda row: "–" if row.parts is None else show_seconds(getattr(row.parts, part))


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
        "÷fsdp",
        lambda row: "–" if row.ratio_to_torch_fsdp is None else f"{row.ratio_to_torch_fsdp:.2f}",
        "step ÷ the step of torch-fsdp: torch's fully_shard on {group}, with our units",
        {"kept": "parameters stay whole from forward to backward (reshard_after_forward=False)"},
        width=6,
    ),
    Column(
        "÷none",
        lambda row: f"{row.ratio_to_none:.2f}",
        "step ÷ the step of none, in which each rank trains alone",
        width=6,
    ),
]
_SPENT: list[Column[Row]] = [
    Column("forward", _spent("forward"), width=8),
    Column("backward", _spent("backward"), width=8),
    Column("optimizer", _spent("optimizer"), width=9),
    Column("exposed", _spent("communicating"), "communication that nothing was computed beside", width=8),
    Column("waiting", _spent("waiting"), "for other ranks, which is not communication", width=8),
    Column("other", _spent("other"), "Python; these six parts are the step, as the mean over the ranks", width=8),
    Column("hidden", _spent("hidden"), "communication behind computation, which is in no sum", width=8),
]
_BYTES: list[Column[Row]] = [
    Column(
        "weights",
        lambda row: show_size(row.parameter_bytes),
        "the most at any time of a step: the rank's own, and what is gathered",
        width=8,
    ),
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
        "weights n, gradients n, AdamW 2n; what is in parts ÷ p; without buckets;\n"
        "where weights are in parts: and two units of weights (kept: all; torch-fsdp: one,\n"
        "since the buffers of its collectives are not counted), and one of gradients",
        width=8,
    ),
    Column("sent", _sent, "bytes that a rank sent in a step, as recorded; torch's own does not tell", width=8),
    Column(
        "by formula",
        lambda row: show_size(row.sent_bytes_by_formula),
        "2(p−1)/p·n; with m micro-batches: shard gradients (m+1)(p−1)/p·n,\n"
        "shard parameters and torch-fsdp 3m(p−1)/p·n, kept 2m(p−1)/p·n;\n"
        "torch-zero, which all-reduces gradients and broadcasts weights: 3(p−1)/p·n",
        width=10,
    ),
]
