"""A figure: the timeline as SVG, for documents and slides.

The ink is a middle grey, and cells bring their own: the figure stands on a light page as well as on a dark one.
"""

from __future__ import annotations

from microparallel.drawing.heading import durations, head_of, metrics_of, notes_of, notes_on_colour, title_of
from microparallel.drawing.layout import CHARACTER, MARGIN, Layout, lay_out
from microparallel.drawing.marks import BASELINE, FAINT, INK, MONOSPACE, marks
from microparallel.drawing.markup import Markup, element, joined
from microparallel.drawing.rows import Row, Rows, rows_of
from microparallel.program import Collective
from microparallel.text import short
from microparallel.trace import Trace

_SANS_SERIF = "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', sans-serif"
_WIDEST, _NARROWEST = 2400.0, 420.0
_HEAD, _AXIS, _LINE = 58.0, 30.0, 21.0


def figure(trace: Trace) -> str:
    """Draw a trace as an SVG image; hovering over a cell says what it is and why it waited."""
    rows = rows_of(trace)
    layout = lay_out(rows, left=gutter_of(rows), top=_HEAD, widest=_WIDEST)
    metrics = " · ".join(f"{name} {value}" for name, value in metrics_of(trace).items())
    title = title_of(trace.followed)
    words = max(len(title) * 8.0, len(metrics) * 6.2) + 2 * MARGIN
    width = max(layout.right + MARGIN + 8, words, _NARROWEST)
    legend, lines = _legend(rows, layout.bottom + _AXIS + 10, width)
    body = joined(
        element("title", head_of(trace)),
        element("text", title, x=MARGIN, y=24, font_size=15, font_weight=600),
        element("text", metrics, x=MARGIN, y=43),
        row_names(rows, layout),
        axis(layout),
        axis_name(layout, layout.left),
        marks(rows, layout),
        legend,
    )
    return svg(body, width, layout.bottom + _AXIS + 10 + lines * _LINE, role="img", label=head_of(trace)) + "\n"


def svg(body: Markup, width: float, height: float, *, role: str, label: str) -> Markup:
    """The outermost element, with the size and the ink that everything inside inherits."""
    return element(
        "svg",
        body,
        xmlns="http://www.w3.org/2000/svg" if role == "img" else None,  # a page knows what svg is
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        width=f"{width:.0f}",
        height=f"{height:.0f}",
        role=role,
        aria_label=label,
        font_family=_SANS_SERIF,
        font_size=12,
        fill=INK,
    )


def row_names(rows: Rows, layout: Layout) -> Markup:
    """What stands before each row: its rank, or what else of that rank it shows."""
    names = [
        element("text", name, x=MARGIN, y=place.middle + BASELINE, font_family=MONOSPACE)
        for name, place in zip(_names(rows), layout.places, strict=True)
        if name
    ]
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
    talking = isinstance(rows.trace.followed.goal, Collective)
    names: list[str] = []
    previous: Row | None = None
    for row in rows.rows:
        first = previous is None or row.rank != previous.rank
        names.append(f"rank {row.rank}" if first else "" if talking or previous == row else f"  {row.name}")
        previous = row
    return names


def _legend(rows: Rows, top: float, right: float) -> tuple[Markup, int]:
    """Swatches in as many lines as it takes, then what the figure leaves out."""
    parts: list[Markup] = []
    x, line = MARGIN, 0
    for kind, time in durations(rows).items():
        words = f"{kind.letter} {kind.word}, {time}"
        width = 22 + len(words) * 6.2 + 14
        if x > MARGIN and x + width > right:
            x, line = MARGIN, line + 1
        y = top + line * _LINE
        parts.append(element("rect", x=x, y=y, width=16, height=12, rx=3, fill=kind.fill))
        parts.append(element("text", words, x=x + 22, y=y + 10))
        x += width
    for note in (*notes_on_colour(rows), *notes_of(rows)):
        line += bool(parts)
        parts.append(element("text", note, x=MARGIN, y=top + line * _LINE + 10, font_size=11))
    return element("g", joined(*parts), class_="legend"), line + 1
