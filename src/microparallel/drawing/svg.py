"""The timeline as an SVG figure, for documents and slides.

`figure` makes the image. A page (`html.py`) uses its parts: `lay_out` says where every row and time stands, `marks`
draws the cells and messages there, `axis` and `row_names` what is around them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from microparallel.drawing.heading import head_of, metrics_of, notes_of, notes_on_colour, title_of
from microparallel.drawing.kinds import shaded
from microparallel.drawing.legend import legend_figure, of_rows
from microparallel.drawing.markup import (
    BASELINE,
    CHARACTER,
    FAINT,
    INK,
    MARGIN,
    MONOSPACE,
    Markup,
    element,
    joined,
    label,
    svg,
)
from microparallel.drawing.memory import HEIGHT, Strips, all_kinds, scale_note, strip_figure, strip_name
from microparallel.drawing.rows import Cell, Row, Rows, rows_of
from microparallel.drawing.scale import deciding, round_step, unit_of
from microparallel.program import Collective, Recv, Send, lane
from microparallel.text import short
from microparallel.trace import Trace, reasons

_WIDEST, _NARROWEST = 2400.0, 420.0
_HEAD, _AXIS = 58.0, 30.0


def figure(traces: Sequence[Trace], strips: Sequence[Strips] = ()) -> str:
    """Draw traces as an SVG image, one below the other; hovering over a cell says what it is and why it waited.

    With strips, one for each trace, what a rank holds stands below its rows.
    """
    pictures = [_picture(trace, *each) for trace, *each in zip(traces, *([strips] if strips else []), strict=True)]
    width = max(picture[1] for picture in pictures)
    parts, top = [element("title", " | ".join(map(head_of, traces)))], 0.0
    for body, _, height in pictures:
        parts.append(element("g", body, transform=f"translate(0 {top:.0f})") if top else body)
        top += height
    if strips:
        kinds = legend_figure(all_kinds(strips), [scale_note(strips[0])], top + 6, width)
        parts, top = [*parts, kinds[0]], top + 6 + kinds[1]
    return svg(joined(*parts), width, top, role="img", label=" | ".join(map(head_of, traces))) + "\n"


def _picture(trace: Trace, strips: Strips | None = None) -> tuple[Markup, float, float]:
    """One trace with its heading and legend; and how wide and high that is."""
    rows = rows_of(trace)
    layout = lay_out(rows, left=gutter_of(rows), top=_HEAD, widest=_WIDEST, strips=strips is not None)
    metrics = " · ".join(f"{name} {value}" for name, value in metrics_of(trace).items())
    title = title_of(trace.followed)
    words = max(len(title) * 8.0, len(metrics) * 6.2) + 2 * MARGIN
    width = max(layout.right + MARGIN + 8, words, _NARROWEST)
    bottom = layout.bottom + _AXIS + 10
    legend, height = legend_figure(of_rows(rows), [*notes_on_colour(rows), *notes_of(rows)], bottom, width)
    body = joined(
        element("text", title, x=MARGIN, y=24, font_size=15, font_weight=600),
        element("text", metrics, x=MARGIN, y=43),
        row_names(rows, layout),
        axis(layout),
        axis_name(layout, layout.left),
        marks(rows, layout),
        *([] if strips is None else [strip_marks(strips, layout)]),
        legend,
    )
    return body, width, bottom + height


def strip_marks(strips: Strips, layout: Layout) -> Markup:
    """What each rank holds."""
    bounds = 0.0, layout.makespan
    return joined(*(strip_figure(strips, rank, top, layout.x, bounds) for rank, top in layout.strips.items()))


def row_names(rows: Rows, layout: Layout) -> Markup:
    """What stands before each row: its rank, or what else of that rank it shows."""
    names = [
        element("text", name, x=MARGIN, y=place.middle + BASELINE, font_family=MONOSPACE)
        for name, place in zip(_names(rows), layout.places, strict=True)
        if name
    ]
    names += [strip_name(top, MARGIN) for top in layout.strips.values()]
    return element("g", joined(*names), class_="names")


def axis(layout: Layout) -> Markup:
    """Round times below the rows, and a faint line up from each."""
    times, unit, _ = layout.marks()
    top, bottom = layout.places[0].top - 4, layout.bottom + 4
    parts = []
    for time in times:
        x = layout.x(time)
        parts.append(element("line", x1=x, x2=x, y1=top, y2=bottom, stroke=FAINT, stroke_opacity=0.35))
        parts.append(element("text", short(time / unit), x=x, y=bottom + 14, text_anchor="middle", font_size=11))
    parts.append(element("line", x1=layout.left, x2=layout.right, y1=bottom, y2=bottom, stroke=FAINT))
    return element("g", joined(*parts), class_="axis")


def axis_name(layout: Layout, right: float) -> Markup:
    """What the numbers below the rows count, to the left of them."""
    name = f"time {layout.marks()[2]}".rstrip()
    text = element("text", name, x=right - 14, y=layout.bottom + 18, text_anchor="end", font_size=11)
    return element("g", text, class_="axis")


def gutter_of(rows: Rows) -> float:
    """How much room the names before the rows take."""
    return MARGIN + max(8, *map(len, _names(rows))) * CHARACTER + 12


def _names(rows: Rows) -> list[str]:
    collective = isinstance(rows.trace.followed.goal, Collective)
    names: list[str] = []
    previous: Row | None = None
    for row in rows.rows:
        first = previous is None or row.rank != previous.rank
        names.append(f"rank {row.rank}" if first else "" if collective or previous == row else f"  {row.name}")
        previous = row
    return names


# ── the places of rows and times, in pixels ───────────────────────────────────────────────────────────────────────────

_PADDING, _ROW, _THIN_ROW, _GAP = 7.0, 26.0, 18.0, 3.0
_BETWEEN_RANKS, _ROOM_FOR_ARROWS = 8.0, 30.0
_LEAST_BETWEEN_MARKS, _NARROWEST_AXIS = 44.0, 240.0


@dataclass(frozen=True, slots=True)
class Place:
    """A row and where it stands."""

    row: Row
    top: float
    height: float

    @property
    def middle(self) -> float:
        """Where its cells are written."""
        return self.top + self.height / 2


@dataclass(frozen=True, slots=True)
class Layout:
    """Places for rows and times: time 0 is at `left`, the last row ends at `bottom`."""

    places: list[Place]
    left: float
    bottom: float
    pixels_per_time: float
    makespan: float
    shortest: float
    short_names: bool
    strips: dict[int, float]  # for each rank, the upper edge of what it holds

    def x(self, time: float) -> float:
        """Where a time is."""
        return self.left + time * self.pixels_per_time

    @property
    def right(self) -> float:
        """Where the time axis ends."""
        return self.x(self.makespan)

    def name_in(self, cell: Cell, room: float) -> str:
        """As much of a cell's name as fits."""
        names = (cell.short, cell.kind.letter) if self.short_names else (cell.full, cell.short, cell.kind.letter)
        return next((name for name in names if len(name) * CHARACTER <= room), "")

    def marks(self) -> tuple[list[float], float, str]:
        """Round times for the axis, the unit they are counted in, and its name."""
        if not self.makespan:
            return [0], 1, ""
        step = round_step(max(_LEAST_BETWEEN_MARKS / self.pixels_per_time, self.shortest))
        unit, name = unit_of(self.makespan)
        return [index * step for index in range(int(self.makespan / step + 1e-9) + 1)], unit, name


def lay_out(rows: Rows, *, left: float, top: float, widest: float, strips: bool = False) -> Layout:
    """Give every row its place; time gets as many pixels as the cells' names need, up to a width."""
    collective = isinstance(rows.trace.followed.goal, Collective)
    places: list[Place] = []
    held: dict[int, float] = {}
    at = top
    for rank, mine in groupby(rows.rows, key=lambda row: row.rank):
        if collective:  # what a rank sends and receives stands in one row, with room for arrows below it
            places += [Place(row, at, _ROW) for row in mine]
            at += _ROW + _GAP + _ROOM_FOR_ARROWS
        else:
            for row in mine:
                places.append(Place(row, at, _THIN_ROW if row.name else _ROW))
                at += places[-1].height + _GAP
            if strips:
                held[rank] = at
                at += HEIGHT + _GAP
            at += _BETWEEN_RANKS
    at -= _ROOM_FOR_ARROWS if collective else _BETWEEN_RANKS
    pixels, short_names = _pixels_per_time(rows, widest - left, collective=collective)
    return Layout(places, left, at, pixels, rows.trace.makespan, rows.shortest, short_names, held)


def _pixels_per_time(rows: Rows, room: float, *, collective: bool) -> tuple[float, bool]:
    makespan = rows.trace.makespan
    if not makespan:
        return 0, False
    most = room / makespan
    for short_names, needed in _needed(deciding(rows), collective):
        if needed <= most:
            return max(needed, min(most, _NARROWEST_AXIS / makespan)), short_names
    return most, True


def _needed(cells: list[Cell], collective: bool) -> Iterator[tuple[bool, float]]:
    """The pixels a unit of time needs if all names are full, and if all are short."""
    names: tuple[tuple[bool, Callable[[Cell], str]], ...] = (
        (False, lambda cell: cell.full),
        (True, lambda cell: cell.short),
    )
    for short_names, name in names[collective:]:  # arrows say who sends to whom, so short names are enough
        # A send and a receive share a row, and the arrows pass between their names.
        widths = [
            (len(name(cell)) * CHARACTER + _PADDING) * (3.3 if collective else 1) / cell.duration for cell in cells
        ]
        yield short_names, max(widths, default=0)


# ── cells, and the messages of a collective with their arrows ─────────────────────────────────────────────────────────

_CHIP, _STRIP = 18.0, 3.0
Point = tuple[float, float]


def marks(rows: Rows, layout: Layout, *, interactive: bool = False) -> Markup:
    """Everything a timeline shows between its axis and the names of its ranks.

    An image says what a cell is when the mouse rests on it; on a page, which says it elsewhere, cells can be reached
    with the keyboard too, and the time that was waited before a cell belongs to it.
    """
    tracks = {place.top: place for place in layout.places}.values()
    parts = [
        element(
            "rect",
            x=layout.left,
            y=place.top,
            width=layout.right - layout.left,
            height=place.height,
            fill=FAINT,
            fill_opacity=0.14,
            class_="track",
        )
        for place in tracks
    ]
    waits = reasons(rows.trace)
    collective = isinstance(rows.trace.followed.goal, Collective)
    if collective:
        parts.append(_arrows(layout))
    for place in layout.places:
        free = 0.0
        for cell in place.row.cells:
            wait = waits.get(cell.place)
            shapes = _message(cell, place, layout) if collective else _box(cell, place, layout)
            if interactive:
                gap = [_gap(free, cell, place, layout)] if wait else []
                parts.append(_reachable(cell, place, wait, [*gap, *shapes]))
            else:
                parts.append(_titled(cell, place, wait, shapes))
            free = cell.end
    return joined(*parts)


def words_of(cell: Cell, rank: int, wait: str | None) -> str:
    """What a cell is, in words: what runs where and when, and why not earlier."""
    words = f"{cell.op}: {cell.kind.word} on rank {rank}, from {short(cell.start)} to {short(cell.end)}"
    return f"{words}\n{wait}" if wait else words


def _titled(cell: Cell, place: Place, wait: str | None, shapes: list[Markup]) -> Markup:
    title = element("title", words_of(cell, place.row.rank, wait))
    return element("g", title, *shapes, class_=f"cell {cell.kind.name}")


def _reachable(cell: Cell, place: Place, wait: str | None, shapes: list[Markup]) -> Markup:
    return element(
        "g",
        *shapes,
        class_=f"cell {cell.kind.name}",
        role="img",
        tabindex=-1,
        aria_label=words_of(cell, place.row.rank, wait).replace("\n", "; "),
        data_rank=place.row.rank,
        data_lane=str(lane(cell.op)),
        data_row=f"{place.row.rank}{place.row.name}",
        data_op=str(cell.op),
        data_kind=cell.kind.word,
        data_start=short(cell.start),
        data_end=short(cell.end),
        data_takes=short(cell.duration),
        data_wait=wait,
        data_held=cell.held,
        data_related=" ".join(map(str, cell.related)) or None,
    )


def _gap(free: float, cell: Cell, place: Place, layout: Layout) -> Markup:
    x, width = layout.x(free), layout.x(cell.start) - layout.x(free)
    return element("rect", x=x, y=place.top, width=width, height=place.height, class_="gap", fill_opacity=0)


def _box(cell: Cell, place: Place, layout: Layout) -> list[Markup]:
    """A box as long as the operation takes."""
    x, width = layout.x(cell.start), cell.duration * layout.pixels_per_time
    inset = min(0.75, width / 4)  # a gap between neighbours, to which no cell loses more than half of itself
    box = element(
        "rect",
        x=x + inset,
        y=place.top,
        width=width - 2 * inset,
        height=place.height,
        rx=min(3, width / 4),
        fill=shaded(cell.kind.fill, cell.shade),
    )
    name = layout.name_in(cell, width - 2)
    return [box, label(name, x + width / 2, place.middle, fill=cell.kind.ink)] if name else [box]


def _message(cell: Cell, place: Place, layout: Layout) -> list[Markup]:
    """A strip as long as the message takes, and its name: where it begins for a send, where it ends for a receive."""
    x, width = layout.x(cell.start), cell.duration * layout.pixels_per_time
    sending = isinstance(cell.op, Send)
    edge = place.top + place.height - _STRIP if sending else place.top
    strip = element("rect", x=x, y=edge, width=width, height=_STRIP, fill=cell.kind.fill)
    name = layout.name_in(cell, width / 2 - 8)
    if not name:
        return [strip]
    chip = _chip_width(name)
    left = x + 3 if sending else x + width - chip - 3
    box = element("rect", x=left, y=place.middle - _CHIP / 2, width=chip, height=_CHIP, rx=4, fill=cell.kind.fill)
    return [strip, box, label(name, left + chip / 2, place.middle, fill=cell.kind.ink)]


def _chip_width(name: str) -> float:
    return len(name) * CHARACTER + 6


def _arrows(layout: Layout) -> Markup:
    """From each send to its receive: messages of a channel arrive in order, so the n-th belongs to the n-th."""
    sends: dict[tuple[int, int], list[Point]] = defaultdict(list)
    receives: dict[tuple[int, int], list[Point]] = defaultdict(list)
    for place, cell in sorted(_cells(layout), key=lambda pair: pair[1].start):
        rank = place.row.rank
        if isinstance(cell.op, Send):
            chip = _chip_width(layout.name_in(cell, cell.duration * layout.pixels_per_time / 2 - 8)) + 3
            down = cell.op.to > rank
            sends[rank, cell.op.to].append((layout.x(cell.start) + chip, place.middle + (5 if down else -5)))
        elif isinstance(cell.op, Recv):
            chip = _chip_width(layout.name_in(cell, cell.duration * layout.pixels_per_time / 2 - 8)) + 5
            above = cell.op.source < rank
            receives[cell.op.source, rank].append((layout.x(cell.end) - chip, place.middle + (-3 if above else 3)))
    lines = [
        element("path", d=_line(start, end), marker_end="url(#microparallel-arrow)")
        for channel, starts in sends.items()
        for start, end in zip(starts, receives[channel], strict=False)
    ]
    head = element("path", d="M0,0 L6,3 L0,6 z", fill=INK)
    size: dict[str, str | float] = {"viewBox": "0 0 6 6", "refX": 5, "refY": 3, "markerWidth": 6, "markerHeight": 6}
    marker = element("marker", head, id="microparallel-arrow", orient="auto", **size)
    return element("g", element("defs", marker), *lines, fill="none", stroke=INK, stroke_width=1.2, class_="arrows")


def _cells(layout: Layout) -> Iterator[tuple[Place, Cell]]:
    for place in layout.places:
        for cell in place.row.cells:
            yield place, cell


def _line(start: Point, end: Point) -> str:
    return f"M{start[0]:.1f},{start[1]:.1f} L{end[0]:.1f},{end[1]:.1f}"
