"""Where the time of a trace went, as text or as a figure: for each rank, what it did with every moment.

```
rank 0  ▓▓▓▓▓█████████░░▒▒▒▒▒▒
rank 1  ▓▓▓████████····░▒▒▒▒▒▒
```
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from microparallel.drawing.kinds import ALL_REDUCE, BACKWARD, FORWARD, OPTIMIZER_STEP
from microparallel.drawing.legend import Entry, legend_figure, legend_text
from microparallel.drawing.lines import plain
from microparallel.drawing.markup import FAINT, Markup, element, joined, svg
from microparallel.drawing.memory import (
    HEIGHT,
    NAME,
    Strips,
    all_kinds,
    peak_table,
    scale_note,
    strip_figure,
    strip_legend,
    strip_text,
)
from microparallel.drawing.overlap import ticks
from microparallel.text import count, short, show_seconds
from microparallel.trace import Trace
from microparallel.trace.intervals import Interval
from microparallel.trace.parts import pieces_of

# What is drawn: its sign in a terminal, and how it is filled in a figure.
_SIGNS = {"forward": "▓", "backward": "█", "optimizer": "▒", "communicating": "░", "waiting": "·"}
_FILLS: dict[str, dict[str, str]] = {
    "forward": {"fill": FORWARD.fill},
    "backward": {"fill": BACKWARD.fill},
    "optimizer": {"fill": OPTIMIZER_STEP.fill},
    "communicating": {"fill": ALL_REDUCE.fill},
    "waiting": {"fill": "none", "stroke": FAINT, "stroke_dasharray": "3 3"},
}
_LEGEND = [
    Entry(sign, name, mark=element("rect", width=16, height=12, rx=3, **_FILLS[name])) for name, sign in _SIGNS.items()
]
_WIDTH = 100  # columns
_LEFT, _RIGHT, _ROW, _TOP, _PIXELS = 70.0, 16.0, 30.0, 44.0, 900.0


def parts_text(trace: Trace, width: int | None = None, strips: Strips | None = None) -> str:
    """Draw a trace as text: each column shows what its rank did most of that time; with strips, what it held."""
    start, end = trace.bounds
    gutter = len(f"rank {trace.ranks - 1}") + 2
    columns = max(8, (width or _WIDTH) - gutter)
    lines = [_title(trace)]
    for rank, pieces in enumerate(pieces_of(trace)):
        cells = [_sign(pieces, *_column(start, end, column, columns)) for column in range(columns)]
        lines.append(f"{f'rank {rank}'.ljust(gutter)}{''.join(cells)}".rstrip())
        if strips is not None:
            strip = strip_text(strips, rank, lambda time: _place(time, start, end, columns), columns)
            lines.append(f"{NAME.ljust(gutter)}{strip.text}".rstrip())
    marks, numbers = ["─"] * columns, [" "] * (columns + 12)
    for time, text in _ticks(trace, columns / 10):
        at = min(columns - 1, _place(start + time, start, end, columns))
        marks[at] = "┼"
        if at + len(text) <= columns:
            numbers[at : at + len(text)] = text
    lines += [
        " " * gutter + "".join(marks),
        f"{('time' if trace.simulated else 'ms').ljust(gutter)}{''.join(numbers)}".rstrip(),
    ]
    legend = legend_text([*_LEGEND, *([] if strips is None else [strip_legend(strips)])], None, "  ")
    table = [] if strips is None else peak_table(strips, width or _WIDTH, lambda time: _time(trace, time - start))
    return "\n".join(lines) + "\n" + plain([*legend, *table]).rstrip()


def parts_figure(trace: Trace, strips: Strips | None = None) -> str:
    """Draw a trace as an SVG image; hovering over a piece says what it is and how long it took.

    With strips, what a rank held stands below its row.
    """
    start, end = trace.bounds
    row = _ROW if strips is None else _ROW + HEIGHT + 8
    scale = (_PIXELS - _LEFT - _RIGHT) / (end - start or 1)
    parts = [element("title", _title(trace)), element("text", _title(trace), x=12, y=24, font_size=15)]
    for rank, pieces in enumerate(pieces_of(trace)):
        top = _TOP + rank * row
        parts.append(element("text", f"rank {rank}", x=12, y=top + 16))
        parts += [_box(trace, name, times, top, scale) for name, times in pieces.items()]
        if strips is not None:
            below = top + _ROW - 5
            strip = strip_figure(strips, rank, below, lambda time: _LEFT + (time - start) * scale, (start, end))
            parts += [element("text", NAME, x=12, y=below + HEIGHT / 2 + 4), strip]
    bottom = _TOP + trace.ranks * row
    for time, text in _ticks(trace, 10):
        parts.append(element("text", text, x=_LEFT + time * scale, y=bottom + 16, font_size=11))
    legend, height = legend_figure(_LEGEND, [], bottom + 30, _PIXELS)
    parts, height = [*parts, legend], bottom + 30 + height
    if strips is not None:
        kinds, more = legend_figure(all_kinds([strips]), [scale_note(strips)], height + 4, _PIXELS)
        parts, height = [*parts, kinds], height + 4 + more
    return svg(joined(*parts), _PIXELS, height, role="img", label=_title(trace))


def _box(trace: Trace, name: str, times: list[Interval], top: float, scale: float) -> Markup:
    """All intervals of one part, as boxes in a rank's row."""
    begun, _ = trace.bounds
    boxes = [
        element(
            "rect",
            element("title", f"{name}, {_time(trace, end - start)}"),
            x=_LEFT + (start - begun) * scale,
            y=top,
            width=max(0.5, (end - start) * scale),
            height=_ROW - 8,
            **_FILLS[name],
        )
        for start, end in times
    ]
    return joined(*boxes)


def _title(trace: Trace) -> str:
    steps = len(trace.steps)
    words = [count(trace.ranks, "rank"), count(steps, "step")]
    return " · ".join(["simulated" if trace.simulated else "recorded", *words, _time(trace, trace.makespan)])


def _time(trace: Trace, time: float) -> str:
    """A length of time; those of a simulation have the unit of its costs."""
    return short(time) if trace.simulated else show_seconds(time)


def _place(time: float, start: float, end: float, columns: int) -> int:
    """The column in which a time falls."""
    return math.floor((time - start) / ((end - start) or 1) * columns)


def _column(start: float, end: float, column: int, columns: int) -> Interval:
    length = (end - start) / columns
    return start + column * length, start + (column + 1) * length


def _sign(pieces: dict[str, list[Interval]], start: float, end: float) -> str:
    """The sign of the part that took most of a column; a blank if most of it belongs to no part."""
    shares = {name: sum(_common(one, (start, end)) for one in times) for name, times in pieces.items()}
    name = max(shares, key=lambda one: shares[one])
    other = end - start - sum(shares.values())
    return _SIGNS[name] if shares[name] > other else " "


def _common(one: Interval, two: Interval) -> float:
    """How long two intervals overlap."""
    return max(0.0, min(one[1], two[1]) - max(one[0], two[0]))


def _ticks(trace: Trace, count: float) -> Iterator[tuple[float, str]]:
    """Round times, about so many, each with its number."""
    if trace.makespan > 0:
        yield from ticks(trace.makespan, trace.makespan / max(1.0, count), seconds=not trace.simulated)
