"""The `microparallel` command: its verbs, and what happens when one of them fails."""

from __future__ import annotations

import itertools
import os
import sys
from typing import Annotated, Any, NoReturn

import typer

from microparallel import __version__
from microparallel.cli import analyze, bench, compare, doctor, draw, learn, report, simulate, train, verify, why
from microparallel.errors import MicroparallelError, RankFailed, UsageError
from microparallel.topology import DO_NOT_SPIN

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Distributed training you can read, run, trust and see.",
    epilog="Start with `microparallel train --ranks 4`; every verb has `--help` with examples.",
)
app.command(name="train", epilog=train.EXAMPLES)(train.train)
app.command(name="compare", epilog=compare.EXAMPLES)(compare.compare)
app.command(name="report", epilog=report.EXAMPLES)(report.report)
app.command(name="analyze", epilog=analyze.EXAMPLES)(analyze.analyze)
app.command(name="draw", epilog=draw.EXAMPLES)(draw.draw)
app.command(name="simulate", epilog=simulate.EXAMPLES)(simulate.simulate)
app.command(name="verify", epilog=verify.EXAMPLES)(verify.verify)
app.command(name="doctor", epilog=doctor.EXAMPLES)(doctor.doctor)
app.command(name="why", epilog=why.EXAMPLES)(why.why)
app.add_typer(bench.app, name="bench")
app.add_typer(learn.app, name="learn")

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
    os.environ.setdefault(*DO_NOT_SPIN)
    try:
        code = typer.main.get_command(app).main(sys.argv[1:], prog_name="microparallel", standalone_mode=False)
    except KeyboardInterrupt:
        code = 130
    except UsageError as error:
        code = _fail(str(error), 2)
    except RankFailed as error:
        # A rank that refuses what it was asked to do needs no traceback, only the reason.
        code = _fail(str(error), 1) if error.refusal is None else _fail(error.refusal, 2)
    except MicroparallelError as error:
        code = _fail(str(error), 1)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        code = _wrong_call(error)
    sys.exit(code if isinstance(code, int) else 0)


def _wrong_call(error: Any) -> int:
    """Show what typer found wrong with the flags in one line, with the value it was given."""
    message = error.format_message()
    for name in getattr(getattr(error, "param", None), "opts", ()):
        if name in sys.argv[:-1] and "Invalid value" in message:
            message = message.replace("Invalid value for", f"{sys.argv[sys.argv.index(name) + 1]!r} is no value for")
    hint = _with_commas(error) or "see --help"
    return _fail(f"{message.strip().rstrip('.')}; {hint}", error.exit_code) if message.strip() else error.exit_code


def _with_commas(error: Any) -> str:
    """How to write several values of a flag, where there were blanks between them."""
    command = getattr(getattr(error, "ctx", None), "command", None)
    lists = [name for option in getattr(command, "params", ()) if option.metavar in _LISTS for name in option.opts]
    for place, word in enumerate(sys.argv):
        values = list(itertools.takewhile(lambda value: not value.startswith("-"), sys.argv[place + 1 :]))
        if word in lists and len(values) > 1:
            return f"write commas between them: {word} {','.join(value.strip(',') for value in values)}"
    return ""


def _fail(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code
