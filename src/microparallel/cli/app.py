"""The `microparallel` command: its verbs, and what happens when one of them fails."""

from __future__ import annotations

import itertools
import os
import sys
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from microparallel import __version__
from microparallel.broken_pipe import quiet_broken_pipe
from microparallel.errors import (
    CheckpointError,
    CommsTimeout,
    GradientError,
    MicroparallelError,
    PeerLost,
    RankFailed,
    UsageError,
)
from microparallel.topology import BEFORE_TORCH
from microparallel.topology.limits import limit_behind

# Each verb is a module of this package, and its line in the help the first one of the verb's own help.
VERBS = {
    "train": "Train a model on one rank or many.",
    "compare": "Run the same job as a single process and with each strategy, and show how far apart they end.",
    "report": "Write a page about a run: loss, throughput, what each rank did in a step, and where its time went.",
    "analyze": "Train a few steps, and say where their time went; or read it from a run that was recorded.",
    "draw": "Draw a collective or a schedule: who does what when, and what it waits for.",
    "simulate": "Walk through programs with a clock for every rank, and say what they would cost.",
    "verify": "Check a program: messages match, no rank waits for ever, and its goal is reached.",
    "doctor": "Examine this machine: versions, cores, GPUs, which transports work and how fast, and what is wrong.",
    "checkpoints": "List a run's checkpoints, verify them, take weights out as one plain file or put them in.",
    "chaos": "Break a training run on purpose, by a seed, and compare it with one that was left alone.",
    "why": "Say why ranks hang, died or disagree: which rank, in which call, at which line of your code.",
    "bench": "Measure this machine, side by side with torch.",
    "studio": "Show the course, the playground and this machine's runs in a browser.",
    "learn": "The exercises of the course: fill in what is missing, and have it checked on real ranks.",
}


def load(verb: str) -> Any:
    """Import a verb's module and return its command."""
    module = import_module(f"microparallel.cli.{verb}")
    parent = typer.Typer(rich_markup_mode="markdown")
    if isinstance(group := getattr(module, "app", None), typer.Typer):
        parent.add_typer(group, name=verb)
    else:
        parent.command(name=verb, epilog=module.EXAMPLES)(getattr(module, verb))
    return typer.main.get_group(parent).commands[verb]


class Verbs(TyperGroup):
    """Imports a verb's module when the verb is called; until then a command with nothing but its help stands for it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {verb: TyperCommand(verb, help=line) for verb, line in VERBS.items()}

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Print the help: typer's own way to do so imports a lot."""
        from microparallel.cli import front_page

        front_page.show(self, ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that the arguments name."""
        if args[0] in VERBS:
            self.commands[args[0]] = load(args[0])
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Verbs,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Distributed training you can read, run, trust and see.",
    epilog="Start with `microparallel train --ranks 4`; every verb has `--help` with examples.",
)

_REFUSALS = {  # what typer's validator calls a refusal → in our words
    "greater_than_equal": "must be at least {ge:g}",
    "less_than_equal": "must be at most {le:g}",
    "int_parsing": "a whole number is needed",
    "int_from_float": "a whole number is needed",
    "float_parsing": "a number is needed",
}
# Errors of ranks that say who and where themselves: a traceback would show lines of ours alone.
_SAYS_WHERE = (CheckpointError, CommsTimeout, GradientError, MicroparallelError, PeerLost)
_LISTS = ("NAMES", "SIZES")  # how the help calls values with commas between them


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"microparallel {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> NoReturn:
    """Run the command line. Exit code 0: fine; 1: the work failed; 2: the call was wrong; 130: interrupted."""
    os.environ.update(BEFORE_TORCH | os.environ)
    try:
        with quiet_broken_pipe():
            code = typer.main.get_command(app).main(sys.argv[1:], prog_name="microparallel", standalone_mode=False)
    except KeyboardInterrupt:
        code = 130
    except UsageError as error:
        code = _fail(str(error), 2)
    except RankFailed as error:
        # A rank that refuses what it was asked to do needs no traceback, only the reason.
        code = _fail(_text(error), 1) if error.refusal is None else _fail(error.refusal, 2)
    except MicroparallelError as error:
        code = _fail(_text(error), 1)
    except Exception as error:
        if hasattr(error, "format_message"):
            code = _wrong_call(error)
        elif (limit := limit_behind(error)) is not None:
            code = _fail(limit, 1)
        else:
            raise
    sys.exit(code if isinstance(code, int) else 0)


_RENAMED = {
    "--chunks": "--stages-per-rank",
    "--dtype": "--precision",
    "--bucket-mb": "--bucket-cap-mb",
    "--lr-schedule": "--schedule-lr",
}


def _wrong_call(error: Any) -> int:
    """Show what typer found wrong with the flags in one line, with the value it was given."""
    message = _about_value(error) or error.format_message()
    for name in getattr(getattr(error, "param", None), "opts", ()):
        if name in sys.argv[:-1] and "Invalid value" in message:
            message = message.replace("Invalid value for", f"{sys.argv[sys.argv.index(name) + 1]!r} is no value for")
    if (renamed := _RENAMED.get(getattr(error, "option_name", ""))) is not None:
        message = f"{error.option_name} is {renamed} now"
    hint = _with_commas(error) or "see --help"
    return _fail(f"{message.strip().rstrip('.')}; {hint}", error.exit_code) if message.strip() else error.exit_code


def _about_value(error: Any) -> str:
    """Which value a flag cannot have, and why; nothing where the validator beneath typer has not been asked."""
    found: list[Any] = getattr(error.__cause__, "errors", list)()
    if not found or found[0]["type"] not in _REFUSALS:
        return ""
    reason = _REFUSALS[found[0]["type"]].format(**found[0].get("ctx", {}))
    return f"{error.param.opts[0]} {found[0]['input']}: {reason}"


def _with_commas(error: Any) -> str:
    """How to write several values of a flag, where there were blanks between them."""
    command = getattr(getattr(error, "ctx", None), "command", None)
    lists = [name for option in getattr(command, "params", ()) if option.metavar in _LISTS for name in option.opts]
    for place, word in enumerate(sys.argv):
        values = list(itertools.takewhile(lambda value: not value.startswith("-"), sys.argv[place + 1 :]))
        if word in lists and len(values) > 1:
            return f"write commas between them: {word} {','.join(value.strip(',') for value in values)}"
    return ""


def _text(error: MicroparallelError) -> str:
    """What an error says, and below it what was noted about it."""
    text = str(error)
    if isinstance(error, RankFailed) and type(error.__cause__) in _SAYS_WHERE:
        text = f"rank {error.rank} {error.reason}"
    return "\n".join([text.rstrip("\n"), *getattr(error, "__notes__", ())])


def _fail(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code
