"""What a figure's timeline is made of: tracks, cells, and the messages of a collective with their arrows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from microparallel.drawing.kinds import shaded
from microparallel.drawing.layout import CHARACTER, Layout, Place
from microparallel.drawing.markup import Markup, element, joined
from microparallel.drawing.rows import Cell, Rows
from microparallel.program import Collective, Recv, Send, lane
from microparallel.text import short
from microparallel.trace import reasons

INK, FAINT = "#757b85", "#8a9099"
MONOSPACE = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"
BASELINE = 4  # below the middle of a line of text; not every viewer can centre text by itself
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
    talking = isinstance(rows.trace.followed.goal, Collective)
    if talking:
        parts.append(_arrows(layout))
    for place in layout.places:
        free = 0.0
        for cell in place.row.cells:
            wait = waits.get(cell.place)
            shapes = _message(cell, place, layout) if talking else _box(cell, place, layout)
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


def label(text: str, x: float, middle: float, **attributes: str | float | None) -> Markup:
    """Text around a point."""
    given: dict[str, str | float | None] = {"text_anchor": "middle", "font_family": MONOSPACE, "font_size": 11}
    return element("text", text, x=x, y=middle + BASELINE, **{**given, **attributes})


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
