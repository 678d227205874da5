"""`microparallel draw`: show a collective or a schedule, in the terminal or as a file."""

from __future__ import annotations

import json as json_format
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.console import Console

from microparallel.cli import flags, programs
from microparallel.cli.flags import require_writable, takes
from microparallel.cli.simulate import summary
from microparallel.drawing import View, head_of, hops_of, plain, text_lines
from microparallel.drawing import draw as draw_program
from microparallel.errors import ConfigError, MicroparallelError, ProgramError
from microparallel.files.atomic import write_atomically
from microparallel.program import Collective, Program
from microparallel.simulator import simulate
from microparallel.text import did_you_mean
from microparallel.trace import Trace, reasons

EXAMPLES = flags.examples(
    ("microparallel draw 1f1b --ranks 4 --microbatches 8", "a pipeline schedule in time; add `--view clock` for ticks"),
    ("microparallel draw ring --ranks 4 --html ring.html", "a page that steps through a ring hop by hop"),
    ("microparallel draw ddp --ranks 4 --layers 8 --buckets 4 --svg ddp.svg", "a figure of DDP's overlapped buckets"),
    ("microparallel draw ring --link 2-3=3", "a ring with one slow link"),
    ("microparallel draw my_schedule.txt", "a schedule of your own, in text form"),
    (
        "microparallel draw gpipe 1f1b --memory --activation-bytes 4 --svg memory.svg",
        "two schedules, with the bytes that each rank holds",
    ),
)
_SLOW = 20_000  # operations that take long enough to say so


def _file(what: str) -> Any:
    return typer.Option(metavar="FILE", help=what, rich_help_panel="What to write")


@takes(programs.ProgramAndCostFlags)
def draw(
    given: dict[str, Any],
    *,
    names: programs.Names,
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
) -> int:
    """Draw a collective or a schedule: who does what when, and what it waits for.

    Without a file to write, it is drawn in the terminal. Several schedules are drawn one below the other; an option,
    such as --buckets, then goes to those that take it.
    """
    files = {"--html": html, "--svg": svg, "--chrome": chrome, "--text": text}
    wanted = {flag: path for flag, path in files.items() if path is not None}
    _require_files(wanted)
    if text is None and (json or wanted):
        _require_no_text_flags({"--view": view, "--width": width})
    loaded = programs.load_all(names, given)
    _require_one(loaded, {"--chrome": chrome})
    for program in loaded:
        programs.require_drawable(program, "microparallel simulate measures larger programs")
    memory = programs.memory_wanted(given, loaded)
    chosen = _view(view, loaded, costs_given=programs.costs_given(given), memory=memory)
    complaints = {name: programs.complaint(name, program) for name, program in zip(names, loaded, strict=True)}
    with Console(stderr=True).status("drawing") if sum(map(len, loaded)) > _SLOW else nullcontext():
        traces = [
            _simulated(name, program, complaints[name], given) for name, program in zip(names, loaded, strict=True)
        ]
        _write(traces, chosen, width, wanted, memory=memory)
        documents = [_document(trace, wanted, memory=memory) for trace in traces] if json else []
    if json:
        print(json_format.dumps(documents if len(documents) > 1 else documents[0]))
    elif wanted:
        print("\n".join([*map(head_of, traces), *(f"wrote {path}" for path in wanted.values())]))
    else:
        programs.show(traces, chosen, width, memory=memory)
    for name, wrong in complaints.items():
        if wrong is not None:
            raise MicroparallelError(f"{name} is wrong: {wrong}")
    return 0


def _simulated(name: str, program: Program, wrong: str | None, given: dict[str, Any]) -> Trace:
    if wrong is not None and "deadlock" in wrong:
        raise MicroparallelError(f"{name} cannot be drawn: {wrong}")
    try:
        return simulate(program, programs.costs_of(program, given))
    except ProgramError as error:
        raise MicroparallelError(f"{name} cannot be drawn: {wrong or error}") from None


def _require_one(loaded: list[Program], files: dict[str, Path | None]) -> None:
    """Raise `ConfigError` where several programs are to be drawn as what shows one."""
    for flag, path in files.items():
        if path is not None and len(loaded) > 1:
            raise ConfigError(f"{flag} {path}: one file holds one program's trace, and {len(loaded)} were named")
    for program in loaded:
        if len(loaded) > 1 and isinstance(program.goal, Collective):
            raise ConfigError(f"{program.name} is a collective, which is drawn alone; name schedules, or one program")


def _require_files(wanted: dict[str, Path]) -> None:
    for flag, path in wanted.items():
        require_writable(path, flag)
    if len({path.resolve() for path in wanted.values()}) < len(wanted):
        raise ConfigError(f"{' and '.join(wanted)} name the same file; give each its own")


def _require_no_text_flags(given: dict[str, str | int | None]) -> None:
    for flag, value in given.items():
        if value is not None:
            raise ConfigError(f"{flag} {value} is about the text, which is not drawn here; leave it out, or add --text")


def _view(view: str | None, loaded: list[Program], *, costs_given: bool, memory: bool) -> View:
    """The view that was asked for, or the one that shows what was asked for."""
    if view is None:
        return "hops" if isinstance(loaded[0].goal, Collective) and not costs_given else "timeline"
    if view not in get_args(View):
        raise ConfigError(f"--view {view}: {did_you_mean(view, get_args(View))}")
    if view not in ("timeline", "parts") and costs_given:
        raise ConfigError(
            f"--view {view} counts steps, whatever they cost; leave out the costs, or try --view timeline"
        )
    if view not in ("timeline", "parts") and memory:
        raise ConfigError(f"--view {view} has no time axis, below which --memory could stand; try --view timeline")
    return cast(View, view)


def _write(traces: list[Trace], view: View, width: int | None, wanted: dict[str, Path], *, memory: bool) -> None:
    """Draw everything first: either all files are written, or the error comes before the first."""
    drawn: dict[str, str] = {}
    for flag in wanted:
        if flag == "--text":
            drawn[flag] = plain(text_lines(traces, view=view, width=width, memory=memory))
        elif flag != "--chrome":
            drawn[flag] = draw_program(traces, as_="svg" if flag == "--svg" else "html", memory=memory)
    for flag, path in wanted.items():
        try:
            if flag == "--chrome":
                traces[0].to_chrome(path)
            else:
                write_atomically(path, drawn[flag].encode())
        except OSError as error:
            raise ConfigError(f"{flag} {path} cannot be written: {error.strerror}") from None


def _document(trace: Trace, wanted: dict[str, Path], *, memory: bool) -> dict[str, Any]:
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
    document = {**summary(trace, memory=memory), "events": events, "written": [str(path) for path in wanted.values()]}
    if isinstance(trace.followed.goal, Collective):
        document["hops"] = [
            [{"from": message.sender, "to": message.receiver, "op": str(message.receive)} for message in hop.messages]
            for hop in hops_of(trace.followed).hops
        ]
    return document
