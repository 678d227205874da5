"""Drawings: a program or a trace as text, as an SVG figure, or as a page to explore."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from microparallel.drawing.clock import clock
from microparallel.drawing.heading import head_of
from microparallel.drawing.hops import hop_table, hops_of
from microparallel.drawing.html import page
from microparallel.drawing.lines import NARROWEST, Line, Segment, coloured, plain
from microparallel.drawing.memory import Strips, strips_of
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
Drawable = Program | Trace

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
    program_or_trace: Drawable | Sequence[Drawable],
    as_: Format = "text",
    *,
    view: View | None = None,
    costs: Costs | None = None,
    width: int | None = None,
    memory: bool = False,
) -> str:
    """Draw a program or a trace, or several of them one below the other, and return the drawing.

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
        memory: below each rank's timeline, draw how many bytes it holds over time: parameters, gradients, optimizer
            state, activations and what is in flight (`Trace.memory`). All strips have one scale, also those of several
            programs, so that they can be compared. `costs.sizes` says how large a program's are; a recorded trace must
            be one step alone.

    Example:
        ```python
        print(mp.draw(mp.schedules.build("1f1b", ranks=4, microbatches=8)))
        Path("ring.html").write_text(mp.draw(mp.collectives.build("ring", 4), as_="html"))
        print(mp.draw([mp.schedules.build(name, ranks=2, microbatches=4) for name in ("gpipe", "1f1b")], memory=True))
        ```
    """
    if as_ not in get_args(Format):
        raise UsageError(f"as_={as_!r}: a drawing is one of {', '.join(get_args(Format))}")
    drawn = [program_or_trace] if isinstance(program_or_trace, Program | Trace) else list(program_or_trace)
    if not drawn:
        raise UsageError("draw: there is nothing to draw; give a program or a trace")
    if len(drawn) == 1 and isinstance(drawn[0], Trace) and (view or _usual_view(drawn[0])) == "parts":
        return _draw_parts(drawn[0], as_, width, memory=memory)
    if as_ == "text":
        return plain(text_lines(drawn, view=view, costs=costs, width=width, memory=memory))
    if view is not None:
        raise UsageError(f"view={view!r} is for a text; {as_} shows a schedule's timeline and a collective's messages")
    traces = [_trace_of(one, costs) for one in drawn]
    return (figure if as_ == "svg" else page)(traces, strips_of(traces) if memory else ())


def _usual_view(trace: Trace) -> View | None:
    return "parts" if trace.program is None else None


def _draw_parts(trace: Trace, as_: Format, width: int | None, *, memory: bool) -> str:
    if as_ == "html":
        raise UsageError("as_='html': the page of a run is its report; see `microparallel report`")
    strips = strips_of([trace])[0] if memory else None
    return parts_text(trace, width, strips) if as_ == "text" else parts_figure(trace, strips)


def text_lines(
    program_or_trace: Drawable | Sequence[Drawable],
    *,
    view: View | None = None,
    costs: Costs | None = None,
    width: int | None = None,
    memory: bool = False,
) -> list[Line]:
    """Draw as lines of text that know their colours: `plain` makes a string of them, `coloured` what rich prints."""
    drawn = [program_or_trace] if isinstance(program_or_trace, Program | Trace) else list(program_or_trace)
    if memory and view not in (None, "timeline", "parts"):
        raise UsageError(f"view={view!r} has no time axis, below which memory could stand; try timeline or parts")
    if memory:
        drawn = [_trace_of(one, costs) for one in drawn]
        costs = None
    strips = strips_of([one for one in drawn if isinstance(one, Trace)]) if memory else [None] * len(drawn)
    lines: list[Line] = []
    for one, own in zip(drawn, strips, strict=True):
        lines += [[], *_lines(one, view, costs, width, own)] if lines else _lines(one, view, costs, width, own)
    return lines


def _lines(
    program_or_trace: Drawable, view: View | None, costs: Costs | None, width: int | None, strips: Strips | None
) -> list[Line]:
    program = program_or_trace.followed if isinstance(program_or_trace, Trace) else program_or_trace
    collective = isinstance(program.goal, Collective)
    view = view or ("hops" if collective else "timeline")
    if view not in get_args(View):
        raise UsageError(f"view={view!r}: a view is one of {', '.join(get_args(View))}")
    if width is not None and width < NARROWEST:
        raise UsageError(f"width={width}: a drawing needs at least {NARROWEST} columns")
    if view == "parts":
        text = parts_text(_trace_of(program_or_trace, costs), width, strips)
        return [[Segment(line)] for line in text.splitlines()]
    if view == "hops":
        return hop_table(hops_of(program), width)
    if view == "clock":
        if collective:
            raise UsageError(f"{program.name} ({program.goal}) has no clock view; try hops or timeline")
        return clock(program, width)
    return timeline(rows_of(_trace_of(program_or_trace, costs)), width, strips)


def _trace_of(program_or_trace: Program | Trace, costs: Costs | None) -> Trace:
    if isinstance(program_or_trace, Program):
        return simulate(program_or_trace, costs or default_costs(program_or_trace))
    if costs is not None:
        raise UsageError("costs are for a program; a trace says itself how long everything took")
    return from_zero(program_or_trace)
