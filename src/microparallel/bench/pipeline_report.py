"""What the measured steps of pipelines say: how near each is to the ideal, and to torch's same schedule."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich import box
from rich.table import Table

from microparallel.bench.engine import chance_speaks, cores_are_shared, quartiles
from microparallel.bench.output import console_for_results, machine, say, show_step
from microparallel.bench.pipeline import Look, Measurements, Timing
from microparallel.schedules import build
from microparallel.simulator import simulate
from microparallel.text import count, show_seconds, show_size
from microparallel.trace import Trace
from microparallel.trace.parts import Shares, apportion


@dataclass(frozen=True)
class Row:
    """One schedule, run by us or by torch: times in seconds; what only our pipelines tell is None for torch's."""

    schedule: str
    by_torch: bool
    label: str
    counted: int
    seconds: float  # the median
    lower_quartile: float
    upper_quartile: float
    fastest: float
    slowest: float
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
class Report:
    """All rows, torch's below ours of the same name."""

    measurements: Measurements
    rows: list[Row]
    formula: Formula | None
    zero_bubble: Against | None
    notes: list[str]


def report_on(measurements: Measurements) -> Report:
    """Work out everything that follows from what was measured."""
    ideals = {schedule: ideal_of(schedule, look, measurements) for schedule, look in measurements.looks.items()}
    schedules = list(measurements.looks)
    timings = sorted(measurements.timings, key=lambda one: (schedules.index(one.method.schedule), one.method.by_torch))
    rows = [_row(timing, ideals[timing.method.schedule], measurements) for timing in timings]
    ours = {row.schedule: row for row in rows if not row.by_torch}
    return Report(measurements, rows, _formula(ours, measurements), _zero_bubble(ours), _notes(measurements, rows))


def ideal_of(schedule: str, look: Look, measurements: Measurements) -> Trace:
    """What the simulator makes of the measured stage times, if messages took no time."""
    program = build(schedule, measurements.ranks, measurements.microbatches)
    return simulate(program, look.stage_times.costs)


def _row(timing: Timing, ideal: Trace, measurements: Measurements) -> Row:
    method, look = timing.method, measurements.looks[timing.method.schedule]
    torchs = [
        statistics.median(other.seconds)
        for other in measurements.timings
        if other.method.by_torch and other.method.schedule == method.schedule
    ]
    lower, seconds, upper = quartiles(timing.seconds)
    return Row(
        schedule=method.schedule,
        by_torch=method.by_torch,
        label=method.label,
        counted=len(timing.seconds),
        seconds=seconds,
        lower_quartile=lower,
        upper_quartile=upper,
        fastest=min(timing.seconds),
        slowest=max(timing.seconds),
        ideal_seconds=ideal.makespan,
        ratio_to_ideal=seconds / ideal.makespan,
        ratio_to_torch=seconds / torchs[0] if torchs else None,
        bubble=None if method.by_torch else look.bubble,
        ideal_bubble=ideal.bubble_fraction,
        activations=None if method.by_torch else look.activations,
        activations_of_program=look.activations_of_program,
        saved_bytes=timing.saved_bytes,
        shares=None if method.by_torch else look.shares,
        loss_apart=timing.apart.loss,
        gradient_apart=timing.apart.gradient,
    )


def _formula(ours: dict[str, Row], measurements: Measurements) -> Formula | None:
    named = [name for name in ("gpipe", "1f1b") if name in ours]
    if not named:
        return None
    count = measurements.microbatches
    one = measurements.looks[named[0]].stage_times.busiest_rank
    ideal = one * (count + measurements.ranks - 1)
    return Formula(one * count, ideal, {name: ours[name].seconds / ideal for name in named})


def _zero_bubble(ours: dict[str, Row]) -> Against | None:
    if not {"zb-h1", "1f1b"} <= set(ours):
        return None
    split, whole = ours["zb-h1"], ours["1f1b"]
    return Against((split.ideal_seconds, whole.ideal_seconds), (split.seconds, whole.seconds))


def _notes(measurements: Measurements, rows: list[Row]) -> list[str]:
    """What a reader must know about these numbers."""
    notes = [f"torch refuses {schedule}: {reason}" for schedule, reason in measurements.refused.items()]
    for row in rows:
        if row.activations not in (None, row.activations_of_program):
            notes.append(
                f"{row.schedule} held {row.activations} activations on its ranks, and its program "
                f"{row.activations_of_program}"
            )
    notes += chance_speaks(measurements.model, rows[0].counted)
    return notes + cores_are_shared(measurements.ranks_here, measurements.cores, measurements.device)


# How the results of `bench pp` are shown: as a table for people, as JSON for scripts.


@dataclass(frozen=True)
class _Column:
    heading: str
    width: int
    cell: Callable[[Row], str]
    text: str  # what it means


def as_json(report: Report) -> dict[str, Any]:
    """Everything that was measured and worked out, in plain types."""
    measured = report.measurements
    steps = {(timing.method.schedule, timing.method.by_torch): list(timing.seconds) for timing in measured.timings}
    stage_times = {schedule: asdict(look.stage_times) for schedule, look in measured.looks.items()}
    return {
        "machine": machine(measured.cores),
        "ranks": measured.ranks,
        "transport": measured.transport,
        "device": measured.device,
        "model": {"name": measured.model, "text": measured.text, "microbatches": measured.microbatches},
        "results": [asdict(row) | {"steps": steps[row.schedule, row.by_torch]} for row in report.rows],
        "stage_times": stage_times,
        "formula": None if report.formula is None else asdict(report.formula),
        "zb_h1_against_1f1b": None if report.zero_bubble is None else asdict(report.zero_bubble),
        "notes": report.notes,
    }


def show(report: Report) -> None:
    """Print the table, what its columns mean, what follows from it, and what a reader must know."""
    console = console_for_results(_WIDTH_OF_FILES)
    measured = report.measurements
    ranks, cores = count(measured.ranks, "rank"), count(measured.cores, "core")
    where = f"{measured.transport}, float32 on {measured.device}, torch {torch.__version__}"
    say(console, f", {ranks} on {cores}: {where}", heading="pipeline step")
    console.print()
    steps = count(report.rows[0].counted, "step")
    say(console, f"{measured.text}, {steps}", heading=measured.model, indent=len(measured.model) + 2)
    console.print(table_of(report, console.width))
    console.print()
    console.print(f"[dim]{caption(report, console.width)}[/]")
    for line in conclusions(report):
        console.print(line)
    for note in report.notes:
        say(console, note, heading="!", indent=2)


def table_of(report: Report, width: int) -> Table:
    """One row for each schedule, torch's below ours; our fastest one is green."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    columns = _columns(report, width)
    for column in columns:
        left = column.heading == "schedule"
        table.add_column(column.heading, min_width=column.width, justify="left" if left else "right", no_wrap=True)
    fastest = min(row.seconds for row in report.rows if not row.by_torch)
    for row in report.rows:
        style = "dim" if row.by_torch else "green" if row.seconds == fastest else None
        table.add_row(*(column.cell(row) for column in columns), style=style)
    return table


def caption(report: Report, width: int) -> str:
    """What the columns mean."""
    group = "gloo" if report.measurements.transport == "shm" else report.measurements.transport
    explained = [column for column in _columns(report, width) if column.text]
    longest = max(len(column.heading) for column in explained)
    lines = []
    for column in explained:
        first, *others = column.text.format(group=group).splitlines()
        lines += [f"{column.heading:<{longest}}  {first}", *(f"{'':<{longest}}  {line}" for line in others)]
    return "\n".join(lines)


def conclusions(report: Report) -> list[str]:
    """What follows from the table, one line or two for each."""
    found = []
    if (formula := report.formula) is not None:
        ranks, pieces = report.measurements.ranks, report.measurements.microbatches
        first, *others = (f"{name} {ratio:.2f}" for name, ratio in formula.ratios.items())
        ratios = ", ".join([first.replace(" ", " takes ") + " of that", *others])
        found.append(
            f"[bold]compute[/]  {show_seconds(formula.compute_seconds)} of forwards and backwards on the busiest rank, "
            f"nothing sent;\n         × ({pieces} + {ranks} − 1) ÷ {pieces} = {show_seconds(formula.seconds)}: {ratios}"
        )
    if (against := report.zero_bubble) is not None:
        ideally, measured = _difference(*against.simulated), _difference(*against.measured)
        found.append(f"[bold]zb-h1[/]    ideally {ideally} against 1f1b, here {measured};\n         {_halves(report)}")
    loss, gradient = (max(getattr(row, name) for row in report.rows) for name in ("loss_apart", "gradient_apart"))
    found.append(
        "[bold]checked[/]  loss and gradients of every row are those of a single process, but for\n"
        f"         {loss:.1g} and {gradient:.1g} of their size"
    )
    return found


def _halves(report: Report) -> str:
    """Cutting a backward in two is not free: what one micro-batch's takes whole, and in halves."""
    times = report.measurements.looks["zb-h1"].stage_times
    whole, halves = sum(times.backward), sum(times.backward_input) + sum(times.backward_weight)
    return f"a micro-batch's backwards take {show_seconds(whole)} whole, {show_seconds(halves)} in halves"


def _difference(split: float, whole: float) -> str:
    sign = "−" if split < whole else "+"
    return f"{sign}{show_seconds(abs(split - whole))} ({sign}{100 * abs(split / whole - 1):.1f} %)"


def _columns(report: Report, width: int) -> list[_Column]:
    """Those that fit into so many columns of a terminal."""
    columns = [
        _Column("schedule", 11, _name, ""),
        _Column("step", 7, lambda row: _step(row)[0], _STEP),
        _Column("quartiles", 9, lambda row: _step(row)[1], "half of the steps lie between these"),
        _Column("ideal", 7, _ideal, _IDEAL),
        _Column("÷ideal", 6, _over_ideal, ""),
        _Column("÷torch", 6, _over_torch, _TORCH),
        _Column("bubble", 9, _bubble, _BUBBLE),
        _Column("work/comm/wait", 14, _shares, _SHARES),
        _Column("held", 5, _held, _HELD),
        _Column("saved", 7, _saved, _SAVED),
    ]
    if not any(row.by_torch for row in report.rows):
        columns = [column for column in columns if column.heading != "÷torch"]
    for heading in _LEAST_NEEDED:
        if _width_of(columns, report) > width:
            columns = [column for column in columns if column.heading != heading]
    if all(column.heading != "ideal" for column in columns):
        columns = [replace(one, text=_OVER_IDEAL) if one.heading == "÷ideal" else one for one in columns]
    return columns


def _width_of(columns: Sequence[_Column], report: Report) -> int:
    widths = [max(column.width, *(len(column.cell(row)) for row in report.rows)) for column in columns]
    return sum(widths) + _GAP * (len(columns) - 1)


_GAP = 2  # between two columns
_LEAST_NEEDED = ("ideal", "work/comm/wait", "quartiles", "saved")  # where there is no room
_WIDTH_OF_FILES = 100
_STEP = "forward and backward of all micro-batches, no optimizer: the median"
_IDEAL = """\
the stages' computations, timed by themselves in the same run,
put through the simulator with messages that take no time"""
_OVER_IDEAL = """\
step ÷ ideal: the stages' computations, timed by themselves in
the same run, put through the simulator with messages that take
no time"""
_TORCH = """\
step ÷ that of torch.distributed.pipelining's same schedule on
{group}, which is the row below"""
_BUBBLE = """\
the share of a traced step that even the busiest rank does not
compute; in brackets the ideal's"""
_SHARES = """\
percent of a traced step that a rank computes, only communicates,
and waits; the mean of all ranks"""
_HELD = """\
the most activations that a rank keeps at once, each of one
micro-batch and stage: measured=in the program"""
_SAVED = "the most that autograd keeps for backward on a rank, less weights"


def _name(row: Row) -> str:
    return " torch" if row.by_torch else row.schedule


def _step(row: Row) -> list[str]:
    return show_step(row.seconds, row.lower_quartile, row.upper_quartile, row.counted)


def _ideal(row: Row) -> str:
    return "" if row.by_torch else show_seconds(row.ideal_seconds)


def _over_ideal(row: Row) -> str:
    return f"{row.ratio_to_ideal:.2f}"


def _over_torch(row: Row) -> str:
    return "" if row.by_torch else "–" if row.ratio_to_torch is None else f"{row.ratio_to_torch:.2f}"


def _bubble(row: Row) -> str:
    return "" if row.bubble is None else f"{100 * row.bubble:.0f} ({100 * row.ideal_bubble:.0f}) %"


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


def _saved(row: Row) -> str:
    return show_size(float(f"{max(row.saved_bytes):.3g}"))
