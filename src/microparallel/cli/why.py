"""`microparallel why`: why do ranks hang, why did they die, where do they disagree?"""

from __future__ import annotations

import json as json_format
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from microparallel.cli import flags
from microparallel.errors import ConfigError
from microparallel.observe import folders
from microparallel.observe.diagnosis import Finding, diagnose
from microparallel.observe.flight_file import Snapshot
from microparallel.observe.folders import gather
from microparallel.observe.place import Place
from microparallel.text import show_age

EXAMPLES = flags.examples(
    ("microparallel why", "all worlds of yours that run now, the newest first"),
    ("microparallel why 4711", "the world of that process: any of its ranks, or the process that started them"),
    ("microparallel why runs/20250131-093000-mlp", "a training run, also one whose ranks have died"),
)


def why(
    world: Annotated[
        str | None,
        typer.Argument(metavar="[PID|RUN]", help="A process, or the folder of a run.", show_default="what runs now"),
    ] = None,
    after: Annotated[
        float, typer.Option(min=0, help="How many seconds a rank may wait before that is worth a word.")
    ] = 1.0,
    json: flags.Json = False,
) -> int:
    """Say why ranks hang, died or disagree: which rank, in which call, at which line of your code.

    Every rank keeps its last calls in a small file, which stays readable when the rank is stopped or killed. This looks
    at the files of all ranks, at their processes, and at the stacks of those that are in no call. It works for
    everything that runs on microparallel, plain torch programs on its backend included, and disturbs nothing.

    A world whose rank 0 has waited for a minute says so by itself (MICROPARALLEL_WHY_AFTER=30: for half of one; 0:
    never). With MICROPARALLEL_FLIGHT=0 nothing is recorded.

    The exit code is 0 if something was found, and 1 if nothing is wrong.
    """
    reports = _reports(world, after)
    if json:
        print(json_format.dumps([as_json(report) for report in reports], indent=2))
    elif not reports:
        print("no world of yours runs on this machine")
    else:
        for report in reports:
            show(report, Console(highlight=False))
    return 0 if any(report.findings for report in reports) else 1


def _reports(world: str | None, after: float) -> list[Report]:
    if world is None:
        return [report_on(folder, after) for folder in folders.running_worlds()]
    if (ended := _in_order(Path(world))) is not None:
        return [Report(Path(world), ended=ended)]
    return [report_on(_folder(world), after)]


def _in_order(run: Path) -> str | None:
    """How a training run ended whose ranks have left no last words, since they had none; None if it did not."""
    try:
        summary = json_format.loads((run / "summary.json").read_text(encoding="utf-8"))
        steps = f"{summary['steps']} steps"
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if (run / "flight").exists():
        return None
    early = "was stopped, and ended in order" if summary.get("stopped_early") else "finished"
    return f"{run}: {early} after {steps}; nothing to explain"


def _folder(world: str) -> Path:
    path = Path(world)
    for folder in (path / "flight", path):
        if folder.is_dir() and folders.flight_files(folder):
            return folder
    if path.is_dir():
        raise ConfigError(f"{world} has no flight files: its ranks have all ended in order, or recorded nothing")
    if not world.isdigit():
        raise ConfigError(f"{world} is neither a process nor the folder of a run; `microparallel why` alone lists all")
    folder_of_process = folders.folder_of_process(int(world))
    if folder_of_process is None:
        raise ConfigError(
            f"process {world} belongs to no world of microparallel's: it has not joined one, has left it in order, or "
            "runs with MICROPARALLEL_FLIGHT=0"
        )
    return folder_of_process


# ── one world ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Report:
    """One world, and what is wrong with it; or the words for a run that has ended in order."""

    folder: Path
    ranks: Sequence[Snapshot] = ()
    findings: Sequence[Finding] = ()
    ended: str = ""


def report_on(folder: Path, after: float) -> Report:
    """Read what the ranks of a world have left in its folder, and look at their processes.

    A rank that has waited for less than `after` seconds is not mentioned.
    """
    ranks = gather(folder)
    return Report(folder, ranks, diagnose(ranks, after))


# ── what is shown of it: sentences, and a table of the ranks ────────────────────────────────────────────────────────

_INDENT = "  "
_GAP = "  "  # between two columns
_MOST = 60  # columns of a cell
_LEAST = 10  # that a cell keeps where there is no room
_MAY_SHRINK = ("in", "state", "where")


def as_json(report: Report) -> dict[str, Any]:
    """A report, in plain types."""
    return {
        "folder": str(report.folder),
        "findings": [
            {
                "kind": finding.kind,
                "ranks": finding.ranks,
                "file": finding.place.file if finding.place is not None else None,
                "line": finding.place.line if finding.place is not None else None,
                "text": finding.text,
            }
            for finding in report.findings
        ],
        "ranks": [_row(one) for one in report.ranks],
    }


def show(report: Report, console: Console) -> None:
    """Print a report; a terminal's lines are no longer than it is wide, those of a file as long as they come."""
    width = console.width if console.is_terminal else None
    if report.ended:
        _print(console, report.ended, width)
    first = next((one for one in report.ranks if one.pid), None)
    if first is None:
        return
    began = show_age(time.time() - first.began)
    console.print(f"[bold]{len(report.ranks)} ranks[/], began {began} ago, started by process {first.parent}")
    for sentence in [finding.text for finding in report.findings] or [_nothing_wrong(report.ranks)]:
        _print(console, sentence, width, _INDENT)
    header, *lines = _table(report.ranks, width)
    console.print(header, markup=False, style="dim", soft_wrap=True)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    if any(place is not None and place.is_ours for place in map(_place, report.ranks)):
        _print(console, "(a place of microparallel's own: no line of your code led there)", width, _INDENT)


def _print(console: Console, sentence: str, width: int | None, indent: str = "") -> None:
    if width is not None:
        further = f"{indent}    "
        sentence = textwrap.fill(
            *(sentence, width), initial_indent=indent, subsequent_indent=further, break_on_hyphens=False
        )
    else:
        sentence = indent + sentence
    console.print(sentence, markup=False, soft_wrap=True)


def _nothing_wrong(ranks: Sequence[Snapshot]) -> str:
    if all(one.ending in ("finished", "closed") for one in ranks):
        return "every rank has finished: nothing to explain"
    return "nothing is wrong: every rank makes progress"


def _table(ranks: Sequence[Snapshot], width: int | None) -> list[str]:
    """A line of headings and one for each rank; in so many columns, places are without their folders."""
    rows = [_row(one) for one in ranks]
    if width is not None:
        for row, one in zip(rows, ranks, strict=True):
            place = _place(one)
            row["where"] = None if place is None else place.short
    columns = {
        name: [name, *("" if row[name] is None else str(row[name]) for row in rows)]
        for name in rows[0]
        if width is None or any(row[name] is not None for row in rows)
    }
    widths = {name: min(_MOST, max(map(len, cells))) for name, cells in columns.items()}
    for name in _MAY_SHRINK:
        over = 0 if width is None else sum(widths.values()) + len(_INDENT) + len(_GAP) * (len(widths) - 1) - width
        if over > 0 and name in widths:
            widths[name] = max(min(_LEAST, widths[name]), widths[name] - over)
    lines = zip(*([_cut(cell, widths[name]) for cell in cells] for name, cells in columns.items()), strict=True)
    return [(_INDENT + _GAP.join(line)).rstrip() for line in lines]


def _cut(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else f"{text[: width - 1]}…"


def _row(one: Snapshot) -> dict[str, Any]:
    """A rank, in the words of the table."""
    call, place = one.current, _place(one)
    since = None if call is None else show_age((call.end or one.now) - call.since)
    return {
        "rank": one.rank,
        "pid": one.pid or None,
        "state": _state(one),
        "in": one.doing or None if call is None else call.text,
        "since": since,
        "where": None if place is None else f"{place.file}:{place.line}",
        "step": one.step,
    }


def _place(one: Snapshot) -> Place | None:
    """Where a rank is, as far as that is known: in its call, in its code, or where its last call was."""
    place = one.user_place if one.current is None else one.current.place
    return one.last.place if place is None and one.last is not None else place


def _state(one: Snapshot) -> str:
    if one.ending in ("finished", "closed", "raised", "broke off"):
        return f"{one.ending} ({one.end_reason})" if one.end_reason else one.ending
    if one.state == "ended" or one.ending == "exited":
        return f"died ({one.end_reason or one.exit})" if one.end_reason or one.exit else "died"
    if not one.pid and one.host:
        return f"on {one.host}"
    if one.state == "running":
        return "running" if one.current is None else "waits"
    return one.state
