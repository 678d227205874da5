"""`microparallel why`: why does it hang?"""

from __future__ import annotations

import json as json_format
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from microparallel.cli import options
from microparallel.errors import ConfigError
from microparallel.flight import Finding, Snapshot, diagnose, folders, gather
from microparallel.flight.words import seconds

EXAMPLES = options.examples(
    ("microparallel why", "all worlds of yours that run now, the newest first"),
    ("microparallel why 4711", "the world of that process: any of its ranks, or whoever started them"),
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
    json: options.Json = False,
) -> int:
    """Say why ranks hang, died or disagree: which rank, in which call, at which line of your code.

    Every rank keeps its last calls in a small file, which stays readable when the rank is stopped or killed. This looks
    at the files of all ranks, at their processes, and at the stacks of those that are in no call. It works for
    everything that runs on microparallel, plain torch programs on its backend included, and disturbs nothing.

    A world whose rank 0 has waited for a minute says so by itself (MICROPARALLEL_WHY_AFTER=30: for half of one; 0:
    never). With MICROPARALLEL_FLIGHT=0 nothing is recorded.

    The exit code is 0 if something was found, and 1 if nothing is wrong.
    """
    chosen = folders.running_worlds() if world is None else [_folder(world)]
    reports = [_Report(folder, after) for folder in chosen]
    if json:
        print(json_format.dumps([report.as_json() for report in reports], indent=2))
    elif not reports:
        print("no world of yours runs on this machine")
    else:
        for report in reports:
            report.show(Console(highlight=False, soft_wrap=True))
    return 0 if any(report.findings for report in reports) else 1


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


class _Report:
    """One world, and what is wrong with it."""

    def __init__(self, folder: Path, patience: float) -> None:
        self.folder = folder
        self.ranks: list[Snapshot] = gather(folder)
        self.findings: list[Finding] = diagnose(self.ranks, patience)

    def show(self, console: Console) -> None:
        first = next((one for one in self.ranks if one.pid), None)
        if first is None:
            return
        began = seconds(time.time() - first.began)
        console.print(f"[bold]{len(self.ranks)} ranks[/], began {began} ago, started by process {first.parent}")
        for finding in self.findings:
            console.print(f"  {finding.text}", markup=False)
        if not self.findings:
            console.print("  nothing is wrong: every rank makes progress")
        rows = [_row(one) for one in self.ranks]
        shown = [list(rows[0]), *([_short(value) for value in row.values()] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        for line in shown:
            text = "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
            console.print(f"  {text}", markup=False, style="dim" if line is shown[0] else None)

    def as_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "findings": [
                {
                    "kind": finding.kind,
                    "ranks": finding.ranks,
                    "file": finding.place.file if finding.place is not None else None,
                    "line": finding.place.line if finding.place is not None else None,
                    "text": finding.text,
                }
                for finding in self.findings
            ],
            "ranks": [_row(one) for one in self.ranks],
        }


def _short(value: object, most: int = 60) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _row(one: Snapshot) -> dict[str, Any]:
    """A rank, in the words of the table."""
    call = one.current
    place = one.here if call is None else call.place
    if place is None and one.last is not None:
        place = one.last.place
    since = None if call is None else seconds((call.end or one.now) - call.since)
    return {
        "rank": one.rank,
        "pid": one.pid or None,
        "state": _state(one),
        "in": one.doing or None if call is None else call.text,
        "since": since,
        "where": None if place is None else f"{place.file}:{place.line}",
        "step": one.step,
    }


def _state(one: Snapshot) -> str:
    if one.ending in ("finished", "closed", "raised", "broke off"):
        return f"{one.ending} ({one.last_words})" if one.last_words else one.ending
    if one.state == "ended" or one.ending == "exited":
        return f"died ({one.last_words or one.exit})" if one.last_words or one.exit else "died"
    if one.state == "running":
        return "running" if one.current is None else "waits"
    return one.state
