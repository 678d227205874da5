"""`microparallel learn`: the exercises of the course."""

from __future__ import annotations

import json as json_format
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group
from rich.markdown import Markdown
from rich.syntax import Syntax

from microparallel.cli import flags, learn_view
from microparallel.errors import ConfigError
from microparallel.learn.catalogue import EXERCISES, Exercise, find_exercise
from microparallel.learn.checking import Checker
from microparallel.learn.holes import solved
from microparallel.learn.verdict import Step, Verdict
from microparallel.learn.workspace import Workspace

EXAMPLES = flags.examples(
    ("microparallel learn init", "copy the exercises to my_work/"),
    ("microparallel learn", "watch my_work/: each time a file is saved it is checked"),
    ("microparallel learn check ring-all-reduce", "check one exercise now"),
    ("microparallel learn hint ring-all-reduce", "a hint; ask again for the next, which says more"),
)
app = typer.Typer(
    rich_markup_mode="markdown",
    help="The exercises of the course: fill in what is missing, and have it checked on real ranks.",
    epilog=EXAMPLES,
)

Folder = Annotated[Path, typer.Option(help="Where your work is.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="An exercise; `learn list` shows them.")]
MaybeName = Annotated[str | None, typer.Argument(metavar="[NAME]", help="An exercise.", show_default="the current one")]
_DEFAULT = Path("my_work")


@app.callback(invoke_without_command=True, epilog=EXAMPLES)
def watch(context: typer.Context, folder: Folder = _DEFAULT) -> int | None:
    """The exercises of the course: fill in what is missing, and have it checked on real ranks.

    Without a word behind it, `learn` watches your work and checks the current exercise each time you save it. The keys:
    n next, h hint, l list, c check, r reset, q quit. Where you were is remembered in progress.txt.
    """
    if context.invoked_subcommand is not None:
        return None
    workspace = Workspace(folder)
    if not workspace.exists:
        raise ConfigError(f"there are no exercises in {folder}: `microparallel learn init` puts them there")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _check(workspace, _current(workspace), json=False)
    from microparallel.cli.learn_watch import Watch

    return Watch(workspace).run()


@app.command(epilog=flags.examples(("microparallel learn init --folder mine", "to mine/ instead of my_work/")))
def init(folder: Folder = _DEFAULT) -> int:
    """Copy the exercises to my_work/. Files that are there already are left as they are."""
    workspace = Workspace(folder)
    new = workspace.start()
    if not new:
        learn_view.say(
            learn_view.unbroken(f"all {len(EXERCISES)} exercises are in {folder}/ already; nothing was changed")
        )
    else:
        learn_view.say(learn_view.unbroken(f"{len(new)} exercises are now in ", (f"{folder}/", "bold")))
    exercise = workspace.current
    if exercise is not None:
        learn_view.say(
            learn_view.unbroken(
                "begin with ", (str(workspace.path(exercise)), "bold"), ", and run: microparallel learn"
            )
        )
    return 0


@app.command(name="list", epilog=flags.examples(("microparallel learn list --json", "for scripts")))
def list_exercises(folder: Folder = _DEFAULT, json: flags.Json = False) -> int:
    """List the exercises, and say which of them have passed."""
    workspace = Workspace(folder)
    if json:
        print(json_format.dumps([_row(workspace, exercise) for exercise in EXERCISES], indent=2))
    else:
        learn_view.console().print(learn_view.exercises(workspace))
        if not workspace.exists:
            learn_view.say(
                learn_view.unbroken(f"none of them is in {folder}/ yet: microparallel learn init puts them there")
            )
    return 0


@app.command(epilog=flags.examples(("microparallel learn check 1f1b", "exit code 0 if it is right, 1 if not")))
def check(
    name: MaybeName = None,
    folder: Folder = _DEFAULT,
    json: flags.Json = False,
) -> int:
    """Run your code on real ranks and say what is wrong with it, in the words of the lesson."""
    workspace = Workspace(folder)
    return _check(workspace, _current(workspace) if name is None else find_exercise(name), json)


@app.command(epilog=flags.examples(("microparallel learn hint hooks --step 2", "the second of three")))
def hint(
    name: MaybeName = None,
    step: Annotated[int | None, typer.Option(min=1, max=3, help="Which hint.", show_default="the next")] = None,
    folder: Folder = _DEFAULT,
) -> int:
    """Show a hint. There are three, and each says more than the one before."""
    workspace = Workspace(folder)
    exercise = _current(workspace) if name is None else find_exercise(name)
    number = step or min(workspace.hints.get(exercise.name, 0) + 1, 3)
    console = learn_view.console()
    console.print(f"[bold]{exercise.name}[/], hint {number} of 3", highlight=False)
    console.print(Markdown(exercise.hints[number - 1]))
    if workspace.exists:
        workspace.note_hint(exercise, number)
    return 0


@app.command(epilog=flags.examples(("microparallel learn reset gpipe --yes", "do not ask")))
def reset(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    folder: Folder = _DEFAULT,
) -> int:
    """Put an exercise back as it was at first. What you wrote is kept beside it."""
    workspace, exercise = Workspace(folder), find_exercise(name)
    path = workspace.require(exercise)
    if not yes and not learn_view.confirm(f"put {path} back as it was at first? (yours is kept beside it)"):
        print("nothing was changed")
        return 1
    backup = workspace.reset(exercise)
    print(f"{path} is as it was at first; yours is {backup}")
    return 0


@app.command(epilog=flags.examples(("microparallel learn solution hooks --show", "also before yours has passed")))
def solution(
    name: Name,
    show: Annotated[bool, typer.Option("--show", help="Also if yours has not passed yet.")] = False,
    folder: Folder = _DEFAULT,
) -> int:
    """Show our solution, once yours has passed."""
    workspace, exercise = Workspace(folder), find_exercise(name)
    if exercise.name not in workspace.passed and not show:
        raise ConfigError(
            f"{exercise.name} has not passed yet: `microparallel learn hint {exercise.name}` helps, "
            "and --show shows the solution all the same"
        )
    text = solved(exercise.solution.read_text("utf-8"))
    console = learn_view.console()
    if console.is_terminal:
        console.print(Syntax(text, "python", background_color="default"))
    else:
        print(text, end="")  # into a file or a pipe: as it is, with no line broken
    return 0


def _current(workspace: Workspace) -> Exercise:
    exercise = workspace.current
    return EXERCISES[-1] if exercise is None else exercise


def _check(workspace: Workspace, exercise: Exercise, json: bool) -> int:
    path = workspace.require(exercise)
    with Checker() as checker:
        verdict = checker.check(exercise, path) if json else _check_aloud(checker, exercise, path)
    if verdict.passed:
        workspace.note_passed(exercise)
    if json:
        print(json_format.dumps(verdict.to_dict() | {"file": str(path)}, indent=2))
    else:
        learn_view.say(learn_view.conclusion(verdict, exercise, workspace))
    return 0 if verdict.passed else 1


def _check_aloud(checker: Checker, exercise: Exercise, path: Path) -> Verdict:
    console = learn_view.console()
    learn_view.say(Group(learn_view.heading(exercise, path), ""), console)
    with console.status("starting ranks …") as status:

        def show(step: Step) -> None:
            console.print(learn_view.step(step))
            status.update("checking …")

        return checker.check(exercise, path, show)


def _row(workspace: Workspace, exercise: Exercise) -> dict[str, object]:
    return {
        "name": exercise.name,
        "track": exercise.track,
        "title": exercise.title,
        "lesson": f"docs/{exercise.lesson}.md",
        "file": str(workspace.path(exercise)),
        "exists": workspace.path(exercise).exists(),
        "passed": exercise.name in workspace.passed,
        "hints": workspace.hints.get(exercise.name, 0),
        "current": exercise == workspace.current,
    }
