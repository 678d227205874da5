"""How `microparallel analyze` shows what it found: tables and bars for people, JSON for scripts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from microparallel.analyze.bottleneck import Verdict
from microparallel.analyze.measure import Findings
from microparallel.analyze.scaling import Scaling, ScalingPoint, scaling_bars
from microparallel.analyze.step_timing import StepTiming
from microparallel.bench.report import (
    Column,
    console_for_results,
    cores_are_shared,
    machine,
    make_table,
    say,
    text_table,
)
from microparallel.simulator.fitted import fit_step
from microparallel.simulator.gathering import Choice, Waited, choices_of, waits_of
from microparallel.text import count, show_number, show_seconds, show_size, time_unit, without_nan
from microparallel.topology import available_cores
from microparallel.trace.parts import Parts, apportion

_BAR, _SHORTEST_BAR = 24, 8  # columns
_GAP = 2  # between two columns
_INDENT = 12  # of what stands behind the words in bold
_MOST_ERROR = 0.2  # of the simulated step, that goes without a remark
_MOST_WAITS, _LEAST_WAIT = 6, 0.01  # rows, and the share of all waits from which on one is shown
_SIGNS = {"forward": "▓", "backward": "█", "communicating": "░", "waiting": "·", "optimizer": "▒", "other": " "}
_HEADINGS = {"communicating": "exposed"}
_IN_WORDS = {"other": "data, Python and logging"}  # for a kind of bottleneck


@dataclass(frozen=True)
class Analysis:
    """All that is to be shown; a run that was only recorded has neither findings nor scalings."""

    title: str
    timing: StepTiming
    verdict: Verdict
    findings: Findings | None = None
    scalings: tuple[Scaling, ...] = ()

    @cached_property
    def waits(self) -> list[Waited]:
        """The gathers and sums of a step whose parameters are gathered on demand, those first that cost most."""
        return sorted(waits_of(self.timing.trace), key=lambda waited: -waited.seconds)

    @cached_property
    def choices(self) -> list[Choice]:
        """What other options would give such a step, by simulation."""
        return choices_of(fit_step(self.timing.trace)) if self.waits else []


def as_json(analysis: Analysis) -> dict[str, Any]:
    """Everything that was found, in plain types."""
    timing, verdict, findings = analysis.timing, analysis.verdict, analysis.findings
    overhead = timing.overhead
    whole: dict[str, Any] = {
        "title": analysis.title,
        "machine": machine(available_cores()),
        "step": {
            "seconds": timing.total,
            "samples": timing.samples,
            "samples_per_second": timing.samples_per_second,
            "every": list(timing.every),
            "ranks": [asdict(one) for one in timing.ranks],
        },
        "overhead": {
            **asdict(overhead),
            "exposed_share": overhead.exposed_share,
            "waiting_share": overhead.waiting_share,
            "bandwidth": overhead.bandwidth,
        },
        "barriers": _barriers_as_json(timing),
        "estimates": [asdict(one) for one in findings.estimates] if findings else [],
        "scaling": [_scaling_as_json(one) for one in analysis.scalings],
        "bottleneck": {
            **asdict(verdict),
            "error": verdict.error,
            "compression": verdict.compression and asdict(verdict.compression),
        },
        "gathering": {
            "waits": [{**asdict(one), "text": str(one)} for one in analysis.waits],
            "choices": [asdict(one) for one in analysis.choices],
        },
        "notes": notes(analysis),
    }
    if findings is not None:
        whole |= {"transport": findings.transport, "device": findings.device}
        whole["roofline"] = {
            "machine": findings.machine and asdict(findings.machine),
            "demand": findings.demand and asdict(findings.demand),
        }
    plain: dict[str, Any] = without_nan(whole)
    return plain


def _barriers_as_json(timing: StepTiming) -> dict[str, Any] | None:
    if timing.phases is None or timing.with_barriers is None:
        return None
    return {"clocks": asdict(timing.phases), "ranks": [asdict(one) for one in timing.with_barriers.ranks]}


def _scaling_as_json(scaling: Scaling) -> dict[str, Any]:
    return {
        "kind": scaling.kind,
        "threads": scaling.threads,
        "points": [
            {
                **asdict(point),
                "samples_per_second": point.samples_per_second,
                "speedup": scaling.speedup(point),
                "efficiency": scaling.efficiency(point),
            }
            for point in scaling.points
        ],
        "remark": scaling.remark,
    }


def show(analysis: Analysis) -> None:
    """Print all of it."""
    console = console_for_results()
    timing, findings = analysis.timing, analysis.findings
    ranks = count(len(timing.ranks), "rank")
    where = f", {ranks}" if findings is None else f", {ranks} on {count(findings.cores, 'core')}: {findings.transport}"
    say(console, where, heading=analysis.title)
    console.print()
    _show_parts(console, timing)
    say(console, str(timing.overhead), heading="overhead", indent=_INDENT)
    _show_barriers(console, timing)
    if analysis.waits:
        _show_waits(console, analysis.waits)
        _show_choices(console, analysis.choices)
    if findings is not None and findings.estimates:
        _show_estimates(console, findings)
    for scaling in analysis.scalings:
        _show_scaling(console, scaling)
    _show_verdict(console, analysis.verdict)
    for note in notes(analysis):
        say(console, note, heading="!", indent=2)


def notes(analysis: Analysis) -> list[str]:
    """Warnings that a reader of the numbers must know."""
    findings = analysis.findings
    found = [] if findings is None else cores_are_shared(findings)
    found += dict.fromkeys(one.remark for one in analysis.scalings if one.remark)
    if (error := analysis.verdict.error) > _MOST_ERROR:
        found.append(f"the simulation is off by {error:.0%}, so take what it says of changes with care")
    return found


# ── the parts ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _show_parts(console: Console, timing: StepTiming) -> None:
    length, unit = time_unit(timing.total)
    speed = f", {timing.samples_per_second:,.0f} samples/s" if timing.samples else ""
    steps = "one step" if len(timing.every) == 1 else f"the median of {len(timing.every)} steps"
    console.print(f"[bold]a step[/]      {show_seconds(timing.total)} ({steps}{speed}); in {unit}:")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("rank", no_wrap=True)
    headings = [_HEADINGS.get(part, part) for part in (*_SIGNS, "hidden")]
    room = console.width - len("rank") - sum(map(len, headings)) - _GAP * (len(headings) + 1)
    columns = min(_BAR, room) if room >= _SHORTEST_BAR else 0
    if columns:
        table.add_column("", no_wrap=True, min_width=columns)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for rank, parts in enumerate(timing.ranks):
        numbers = [show_number(getattr(parts, part) / length) for part in (*_SIGNS, "hidden")]
        table.add_row(str(rank), *[bar(parts, columns)][:columns], *numbers)
    table.add_row("mean", *[""][:columns], *(f"{share:.1f}%" for share in shares_of(timing)), style="bold")
    console.print(table)
    if columns:
        legend = "  ".join(f"{sign} {_HEADINGS.get(part, part)}" for part, sign in _SIGNS.items() if sign.strip())
        console.print(f"[dim]{legend}[/]")
    console.print(
        "[dim]exposed: communication with nothing beside it; what is hidden is in no sum\n"
        "mean: of the whole step, over all ranks; adds up to 100%[/]\n"
    )


def shares_of(timing: StepTiming) -> list[float]:
    """What each part is of the step, in per cent with one decimal, as the mean over the ranks; they add up to 100."""
    whole = sum(one.step for one in timing.ranks)
    if not whole:
        return [0.0] * len(_SIGNS)
    shares = [sum(max(0.0, getattr(one, part)) for one in timing.ranks) / whole for part in _SIGNS]
    return [thousandths / 10 for thousandths in apportion(shares, 1000)]


def bar(parts: Parts, columns: int = _BAR) -> str:
    """One rank's step, in so many signs."""
    shares = [max(0.0, getattr(parts, part)) / parts.step if parts.step else 0.0 for part in _SIGNS]
    return "".join(sign * many for sign, many in zip(_SIGNS.values(), apportion(shares, columns), strict=True))


def _show_barriers(console: Console, timing: StepTiming) -> None:
    if timing.phases is None or timing.with_barriers is None:
        return
    phases, distorted = timing.phases, timing.with_barriers
    console.print()
    say(console, "between the phases, as many measure it, beside what happens:", heading="barriers", indent=_INDENT)
    rows = [
        [name, *map(show_seconds, (*_phases(one), one.optimizer, one.total))]
        for name, one in (("as it is", timing), ("barriers, by events", distorted))
    ]
    clocks = [show_seconds(part) for part in (phases.forward, phases.backward, phases.optimizer, phases.total)]
    rows.append(["barriers, by clocks", *clocks[:2], "–", "–", *clocks[2:]])
    console.print(text_table(("", "forward", "backward", "exposed", "waiting", "optimizer", "step"), rows))
    console.print("[dim]by clocks, communication and waiting are in the phases, and look like work[/]")


def _phases(timing: StepTiming) -> tuple[float, ...]:
    return timing.forward, timing.backward, timing.communication_exposed, timing.waiting


# ── communication ───────────────────────────────────────────────────────────────────────────────────────────────────


def _show_estimates(console: Console, findings: Findings) -> None:
    first = findings.estimates[0]
    costs = f"{show_seconds(first.latency)} and {show_size(first.bandwidth)}/s that were measured here"
    console.print()
    say(
        console,
        f"an all-reduce of {show_size(first.bytes)}, from a latency of {costs}:",
        heading="estimate",
        indent=_INDENT,
    )
    worlds = dict.fromkeys(one.world_size for one in findings.estimates)
    rows = []
    for name in dict.fromkeys(one.algorithm for one in findings.estimates):
        mine = [one for one in findings.estimates if one.algorithm == name]
        measured = next((one.measured for one in mine if one.measured is not None), None)
        rows.append(
            [name, "–" if measured is None else show_seconds(measured), *(show_seconds(one.seconds) for one in mine)]
        )
    console.print(text_table(("algorithm", "measured", *(f"{world} ranks" for world in worlds)), rows))


# ── units that are gathered on demand ───────────────────────────────────────────────────────────────────────────────


def _show_waits(console: Console, waits: list[Waited]) -> None:
    """The gathers and sums that computation waited for longest."""
    costly = [one for one in waits if one.seconds > _LEAST_WAIT * sum(each.seconds for each in waits)][:_MOST_WAITS]
    kinds = [count(sum(one.what == what for one in waits), what) for what in ("gather", "sum")]
    console.print()
    if not costly:
        say(console, f"{' and '.join(kinds)} of units; computation waited for none", heading="units", indent=_INDENT)
        return
    say(console, f"{' and '.join(kinds)}; computation waited longest for:", heading="units", indent=_INDENT)
    columns: list[Column[Waited]] = [
        Column("what", lambda one: str(one).removeprefix("the "), on_the_left=True),
        Column("exposed", lambda one: show_seconds(one.exposed)),
        Column("waiting", lambda one: show_seconds(one.waiting)),
        Column("hidden", lambda one: show_seconds(one.hidden)),
        Column("size", lambda one: show_size(one.bytes)),
    ]
    console.print(make_table(columns, costly))
    others = sum(one.seconds for one in waits) - sum(one.seconds for one in costly)
    if others:
        words = f"the other {len(waits) - len(costly)} together: {show_seconds(others)}"
        console.print(f"[dim]{words}; all are means over the ranks[/]")


def _show_choices(console: Console, choices: list[Choice]) -> None:
    """What other options would give, and what memory they would take."""
    console.print()
    if not choices:
        say(
            console,
            "units were gathered on demand, so no other order can be simulated",
            heading="options",
            indent=_INDENT,
        )
        return
    say(
        console,
        "the same step with others, by simulation; bytes of the largest rank:",
        heading="options",
        indent=_INDENT,
    )
    now = choices[0]

    def size(found: float | None) -> str:
        return "–" if found is None else show_size(found)

    columns: list[Column[Choice]] = [
        Column("prefetch", lambda one: str(one.prefetch)),
        Column("after forward", lambda one: "let go" if one.reshard_after_forward else "kept"),
        Column("overlap", lambda one: "yes" if one.overlap else "no"),
        Column("step", lambda one: show_seconds(one.seconds)),
        Column("÷now", lambda one: f"{one.seconds / now.seconds:.2f}" if now.seconds else "–"),
        Column("exposed", lambda one: show_seconds(one.exposed)),
        Column("weights", lambda one: size(one.weights)),
        Column("memory", lambda one: size(one.memory)),
        Column("sent", lambda one: show_size(one.sent)),
        Column("", lambda one: "now" if one.now else "", on_the_left=True),
    ]
    console.print(make_table(columns, choices, lambda one: "bold" if one.now else None))


# ── scaling and verdict ─────────────────────────────────────────────────────────────────────────────────────────────


def _show_scaling(console: Console, scaling: Scaling) -> None:
    what = "the same batch for all" if scaling.kind == "strong" else "the same batch for each rank"
    threads = count(scaling.threads, "thread")
    console.print(f"\n[bold]{scaling.kind} scaling[/]  {what}; {threads} a rank")
    columns: list[Column[ScalingPoint]] = [
        Column("ranks", lambda point: str(point.ranks)),
        Column("batch", lambda point: str(point.batch)),
        Column("step", lambda point: show_seconds(point.median)),
        Column("samples/s", lambda point: f"{point.samples_per_second:,.0f}"),
        Column("speed-up", lambda point: f"{scaling.speedup(point):.2f}"),
        Column("efficiency", lambda point: f"{scaling.efficiency(point):.0%}"),
    ]
    console.print(make_table(columns, scaling.points))
    console.print(scaling_bars(scaling), highlight=False)


def _show_verdict(console: Console, verdict: Verdict) -> None:
    console.print(f"\n[bold]bottleneck[/]  [bold yellow]{_IN_WORDS.get(verdict.kind, verdict.kind)}[/]")
    for reason in verdict.reasons:
        say(console, reason, indent=_INDENT)
    advised = [change for change in dict.fromkeys((verdict.advice, verdict.compression)) if change is not None]
    if not advised:
        say(console, "no change that was simulated would help by 2 % or more", indent=_INDENT)
    for heading, change in zip(("try", "or"), advised, strict=False):
        how = "at most" if verdict.kind == "other" and change == verdict.advice else "by simulation"
        gain = f"{change.speed - 1:.0%} more samples a second, {how}"
        say(console, f"{change.advice}: {gain}", heading=heading, indent=_INDENT)
    others = ", ".join(f"{change.name} {change.speed - 1:+.0%}" for change in verdict.changes)
    if others:
        say(console, f"each simulated by itself, in samples a second: {others}", indent=_INDENT, style="dim")
    times = f"{show_seconds(verdict.simulated)}, the recorded one {show_seconds(verdict.measured)}"
    say(console, f"the simulated step takes {times}: off by {verdict.error:.1%}", indent=_INDENT, style="dim")
