"""Draw measurements as lines over two logarithmic axes, as SVG.

Where each power of ten takes the same room, latency and bandwidth show as slopes: a flat stretch of the time is
latency, a stretch that climbs one decade a decade is bandwidth.

    title
    ┌───────────────────┐  ┌───────────────────┐   ● one
    │ panel      ┄┄/─●  │  │ panel ·····──■──  │   ■ another
    │    ●──●─┄┄/       │  │    ■──────●       │   ┄ predicted   · bound
    └───────────────────┘  └───────────────────┘

matplotlib would draw this too, but it is 100 MB with what it needs, takes more than a second to import, and unless told
otherwise writes other bytes each time. This needs the standard library alone, and the same chart is the same bytes.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from microparallel.errors import MicroparallelError, UsageError

_WIDTH, _HEIGHT = 1120, 560
_TOP, _BOTTOM, _LEFT, _GAP, _LEGEND = 92, 504, 62, 62, 168
INK, GREY, GRID = "#1f2328", "#656d76", "#e4e7eb"
# Told apart by colour-blind eyes as well, and by the markers where colours are not printed.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#8c2d04", "#6a51a3")
_MARKERS = {
    "circle": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0",
    "square": "M-3.5 -3.5h7v7h-7z",
    "triangle": "M0 -4.5L4.5 3.5H-4.5z",
    "diamond": "M0 -5L4.5 0L0 5L-4.5 0z",
}
_LOOKS = {"predicted": 'stroke-dasharray="4 4"', "bound": 'stroke-dasharray="0.1 4.5" stroke-linecap="round"'}


@dataclass(frozen=True)
class Point:
    """A measured value, and where its spread begins and ends."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class Line:
    """One line: measured points, what had been predicted for them, and what limits them."""

    label: str
    points: Sequence[Point]
    predicted: Sequence[tuple[float, float]] = ()
    bound: Sequence[tuple[float, float]] = ()
    emphasised: bool = False  # black: the one that others are compared with
    strong: bool = False  # thicker than the rest


@dataclass(frozen=True)
class Panel:
    """One pair of axes with its lines, and how the numbers at its axes are written."""

    title: str
    x_title: str
    lines: Sequence[Line]
    show_x: Callable[[float], str]
    show_y: Callable[[float], str]


@dataclass(frozen=True)
class _Style:
    colour: str
    marker: str
    width: float


@dataclass(frozen=True)
class _Scale:
    """Where a value stands on an axis that runs from one pixel to another."""

    low: float
    high: float
    first: float
    last: float

    def at(self, value: float) -> float:
        share = (math.log10(value) - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))
        return round(self.first + share * (self.last - self.first), 1)

    def decades(self) -> Iterator[float]:
        """The powers of ten on the axis."""
        for power in range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1):
            yield 10.0**power


def draw_chart(title: str, subtitle: str, panels: Sequence[Panel]) -> str:
    """Draw panels side by side, with one legend: a label has the same colour and marker in all of them."""
    lines = {line.label: line for panel in panels for line in panel.lines}
    styles = dict(zip(lines, _styles(list(lines.values())), strict=True))
    width = (_WIDTH - _LEGEND - len(panels) * _GAP) / len(panels)
    parts = svg_head(_WIDTH, _HEIGHT, _LEFT, title, subtitle)
    for index, panel in enumerate(panels):
        parts += _draw_panel(panel, _LEFT + index * (width + _GAP), width, styles)
    every_line = [line for panel in panels for line in panel.lines]
    kinds = {"predicted": any(line.predicted for line in every_line), "bound": any(line.bound for line in every_line)}
    return "\n".join([*parts, *_legend(styles, [kind for kind, drawn in kinds.items() if drawn]), "</svg>", ""])


def svg_head(width: int, height: int, left: float, title: str, subtitle: str) -> list[str]:
    """The beginning of a picture: its size, a white ground, and its title from `left` on."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        svg_text(left, 30, title, size=17, bold=True),
        svg_text(left, 50, subtitle, colour=GREY),
    ]


def _styles(lines: Sequence[Line]) -> Iterator[_Style]:
    """Black and thick for what is emphasised; of the others, each another pair of colour and marker."""
    markers = list(_MARKERS)
    index = 0
    for line in lines:
        if line.emphasised:
            yield _Style(INK, "circle", 3.0)
        else:
            marker = markers[(index + index // len(COLOURS)) % len(markers)]
            yield _Style(COLOURS[index % len(COLOURS)], marker, 2.6 if line.strong else 1.6)
            index += 1


def _draw_panel(panel: Panel, left: float, width: float, styles: dict[str, _Style]) -> list[str]:
    points = [point for line in panel.lines for point in line.points]
    others = [place for line in panel.lines for place in (*line.predicted, *line.bound)]
    heights = [height for point in points for height in (point.low, point.high)] + [y for _, y in others]
    x = _scale([point.x for point in points], left, left + width)
    y = _scale(heights, _BOTTOM, _TOP)
    parts = _grid(panel, x, y)
    for line in panel.lines:
        style = styles[line.label]
        for kind, places in (("predicted", line.predicted), ("bound", line.bound)):
            look = f'stroke-width="{style.width * 0.8:.2g}" {_LOOKS[kind]} stroke-opacity="0.75"'
            parts += [_path([(x.at(size), y.at(height)) for size, height in places], style, look)] if places else []
    # What is emphasised comes to lie on top.
    for line in sorted(panel.lines, key=lambda line: (line.emphasised, line.strong)):
        parts += _draw_line(line, styles[line.label], x, y)
    return parts


def _scale(values: Sequence[float], first: float, last: float) -> _Scale:
    """An axis with a little room at both ends, and at least one power of ten."""
    low, high = min(values) / 1.25, max(values) * 1.25
    if high / low < 10:
        low, high = 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high))
    return _Scale(low, high, first, last)


def _grid(panel: Panel, x: _Scale, y: _Scale) -> list[str]:
    middle = (x.first + x.last) / 2
    parts = [svg_text(x.first, _TOP - 12, panel.title, bold=True)]
    parts.append(svg_text(middle, _BOTTOM + 39, panel.x_title, colour=GREY, anchor="middle"))
    for value in y.decades():
        parts.append(_rule(x.first, y.at(value), x.last, y.at(value)))
        parts.append(svg_text(x.first - 7, y.at(value) + 4, panel.show_y(value), colour=GREY, anchor="end"))
    for value in x.decades():
        parts.append(_rule(x.at(value), _TOP, x.at(value), _BOTTOM))
        parts.append(svg_text(x.at(value), _BOTTOM + 19, panel.show_x(value), colour=GREY, anchor="middle"))
    frame = f'width="{x.last - x.first:.1f}" height="{_BOTTOM - _TOP}" fill="none" stroke="{GREY}" stroke-width="0.8"'
    return [*parts, f'<rect x="{x.first:.1f}" y="{_TOP}" {frame}/>']


def _draw_line(line: Line, style: _Style, x: _Scale, y: _Scale) -> list[str]:
    parts = [_path([(x.at(point.x), y.at(point.y)) for point in line.points], style, f'stroke-width="{style.width}"')]
    for point in line.points:
        spread = [(x.at(point.x), y.at(point.low)), (x.at(point.x), y.at(point.high))]
        parts.append(_path(spread, style, f'stroke-width="{style.width}" stroke-opacity="0.45"'))
        parts.append(_marker(x.at(point.x), y.at(point.y), style))
    return parts


def _legend(styles: dict[str, _Style], kinds: Sequence[str]) -> list[str]:
    """What each line is called; and in grey, what else is drawn of it."""
    left = _WIDTH - _LEGEND + 14
    parts = []
    for index, (label, style) in enumerate(styles.items()):
        height = _TOP + 10 + index * 23
        parts.append(_path([(left, height), (left + 26, height)], style, f'stroke-width="{style.width}"'))
        parts.append(_marker(left + 13, height, style))
        parts.append(svg_text(left + 34, height + 4, label, bold=style.colour == INK))
    below = _TOP + 10 + len(styles) * 23 + 14
    grey = _Style(GREY, "circle", 1.4)
    explained = [("spread: quartiles", 'stroke-opacity="0.45"', [(left + 13, below - 8), (left + 13, below + 8)])]
    for index, kind in enumerate(kinds, 1):
        explained.append((kind, _LOOKS[kind], [(left, below + 23 * index), (left + 26, below + 23 * index)]))
    for text, look, points in explained:
        parts.append(_path(points, grey, f'stroke-width="1.6" {look}'))
        parts.append(svg_text(left + 34, sum(height for _, height in points) / 2 + 4, text, colour=GREY))
    return parts


def _path(points: Sequence[tuple[float, float]], style: _Style, look: str) -> str:
    steps = " ".join(f"{x:g},{y:g}" for x, y in points)
    return f'<polyline points="{steps}" fill="none" stroke="{style.colour}" stroke-linejoin="round" {look}/>'


def _marker(x: float, y: float, style: _Style) -> str:
    look = f'fill="{style.colour}" stroke="white" stroke-width="0.8"'
    return f'<path d="{_MARKERS[style.marker]}" transform="translate({x:g} {y:g})" {look}/>'


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{GRID}"/>'


def svg_text(
    x: float, y: float, text: str, *, size: int = 12, colour: str = INK, bold: bool = False, anchor: str = "start"
) -> str:
    """Words in a picture; `anchor` says whether they start, have their middle or end at x."""
    weight = ' font-weight="bold"' if bold else ""
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}"{weight}>{escape(text)}</text>'


# ── files: SVG, or PNG where a converter is installed ───────────────────────────────────────────────────────────────

_SCALE = 2  # PNG pixels for each of the SVG's, so that text is sharp


def require_drawable(path: Path, flag: str) -> None:
    """Refuse a kind of picture that cannot be drawn, before the work that is to fill it has begun."""
    kind = path.suffix.lower()
    if kind not in (".svg", ".png"):
        raise UsageError(f"{flag} {path}: a picture ends in .svg or .png; try {path.with_suffix('.svg')}")
    if kind == ".png" and not (_has_resvg() or shutil.which("rsvg-convert")):
        raise UsageError(
            f"{flag} {path}: PNG needs resvg-py (pip install 'microparallel[plot]') or the program rsvg-convert; "
            f"or try {path.with_suffix('.svg')}"
        )


def write_picture(svg: str, path: Path) -> None:
    """Write a picture in the format that the file's ending names."""
    data = svg.encode() if path.suffix.lower() == ".svg" else _to_png(svg)
    try:
        path.write_bytes(data)
    except OSError as error:
        raise MicroparallelError(f"{path} could not be written: {error.strerror or error}") from error


def _has_resvg() -> bool:
    return importlib.util.find_spec("resvg_py") is not None


def _to_png(svg: str) -> bytes:
    if _has_resvg():
        return bytes(importlib.import_module("resvg_py").svg_to_bytes(svg_string=svg, zoom=_SCALE))
    done = subprocess.run(
        ["rsvg-convert", f"--zoom={_SCALE}", "--format=png"], input=svg.encode(), capture_output=True, check=False
    )
    if done.returncode != 0:
        raise MicroparallelError(f"rsvg-convert could not make a PNG: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout
