"""A page to explore, in one file: a schedule's timeline, or a collective to step through hop by hop.

Everything is computed here; the page's scripts only show it. The page forbids itself any use of a network.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from microparallel.drawing.heading import head_of, metrics_of, notes_of, notes_on_colour, title_of
from microparallel.drawing.hops import Contributions, Held, Hop, Transfer, complete, hops_of
from microparallel.drawing.legend import legend_page, of_rows
from microparallel.drawing.markup import Markup, data_script, element, joined, svg
from microparallel.drawing.memory import Strips, all_kinds, scale_note, strips_of
from microparallel.drawing.rows import Rows, rows_of
from microparallel.drawing.svg import Layout, axis, axis_name, gutter_of, lay_out, marks, row_names, strip_marks
from microparallel.errors import UsageError
from microparallel.program import Add, Collective, Program, Slices, Value
from microparallel.text import count
from microparallel.trace import Trace

_WIDEST, _TOP, _AXIS, _SIDE = 20000.0, 12.0, 26.0, 16.0
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(traces: Sequence[Trace], strips: Sequence[Strips] = ()) -> str:
    """Draw traces as a page that needs nothing else, neither files nor a network: one collective, or schedules.

    With strips, one for each trace, what a rank holds stands below its rows.
    """
    first = traces[0]
    if len(traces) == 1 and isinstance(first.followed.goal, Collective):
        steps = steps_of(first.followed)
        figures = [*_stepping(), element("h2", "In time"), *_timeline(rows_of(first), interactive=False)]
        return _document(title_of(first.followed), [_metrics(first), *figures], "collective.js", steps)
    figures = []
    for number, trace in enumerate(traces):
        figures += [element("h2", title_of(trace.followed))] if len(traces) > 1 else []
        own = strips[number] if strips else None
        figures += [_metrics(trace), *_timeline(rows_of(trace), interactive=True, strips=own)]
    if strips:
        figures += [element("h2", "Bytes that a rank holds"), *legend_page(all_kinds(strips), [scale_note(strips[0])])]
    hint = element("p", "Point at a cell, or walk with the arrow keys: what it is, and why it waited.", class_="quiet")
    details = element("div", hint, class_="details", aria_live="polite")
    title = title_of(first.followed) if len(traces) == 1 else ", ".join(trace.followed.name for trace in traces)
    return _document(title, [*figures, details], "schedule.js", None)


def panel(trace: Trace, *, memory: bool = False) -> str:
    """The timeline as a part of another page: the same cells, which say what they are and why they waited."""
    strips = strips_of([trace])[0] if memory else None
    interactive = not isinstance(trace.followed.goal, Collective)
    held = [] if strips is None else legend_page(all_kinds([strips]), [scale_note(strips)])
    return joined(*_timeline(rows_of(trace), interactive=interactive, strips=strips), *held)


def _document(title: str, figures: list[Markup], script: str, data: dict[str, Any] | None) -> str:
    head = joined(
        Markup('<meta charset="utf-8">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        element("title", title),
        _raw("style", _resource("page.css")),
    )
    parts = [element("h1", title), *figures]
    if data is not None:
        parts.append(data_script(data))
    body = joined(*parts, _raw("script", _resource(script)))
    return f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'


def _timeline(rows: Rows, *, interactive: bool, strips: Strips | None = None) -> list[Markup]:
    """The names of the ranks, which stay, beside the timeline, which scrolls; and the legend."""
    layout = lay_out(rows, left=_SIDE, top=_TOP, widest=_WIDEST, strips=strips is not None)
    gutter, height = gutter_of(rows), layout.bottom + _AXIS
    names = svg(
        joined(row_names(rows, layout), axis_name(layout, gutter)), gutter, height, role="presentation", label=""
    )
    held = [] if strips is None else [strip_marks(strips, layout)]
    body = joined(axis(layout), marks(rows, layout, interactive=interactive), *held)
    chart = svg(body, _width(layout), height, role="group", label=head_of(rows.trace))
    scroll = element("div", chart, class_="scroll", tabindex=None if interactive else 0)
    legend = legend_page(of_rows(rows), [*notes_on_colour(rows), *notes_of(rows)])
    return [element("div", names, scroll, class_="chart"), *legend]


def _width(layout: Layout) -> float:
    return layout.right + _SIDE


def _metrics(trace: Trace) -> Markup:
    entries = [element("div", element("dt", name), element("dd", value)) for name, value in metrics_of(trace).items()]
    return element("dl", *entries, class_="metrics")


def _stepping() -> list[Markup]:
    """The frame that `collective.js` fills: a picture, controls, and what happens in words."""
    buttons = [
        element("button", text, type="button", id=name, aria_label=label)
        for name, text, label in (
            ("back", "‹ Back", "previous hop"),
            ("play", "▶ Play", "play or pause"),
            ("forward", "Next ›", "next hop"),
        )
    ]
    slider = Markup('<input type="range" min="0" value="0" step="1" aria-label="hop">')
    meaning = (
        "A card is what a rank holds: a line for each slice of the tensor, a square for each rank whose contribution "
        "is in it. A framed slice is complete; a dot marks what has just changed. Yellow messages are added to what is "
        "there, the others replace it."
    )
    words = element(
        "div",
        Markup('<p class="hop" aria-live="polite"></p>'),
        element("div", *buttons, slider, class_="controls"),
        Markup('<ul class="moves"></ul>'),
        element("p", meaning, class_="quiet"),
        class_="side",
    )
    picture = Markup('<svg class="circle" role="img" aria-label="ranks on a circle, and who sends what to whom"></svg>')
    return [element("div", picture, words, class_="stage")]


def _raw(tag: str, content: str) -> Markup:
    return Markup(f"<{tag}>\n{content}</{tag}>")


def _resource(name: str) -> str:
    return files("microparallel.drawing").joinpath(name).read_text(encoding="utf-8")


# ── a collective's hops as plain data, for collective.js ──────────────────────────────────────────────────────────────

_MOST_RANKS = 64
_MOST_CELLS = 2_000_000  # moments × ranks × slices: some megabytes


def steps_of(program: Program) -> dict[str, Any]:
    """What happens in each hop, and what every rank holds before the first and after each.

    | key        | what it is                                                                                   |
    |------------|----------------------------------------------------------------------------------------------|
    | `sets`     | every set of contributions that occurs, as a list of ranks; a rank twice was added twice     |
    | `holds`    | for each moment, rank and slice: the place of its set in `sets`                              |
    | `parts`    | for each moment and rank: whose whole contributions it keeps apart                           |
    | `complete` | for each slice: the sets (by place) that are right at the end                                |
    | `hops`     | for each hop: its messages, and the same in words                                            |
    """
    if program.world_size > _MOST_RANKS:
        raise UsageError(f"{program.world_size} ranks do not fit on a page; draw at most {_MOST_RANKS}")
    walkthrough = hops_of(program)
    moments = [walkthrough.start, *(hop.held for hop in walkthrough.hops)]
    cells = len(moments) * program.world_size * walkthrough.goal.slices
    if cells > _MOST_CELLS:
        raise UsageError(
            f"{program.name} among {program.world_size} ranks does not fit on a page: {len(moments)} moments × "
            f"{program.world_size} ranks × {walkthrough.goal.slices} slices; draw fewer ranks"
        )
    sets = _Sets()
    holds = [[[sets.place(symbol) for symbol in held.slices] for held in ranks] for ranks in moments]
    ranks, goal = program.world_size, walkthrough.goal
    right = [
        [place for place, symbol in enumerate(sets.symbols) if complete(goal, ranks, index, symbol)]
        for index in range(goal.slices)
    ]
    return {
        "ranks": ranks,
        "slices": goal.slices,
        "sets": [_as_list(symbol) for symbol in sets.symbols],
        "holds": holds,
        "parts": [[_parts(held) for held in each] for each in moments],
        "complete": right,
        "start": f"{program.name}: {goal}, {count(ranks, 'rank')}"
        + (f", {len(walkthrough.hops)} hops" if walkthrough.hops else ", nothing to send"),
        "hops": [
            {"messages": [_message(message) for message in hop.messages], "words": _words(hop)}
            for hop in walkthrough.hops
        ],
    }


class _Sets:
    """Every set of contributions that occurs, once: a ring of 64 has half a million slices, and few different ones."""

    def __init__(self) -> None:
        self.symbols: list[Contributions] = []
        self._places: dict[tuple[tuple[int, int], ...], int] = {}
        self._known: dict[int, int] = {}  # by identity, since most slices are the very same object as a hop before

    def place(self, symbol: Contributions) -> int:
        if id(symbol) not in self._known:
            key = tuple(sorted(symbol.items()))
            if key not in self._places:
                self._places[key] = len(self.symbols)
                self.symbols.append(symbol)
            self._known[id(symbol)] = self._places[key]
        return self._known[id(symbol)]


def _as_list(symbol: Contributions) -> list[int]:
    return [rank for rank, times in sorted(symbol.items()) for _ in range(times)]


def _parts(held: Held) -> list[int]:
    return sorted(held.parts)


def _message(message: Transfer) -> dict[str, Any]:
    adds = message.receive.reduce
    value = f"{'+' if adds else ''}{message.send.value}"
    return {"from": message.sender, "to": message.receiver, "value": value, "adds": adds}


def _words(hop: Hop) -> list[str]:
    said = []
    for message in hop.messages:
        then = "adds it" if message.receive.reduce else "keeps it"
        what = _name(message.send.value)
        said.append(f"rank {message.sender} sends {what} to rank {message.receiver}, which {then}")
    for rank, ops in enumerate(hop.ops):
        added = [f"{op.value} to {op.into}" for op in ops if isinstance(op, Add)]
        if added:
            said.append(f"rank {rank} adds {', '.join(added)}")
    return said


def _name(value: Value) -> str:
    if not isinstance(value, Slices):
        return str(value)
    if len(value) == 1:
        return f"slice {value.start}"
    return f"slices {value.start} to {value.stop - 1}"
