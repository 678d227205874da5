"""Drawings: a program or a trace as text, as an SVG figure, or as a page to explore."""

from __future__ import annotations

from typing import Literal, get_args

from microparallel.drawing.clock import clock
from microparallel.drawing.heading import head_of
from microparallel.drawing.hops import hop_table, hops_of
from microparallel.drawing.html import page
from microparallel.drawing.lines import NARROWEST, Line, Segment, coloured, plain
from microparallel.drawing.parts import parts_figure, parts_text
from microparallel.drawing.rows import from_zero, rows_of
from microparallel.drawing.svg import figure
from microparallel.drawing.timeline import timeline
from microparallel.errors import UsageError
from microparallel.program import Collective, Program
from microparallel.simulator import Costs, simulate
from microparallel.simulator.costs import default_costs
from microparallel.trace import Trace

Format = Literal["text", "svg", "html"]
View = Literal["timeline", "clock", "hops", "parts"]

__all__ = [
    "Format",
    "View",
    "coloured",
    "default_costs",
    "draw",
    "head_of",
    "hops_of",
    "plain",
    "text_lines",
]


def draw(
    program_or_trace: Program | Trace,
    as_: Format = "text",
    *,
    view: View | None = None,
    costs: Costs | None = None,
    width: int | None = None,
) -> str:
    """Draw a program or a trace, and return the drawing.

    Args:
        program_or_trace: a program, which is simulated first; or a trace, with or without a program.
        as_: "text" for a terminal, "svg" for a figure, "html" for a page that needs nothing else: a schedule says why
            each operation waited, and a collective can be stepped through hop by hop.
        view: of a text; "timeline" (with an honest time axis), "clock" (a schedule tick by tick: which stage works on
            which micro-batch), or "hops" (a collective: who sends what to whom, and what each rank holds then).
            Without it, a schedule is drawn as its timeline, a collective as its hops, and what was recorded as "parts":
            for each rank, what it did with every moment.
        costs: how long a program's operations take; without it, `default_costs(program)`.
        width: columns a text may take; without it, as many as the labels need.

    Example:
        ```python
        print(mp.draw(mp.schedules.build("1f1b", ranks=4, microbatches=8)))
        Path("ring.html").write_text(mp.draw(mp.collectives.build("ring", 4), as_="html"))
        ```
    """
    if as_ not in get_args(Format):
        raise UsageError(f"as_={as_!r}: a drawing is one of {', '.join(get_args(Format))}")
    if isinstance(program_or_trace, Trace) and (view or _usual_view(program_or_trace)) == "parts":
        return _draw_parts(program_or_trace, as_, width)
    if as_ == "text":
        return plain(text_lines(program_or_trace, view=view, costs=costs, width=width))
    if view is not None:
        raise UsageError(f"view={view!r} is for a text; {as_} shows a schedule's timeline and a collective's messages")
    trace = _trace_of(program_or_trace, costs)
    return figure(trace) if as_ == "svg" else page(trace)


def _usual_view(trace: Trace) -> View | None:
    return "parts" if trace.program is None else None


def _draw_parts(trace: Trace, as_: Format, width: int | None) -> str:
    if as_ == "html":
        raise UsageError("as_='html': the page of a run is its report; see `microparallel report`")
    return parts_text(trace, width) if as_ == "text" else parts_figure(trace)


def text_lines(
    program_or_trace: Program | Trace,
    *,
    view: View | None = None,
    costs: Costs | None = None,
    width: int | None = None,
) -> list[Line]:
    """Draw as lines of text that know their colours: `plain` makes a string of them, `coloured` what rich prints."""
    program = program_or_trace.followed if isinstance(program_or_trace, Trace) else program_or_trace
    collective = isinstance(program.goal, Collective)
    view = view or ("hops" if collective else "timeline")
    if view not in get_args(View):
        raise UsageError(f"view={view!r}: a view is one of {', '.join(get_args(View))}")
    if width is not None and width < NARROWEST:
        raise UsageError(f"width={width}: a drawing needs at least {NARROWEST} columns")
    if view == "parts":
        return [[Segment(line)] for line in parts_text(_trace_of(program_or_trace, costs), width).splitlines()]
    if view == "hops":
        return hop_table(hops_of(program), width)
    if view == "clock":
        if collective:
            raise UsageError(f"{program.name} ({program.goal}) has no clock view; try hops or timeline")
        return clock(program, width)
    return timeline(rows_of(_trace_of(program_or_trace, costs)), width)


def _trace_of(program_or_trace: Program | Trace, costs: Costs | None) -> Trace:
    if isinstance(program_or_trace, Program):
        return simulate(program_or_trace, costs or default_costs(program_or_trace))
    if costs is not None:
        raise UsageError("costs are for a program; a trace says itself how long everything took")
    return from_zero(program_or_trace)
