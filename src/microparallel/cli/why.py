"""`microparallel why`: why does it hang?"""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from microparallel.cli import options
from microparallel.cli.why_report import Report, as_json, report_on, show
from microparallel.errors import ConfigError
from microparallel.flight import folders

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
    reports = _reports(world, after)
    if json:
        print(json_format.dumps([as_json(report) for report in reports], indent=2))
    elif not reports:
        print("no world of yours runs on this machine")
    else:
        for report in reports:
            show(report, Console(highlight=False))
    return 0 if any(report.findings for report in reports) else 1


def _reports(world: str | None, patience: float) -> list[Report]:
    if world is None:
        return [report_on(folder, patience) for folder in folders.running_worlds()]
    if (ended := _in_order(Path(world))) is not None:
        return [Report(Path(world), ended=ended)]
    return [report_on(_folder(world), patience)]


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
