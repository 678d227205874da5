"""`microparallel draw`: show a collective or a schedule, in the terminal or as a file."""

from __future__ import annotations

import json as json_format
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.console import Console

from microparallel.cli import flags, programs
from microparallel.cli.flags import require_writable
from microparallel.cli.simulate import summary
from microparallel.drawing import View, coloured, head_of, hops_of, plain, text_lines
from microparallel.drawing import draw as draw_program
from microparallel.errors import ConfigError, MicroparallelError, ProgramError, UsageError
from microparallel.program import Collective, Program
from microparallel.simulator import simulate
from microparallel.text import did_you_mean
from microparallel.trace import Trace, reasons
from microparallel.train.atomic import write_atomically

EXAMPLES = flags.examples(
    ("microparallel draw 1f1b --ranks 4 --microbatches 8", "a pipeline schedule in time; add `--view clock` for ticks"),
    ("microparallel draw ring --ranks 4 --html ring.html", "a page that steps through a ring hop by hop"),
    ("microparallel draw ddp --ranks 4 --layers 8 --buckets 4 --svg ddp.svg", "a figure of DDP's overlapped buckets"),
    ("microparallel draw ring --link 2-3=3", "a ring with one slow link"),
    ("microparallel draw my_schedule.txt", "a schedule of your own, in text form"),
)
_MOST_OPERATIONS = 200_000
_SLOW = 20_000  # operations that take long enough to say so


def _file(what: str) -> Any:
    return typer.Option(metavar="FILE", help=what, rich_help_panel="What to write")


def draw(
    name: programs.Name,
    ranks: programs.Ranks = None,
    microbatches: programs.Microbatches = None,
    stages_per_rank: programs.StagesPerRank = None,
    layers: programs.Layers = None,
    buckets: programs.Buckets = None,
    ranks_per_node: programs.RanksPerNode = None,
    forward: programs.Forward = None,
    backward_input: programs.BackwardInput = None,
    backward_weight: programs.BackwardWeight = None,
    latency: programs.Latency = None,
    seconds_per_byte: programs.SecondsPerByte = None,
    add_seconds_per_byte: programs.AddSecondsPerByte = None,
    bytes_per_value: programs.Bytes = None,
    link: programs.Links = None,
    view: Annotated[
        str | None,
        typer.Option(
            help="timeline, clock (a schedule tick by tick), hops (a collective hop by hop), parts (where time goes).",
            show_default="timeline; hops for a collective without costs",
        ),
    ] = None,
    width: Annotated[
        int | None,
        typer.Option(min=40, help="Columns of the text.", show_default="the terminal's; in a file, what it needs"),
    ] = None,
    html: Annotated[Path | None, _file("A page to explore, in one file.")] = None,
    svg: Annotated[Path | None, _file("A figure.")] = None,
    chrome: Annotated[Path | None, _file("A Chrome trace, which Perfetto opens.")] = None,
    text: Annotated[Path | None, _file("What the terminal would show, without colours.")] = None,
    json: flags.Json = False,
) -> None:
    """Draw a collective or a schedule: who does what when, and what it waits for.

    Without a file to write, it is drawn in the terminal.
    """
    files = {"--html": html, "--svg": svg, "--chrome": chrome, "--text": text}
    wanted = {flag: path for flag, path in files.items() if path is not None}
    _require_files(wanted)
    if text is None and (json or wanted):
        _require_no_text_flags({"--view": view, "--width": width})
    costs = (forward, backward_input, backward_weight, latency, seconds_per_byte, add_seconds_per_byte, bytes_per_value)
    program = programs.load(name, ranks, microbatches, stages_per_rank, layers, buckets, ranks_per_node)
    _require_drawable(program)
    given = any(cost is not None for cost in costs) or bool(link)
    chosen = _view(view, program, costs_given=given)
    wrong = programs.complaint(name, program)
    if wrong is not None and "deadlock" in wrong:
        raise MicroparallelError(f"{name} cannot be drawn: {wrong}")
    with Console(stderr=True).status("drawing") if len(program) > _SLOW else nullcontext():
        try:
            trace = simulate(program, programs.costs_of(program, *costs, links=link))
        except ProgramError as error:
            raise MicroparallelError(f"{name} cannot be drawn: {wrong or error}") from None
        _write(trace, chosen, width, wanted)
        document = _document(trace, wanted) if json else ""
    if json:
        print(document)
    elif wanted:
        print("\n".join([head_of(trace), *(f"wrote {path}" for path in wanted.values())]))
    else:
        _show(trace, chosen, width)
    if wrong is not None:
        raise MicroparallelError(f"{name} is wrong: {wrong}")


def _require_files(wanted: dict[str, Path]) -> None:
    for flag, path in wanted.items():
        require_writable(path, flag)
    if len({path.resolve() for path in wanted.values()}) < len(wanted):
        raise ConfigError(f"{' and '.join(wanted)} name the same file; give each its own")


def _require_no_text_flags(given: dict[str, str | int | None]) -> None:
    for flag, value in given.items():
        if value is not None:
            raise ConfigError(f"{flag} {value} is about the text, which is not drawn here; leave it out, or add --text")


def _require_drawable(program: Program) -> None:
    if len(program) > _MOST_OPERATIONS:
        raise UsageError(
            f"{program.name} has {len(program):,} operations, which nobody can read; at most {_MOST_OPERATIONS:,} are "
            "drawn (microparallel simulate measures larger programs)"
        )


def _view(view: str | None, program: Program, *, costs_given: bool) -> View:
    """The view that was asked for, or the one that shows what was asked for."""
    if view is None:
        return "hops" if isinstance(program.goal, Collective) and not costs_given else "timeline"
    if view not in get_args(View):
        raise ConfigError(f"--view {view}: {did_you_mean(view, get_args(View))}")
    if view not in ("timeline", "parts") and costs_given:
        raise ConfigError(
            f"--view {view} counts steps, whatever they cost; leave out the costs, or try --view timeline"
        )
    return cast(View, view)


def _write(trace: Trace, view: View, width: int | None, wanted: dict[str, Path]) -> None:
    """Draw everything first: either all files are written, or the error comes before the first."""
    drawn: dict[str, str] = {}
    for flag in wanted:
        if flag == "--text":
            drawn[flag] = plain(text_lines(trace, view=view, width=width))
        elif flag != "--chrome":
            drawn[flag] = draw_program(trace, as_="svg" if flag == "--svg" else "html")
    for flag, path in wanted.items():
        try:
            if flag == "--chrome":
                trace.to_chrome(path)
            else:
                write_atomically(path, drawn[flag].encode())
        except OSError as error:
            raise ConfigError(f"{flag} {path} cannot be written: {error.strerror}") from None


def _show(trace: Trace, view: View, width: int | None) -> None:
    """In colour where the terminal has it and wants it; plain in a pipe, and where NO_COLOR is set."""
    console = Console(highlight=False, soft_wrap=True)
    lines = text_lines(trace, view=view, width=width or (console.width if console.is_terminal else None))
    if console.is_terminal and console.color_system and not console.no_color:
        console.print(coloured(lines), end="")
    else:
        print(plain(lines), end="")


def _document(trace: Trace, wanted: dict[str, Path]) -> str:
    why = reasons(trace)
    events = [
        {
            "rank": event.rank,
            "lane": str(event.lane),
            "op": str(event.op),
            "start": event.start,
            "end": event.end,
            "waited": why.get(place),
        }
        for place, event in enumerate(trace.events)
    ]
    document = {**summary(trace), "events": events, "written": [str(path) for path in wanted.values()]}
    if isinstance(trace.followed.goal, Collective):
        document["hops"] = [
            [{"from": message.sender, "to": message.receiver, "op": str(message.receive)} for message in hop.messages]
            for hop in hops_of(trace.followed).hops
        ]
    return json_format.dumps(document)
