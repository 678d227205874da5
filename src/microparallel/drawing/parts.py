"""Where the time of a trace went, as text or as a figure: for each rank, what it did with every moment.

```
rank 0  ▓▓▓▓▓█████████░░▒▒▒▒▒▒
rank 1  ▓▓▓████████····░▒▒▒▒▒▒
```
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from microparallel.drawing import kinds
from microparallel.drawing.overlap import ticks
from microparallel.drawing.svg import Markup, element, joined
from microparallel.text import count, short, show_seconds
from microparallel.trace import Trace
from microparallel.trace.intervals import Span
from microparallel.trace.parts import pieces_of

# What is drawn, with its sign in a terminal and its colour in a figure.
_SIGNS = {"forward": "▓", "backward": "█", "optimizer": "▒", "communicating": "░", "waiting": "·"}
_COLOURS = {
    "forward": kinds.FORWARD.fill,
    "backward": kinds.BACKWARD.fill,
    "optimizer": kinds.OPTIMIZER_STEP.fill,
    "communicating": kinds.ALL_REDUCE.fill,
    "waiting": "none",
}
_WIDTH = 100  # columns
_LEFT, _RIGHT, _ROW, _TOP, _PIXELS = 70.0, 16.0, 30.0, 44.0, 900.0


def parts_text(trace: Trace, width: int | None = None) -> str:
    """Draw a trace with letters: each column shows what took most of its time."""
    start, end = trace.bounds
    gutter = len(f"rank {trace.ranks - 1}") + 2
    columns = max(8, (width or _WIDTH) - gutter)
    lines = [_title(trace)]
    for rank, pieces in enumerate(pieces_of(trace)):
        cells = [_sign(pieces, *_column(start, end, column, columns)) for column in range(columns)]
        lines.append(f"{f'rank {rank}'.ljust(gutter)}{''.join(cells)}".rstrip())
    marks, numbers = ["─"] * columns, [" "] * (columns + 12)
    for time, text in _ticks(trace, columns / 10):
        at = min(columns - 1, math.floor(time / (end - start) * columns))
        marks[at] = "┼"
        if at + len(text) <= columns:
            numbers[at : at + len(text)] = text
    lines += [
        " " * gutter + "".join(marks),
        f"{('time' if trace.simulated else 'ms').ljust(gutter)}{''.join(numbers)}".rstrip(),
    ]
    lines.append("  ".join(f"{sign} {name}" for name, sign in _SIGNS.items()))
    return "\n".join(lines)


def parts_figure(trace: Trace) -> str:
    """Draw a trace as an SVG image; hovering over a piece says what it is and how long it took."""
    start, end = trace.bounds
    scale = (_PIXELS - _LEFT - _RIGHT) / (end - start or 1)
    parts = [element("title", _title(trace)), element("text", _title(trace), x=12, y=24, font_size=15)]
    for rank, pieces in enumerate(pieces_of(trace)):
        top = _TOP + rank * _ROW
        parts.append(element("text", f"rank {rank}", x=12, y=top + 16))
        parts += [_box(trace, name, times, top, scale) for name, times in pieces.items()]
    bottom = _TOP + trace.ranks * _ROW
    for time, text in _ticks(trace, 10):
        parts.append(element("text", text, x=_LEFT + time * scale, y=bottom + 16, font_size=11))
    parts += _legend(bottom + 40)
    height = bottom + 56
    return element(
        "svg",
        joined(*parts),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_PIXELS:.0f} {height:.0f}",
        width=_PIXELS,
        height=height,
        role="img",
        aria_label=_title(trace),
        font_family="system-ui, sans-serif",
        font_size=12,
        fill="#767676",
    )


def _box(trace: Trace, name: str, times: list[Span], top: float, scale: float) -> Markup:
    """All pieces of one kind in a row."""
    begun, _ = trace.bounds
    boxes = [
        element(
            "rect",
            element("title", f"{name}, {_time(trace, end - start)}"),
            x=_LEFT + (start - begun) * scale,
            y=top,
            width=max(0.5, (end - start) * scale),
            height=_ROW - 8,
            fill=_COLOURS[name],
            stroke="#999999" if name == "waiting" else None,
            stroke_dasharray="3 3" if name == "waiting" else None,
        )
        for start, end in times
    ]
    return joined(*boxes)


def _legend(y: float) -> list[Markup]:
    entries = []
    for place, (name, colour) in enumerate(_COLOURS.items()):
        x = _LEFT + place * 150
        line = "#999999" if name == "waiting" else None
        entries.append(element("rect", x=x, y=y - 11, width=14, height=12, fill=colour, stroke=line))
        entries.append(element("text", name, x=x + 20, y=y))
    return entries


def _title(trace: Trace) -> str:
    steps = len(trace.steps)
    words = [count(trace.ranks, "rank"), count(steps, "step")]
    return " · ".join(["simulated" if trace.simulated else "recorded", *words, _time(trace, trace.makespan)])


def _time(trace: Trace, time: float) -> str:
    """A length of time; those of a simulation have the unit of its costs."""
    return short(time) if trace.simulated else show_seconds(time)


def _column(start: float, end: float, column: int, columns: int) -> Span:
    length = (end - start) / columns
    return start + column * length, start + (column + 1) * length


def _sign(pieces: dict[str, list[Span]], start: float, end: float) -> str:
    """The sign of what took most of a column; nothing if that was something else."""
    shares = {name: sum(_common(one, (start, end)) for one in times) for name, times in pieces.items()}
    name = max(shares, key=lambda one: shares[one])
    other = end - start - sum(shares.values())
    return _SIGNS[name] if shares[name] > other else " "


def _common(one: Span, two: Span) -> float:
    """How long both are."""
    return max(0.0, min(one[1], two[1]) - max(one[0], two[0]))


def _ticks(trace: Trace, count: float) -> Iterator[tuple[float, str]]:
    """Round times, about so many, each with its number."""
    if trace.makespan > 0:
        yield from ticks(trace.makespan, trace.makespan / max(1.0, count), seconds=not trace.simulated)
