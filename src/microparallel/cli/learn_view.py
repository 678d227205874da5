"""What `microparallel learn` shows: a verdict, a list, a bar."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.prompt import Confirm
from rich.table import Table
from rich.text import Text

from microparallel.learn.catalogue import EXERCISES, Exercise
from microparallel.learn.verdict import Step, Verdict
from microparallel.learn.workspace import Workspace

_TRACKS = {
    "data_parallel": "Data parallelism",
    "pipeline": "Pipeline parallelism",
    "sharding": "Sharding",
    "fewer_bytes": "Fewer bytes",
    "surviving": "Surviving",
    "capstones": "Capstones",
}


def console() -> Console:
    """One that leaves words as they are."""
    return Console(highlight=False)


def say(what: RenderableType, on: Console | None = None) -> None:
    """Print; what is `unbroken` goes on beyond the last column, and the terminal folds it."""
    (on or console()).print(Group(what), crop=False)  # rich copies a text that stands alone, and would fold it


def unbroken(*parts: str | tuple[str, str], style: str = "") -> Text:
    """A line with a command or a path, which can be copied from a narrow terminal, too: no line is begun in it."""
    return Text.assemble(*parts, style=style, no_wrap=True, overflow="ignore")


def confirm(question: str) -> bool:
    """Ask the learner; no answer, as at the end of the input, means no."""
    try:
        return Confirm.ask(question, default=False)
    except EOFError:
        return False


def heading(exercise: Exercise, path: Path) -> RenderableType:
    """The exercise, its file and its lesson."""
    return Group(
        Text.assemble((exercise.name, "bold"), f" · {exercise.title}"),
        unbroken(f"{path} · lesson: docs/{exercise.lesson}.md", style="dim"),
    )


def step(one: Step) -> RenderableType:
    """One thing that was looked at."""
    mark = ("✓ ", "bold green") if one.passed else ("✗ ", "bold red")
    return Text.assemble(mark, one.title, (f"  {one.note}" if one.note else "", "dim"))


def conclusion(verdict: Verdict, exercise: Exercise, workspace: Workspace) -> RenderableType:
    """What came of a check, and what to do now."""
    following = workspace.next_after(exercise)
    todo: list[RenderableType]
    if not verdict.passed:
        todo = [unbroken(f"for a hint: microparallel learn hint {exercise.name}", style="dim")]
    elif following is None:
        todo = [progress(workspace), Text("that was the last one: you have written it all yourself")]
    else:
        ours = unbroken(f"ours, to compare: microparallel learn solution {exercise.name}", style="dim")
        ahead = unbroken("next: ", (following.name, "bold"), f" · {workspace.path(following)}")
        todo = [progress(workspace), ours, ahead]
    return Group(outcome(verdict), *todo)


def outcome(verdict: Verdict) -> RenderableType:
    """What came of a check."""
    parts: list[RenderableType] = []
    if verdict.printed.strip():
        parts += ["", Text("your code printed:", "dim"), Padding(Text(verdict.printed.strip()), (0, 2))]
    if verdict.passed:
        parts += ["", Text(f"{verdict.exercise} passed", "bold green") + Text(f" in {verdict.seconds:.1f} s", "dim")]
    else:
        parts += ["", Padding(Text(verdict.message), (0, 2)), ""]
    return Group(*parts)


def progress(workspace: Workspace, width: int = 34) -> RenderableType:
    """How many exercises have passed, as a bar."""
    done = sum(exercise.name in workspace.passed for exercise in EXERCISES)
    full = round(width * done / len(EXERCISES))
    return Text.assemble(("━" * full, "green"), ("━" * (width - full), "dim"), f" {done} of {len(EXERCISES)}")


def exercises(workspace: Workspace) -> RenderableType:
    """All of them, track by track."""
    parts: list[RenderableType] = []
    for track, members in groupby(EXERCISES, key=lambda exercise: exercise.track):
        table = Table.grid(padding=(0, 2))
        for exercise in members:
            table.add_row(_mark(workspace, exercise), Text(exercise.name, "bold"), Text(exercise.title))
        parts += [Text(_TRACKS[track], "bold underline"), table, ""]
    return Group(*parts, progress(workspace))


def _mark(workspace: Workspace, exercise: Exercise) -> Text:
    if exercise.name in workspace.passed:
        return Text("✓", "bold green")
    return Text("▶", "bold yellow") if exercise == workspace.current else Text("·", "dim")
