"""What `bench pp` shows: how near each schedule is to the ideal, and to torch's same schedule."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from microparallel.bench import report
from microparallel.bench.engine import AGAIN
from microparallel.bench.gpu_use import GpuUse
from microparallel.bench.pipeline import Measurements, Timing
from microparallel.bench.report import (
    Column,
    Times,
    compared_in_float64,
    cores_are_shared,
    few_steps,
    fitting,
    gpu_columns,
    legend,
    make_table,
    say,
    times_of,
)
from microparallel.schedules import build
from microparallel.simulator import simulate
from microparallel.text import count, show_seconds, show_size
from microparallel.trace import Trace
from microparallel.trace.parts import Shares, apportion


@dataclass(frozen=True, kw_only=True)
class Row(Times):
    """One schedule, run by us or by torch; what only our pipelines tell is None for torch's."""

    schedule: str
    by_torch: bool
    label: str
    ideal_seconds: float  # the measured stage times, simulated without communication
    ratio_to_ideal: float
    ratio_to_torch: float | None  # None where torch has no such schedule
    bubble: float | None
    ideal_bubble: float
    activations: tuple[int, ...] | None  # the most at once, of each rank
    activations_of_program: tuple[int, ...]
    saved_bytes: tuple[int, ...]  # for backward: the most at once, of each rank
    shares: tuple[Shares, ...] | None  # of each rank
    loss_apart: float  # from that of a single process
    gradient_apart: float
    again: bool = False  # the same method once more
    use: GpuUse | None = None  # what the method takes of the GPU


@dataclass(frozen=True)
class Against:
    """Is zb-h1 faster than 1f1b: in theory, and here?"""

    simulated: tuple[float, float]  # seconds of zb-h1, and of 1f1b
    measured: tuple[float, float]


@dataclass(frozen=True)
class Formula:
    """The textbook's ideal for gpipe and 1f1b, where all stages take equally long."""

    compute_seconds: float  # of all micro-batches, on the busiest rank, without a message
    seconds: float  # × (m + p − 1) / m
    ratios: dict[str, float]  # of the schedules that it is for


@dataclass(frozen=True)
class Report(report.Report[Measurements]):
    """All rows, torch's below ours of the same name."""

    title = "pipeline step"
    width_of_files = 100

    rows: list[Row]
    formula: Formula | None
    zero_bubble: Against | None

    def details(self) -> dict[str, Any]:
        """The model, every row with its steps, the stages' times, and what follows from them."""
        measured = self.measurements
        return {
            "model": {"name": measured.model, "text": measured.text, "microbatches": measured.microbatches},
            "results": [asdict(row) for row in self.rows],
            "stage_times": {schedule: asdict(seen.stage_times) for schedule, seen in measured.traced.items()},
            "formula": None if self.formula is None else asdict(self.formula),
            "zb_h1_against_1f1b": None if self.zero_bubble is None else asdict(self.zero_bubble),
        }

    def show_body(self, console: Console) -> None:
        """Print the table, what its columns mean, and what follows from it."""
        measured = self.measurements
        steps = count(self.rows[0].counted, "step")
        say(console, f"{measured.text}, {steps}", heading=measured.model, indent=len(measured.model) + 2)
        console.print(self.table(console.width))
        console.print()
        console.print(f"[dim]{self.legend(console.width)}[/]")
        for line in self.conclusions():
            console.print(line)

    def table(self, width: int) -> Table:
        """One row for each schedule, torch's below ours; our fastest one is green."""
        fastest = min(row.seconds for row in self.rows if not row.by_torch and not row.again)

        def style(row: Row) -> str | None:
            return "dim" if row.by_torch or row.again else "green" if row.seconds == fastest else None

        return make_table(self._columns(width), self.rows, style)

    def legend(self, width: int) -> str:
        """What the columns mean that a terminal of this width has room for."""
        return legend(self._columns(width), group=self.measurements.torch_group)

    def _columns(self, width: int) -> list[Column[Row]]:
        shown = fitting([*_COLUMNS, *gpu_columns(self.rows)], self.rows, width)
        if all(column.heading != "ideal" for column in shown):  # then another column explains what that is
            shown = [replace(one, meaning=_OVER_IDEAL) if one.heading == "÷ideal" else one for one in shown]
        return shown

    def conclusions(self) -> list[str]:
        """What follows from the table, one line or two for each."""
        found = []
        if (formula := self.formula) is not None:
            ranks, pieces = self.measurements.ranks, self.measurements.microbatches
            first, *others = (f"{name} {ratio:.2f}" for name, ratio in formula.ratios.items())
            ratios = ", ".join([first.replace(" ", " takes ") + " of that", *others])
            found.append(
                f"[bold]compute[/]  {show_seconds(formula.compute_seconds)} of forwards and backwards on the busiest "
                f"rank, nothing sent;\n"
                f"         × ({pieces} + {ranks} − 1) ÷ {pieces} = {show_seconds(formula.seconds)}: {ratios}"
            )
        if (against := self.zero_bubble) is not None:
            ideally, here = _difference(*against.simulated), _difference(*against.measured)
            found.append(f"[bold]zb-h1[/]    ideally {ideally} against 1f1b, here {here};\n         {self._halves()}")
        loss, gradient = (max(getattr(row, name) for row in self.rows) for name in ("loss_apart", "gradient_apart"))
        found.append(
            "[bold]checked[/]  loss and gradients of every row are those of a single process, but for\n"
            f"         {loss:.1g} and {gradient:.1g} of their size"
        )
        return found

    def _halves(self) -> str:
        """Cutting a backward in two is not free: what one micro-batch's takes whole, and in halves."""
        times = self.measurements.traced["zb-h1"].stage_times
        whole, halves = sum(times.backward), sum(times.backward_input) + sum(times.backward_weight)
        return f"a micro-batch's backwards take {show_seconds(whole)} whole, {show_seconds(halves)} in halves"


def _difference(split: float, whole: float) -> str:
    sign = "−" if split < whole else "+"
    return f"{sign}{show_seconds(abs(split - whole))} ({sign}{100 * abs(split / whole - 1):.1f} %)"


# ── from measurements to rows ───────────────────────────────────────────────────────────────────────────────────────


def report_on(measurements: Measurements) -> Report:
    """Work out everything that follows from what was measured."""
    ideals = {schedule: _ideal_of(schedule, measurements) for schedule in measurements.traced}
    schedules = list(measurements.traced)
    timings = sorted(
        measurements.timings,
        key=lambda one: (schedules.index(one.method.schedule), one.method.by_torch, one.method.again),
    )
    rows = [_row(timing, ideals[timing.method.schedule], measurements) for timing in timings]
    ours = {row.schedule: row for row in rows if not row.by_torch and not row.again}
    return Report(measurements, _notes(measurements, rows), rows, _formula(ours, measurements), _zero_bubble(ours))


def _ideal_of(schedule: str, measurements: Measurements) -> Trace:
    """What the simulator makes of the measured stage times, if messages took no time."""
    program = build(schedule, measurements.ranks, measurements.microbatches)
    return simulate(program, measurements.traced[schedule].stage_times.costs)


def _row(timing: Timing, ideal: Trace, measurements: Measurements) -> Row:
    method, seen = timing.method, measurements.traced[timing.method.schedule]
    torchs = [
        statistics.median(other.seconds)
        for other in measurements.timings
        if other.method.by_torch and not other.method.again and other.method.schedule == method.schedule
    ]
    seconds = statistics.median(timing.seconds)
    return Row(
        schedule=method.schedule,
        by_torch=method.by_torch,
        label=method.label,
        ideal_seconds=ideal.makespan,
        ratio_to_ideal=seconds / ideal.makespan,
        ratio_to_torch=seconds / torchs[0] if torchs else None,
        bubble=None if method.by_torch else seen.bubble,
        ideal_bubble=ideal.bubble_fraction,
        activations=None if method.by_torch else seen.activations,
        activations_of_program=seen.activations_of_program,
        saved_bytes=timing.saved_bytes,
        shares=None if method.by_torch else seen.shares,
        loss_apart=timing.apart.loss,
        gradient_apart=timing.apart.gradient,
        again=method.again,
        use=timing.use,
        **times_of(timing.seconds),
    )


def _formula(ours: dict[str, Row], measurements: Measurements) -> Formula | None:
    named = [name for name in ("gpipe", "1f1b") if name in ours]
    if not named:
        return None
    count = measurements.microbatches
    one = measurements.traced[named[0]].stage_times.busiest_rank
    ideal = one * (count + measurements.ranks - 1)
    return Formula(one * count, ideal, {name: ours[name].seconds / ideal for name in named})


def _zero_bubble(ours: dict[str, Row]) -> Against | None:
    if not {"zb-h1", "1f1b"} <= set(ours):
        return None
    split, whole = ours["zb-h1"], ours["1f1b"]
    return Against((split.ideal_seconds, whole.ideal_seconds), (split.seconds, whole.seconds))


def _notes(measurements: Measurements, rows: list[Row]) -> list[str]:
    notes = [f"torch refuses {schedule}: {reason}" for schedule, reason in measurements.refused.items()]
    for row in rows:
        if row.activations not in (None, row.activations_of_program):
            notes.append(
                f"{row.schedule} held {row.activations} activations on its ranks, and its program "
                f"{row.activations_of_program}"
            )
    if measurements.device == "cuda" and measurements.torch_group == "gloo":
        notes.append("gloo sends from main memory alone: torch's activations go through pinned copies there")
    notes += compared_in_float64(measurements.model, measurements.in_float64, measurements.dtype_of_model)
    return notes + few_steps(measurements.model, rows[0].counted) + cores_are_shared(measurements)


# ── the columns ─────────────────────────────────────────────────────────────────────────────────────────────────────

_OVER_IDEAL = """\
step ÷ ideal: the stages' computations, timed by themselves in
the same run, put through the simulator with messages that take
no time"""


def _name(row: Row) -> str:
    return (" torch" if row.by_torch else row.schedule) + AGAIN * row.again


def _over_torch(row: Row) -> str:
    return "" if row.by_torch and not row.again else "–" if row.ratio_to_torch is None else f"{row.ratio_to_torch:.2f}"


def _shares(row: Row) -> str:
    if row.shares is None:
        return ""
    together = [(one.computing, one.communicating, one.waiting) for one in row.shares]
    means = [sum(share) / len(together) for share in zip(*together, strict=True)]
    return " / ".join(f"{part:>2}" for part in apportion(means, 100))


def _held(row: Row) -> str:
    if row.activations is None:
        return ""
    same = "=" if row.activations == row.activations_of_program else "≠"
    return f"{max(row.activations)}{same}{max(row.activations_of_program)}"


_COLUMNS: list[Column[Row]] = [
    Column("schedule", _name, width=11, on_the_left=True),
    Column(
        "step",
        lambda row: show_seconds(row.seconds),
        "forward and backward of all micro-batches, no optimizer: the median",
        width=7,
    ),
    Column("quartiles", Times.show_quartiles, "half of the steps lie between these", left_out=3),
    Column(
        "ideal",
        lambda row: "" if row.by_torch else show_seconds(row.ideal_seconds),
        "the stages' computations, timed by themselves in the same run,\n"
        "put through the simulator with messages that take no time",
        width=7,
        left_out=1,
    ),
    Column("÷ideal", lambda row: f"{row.ratio_to_ideal:.2f}"),
    Column(
        "÷torch",
        _over_torch,
        "step ÷ that of torch.distributed.pipelining's same schedule on\n{group}, which is the row below",
    ),
    Column(
        "bubble",
        lambda row: "" if row.bubble is None else f"{100 * row.bubble:.0f} ({100 * row.ideal_bubble:.0f}) %",
        "the share of a traced step that even the busiest rank does not\ncompute; in brackets the ideal's",
        width=9,
    ),
    Column(
        "work/comm/wait",
        _shares,
        "percent of a traced step that a rank computes, only communicates,\nand waits; the mean of all ranks",
        left_out=2,
    ),
    Column(
        "held",
        _held,
        "the most activations that a rank keeps at once, each of one\nmicro-batch and stage: measured=in the program",
        width=5,
    ),
    Column(
        "saved",
        lambda row: show_size(float(f"{max(row.saved_bytes):.3g}")),
        "the most that autograd keeps for backward on a rank, less weights",
        width=7,
        left_out=4,
    ),
]
