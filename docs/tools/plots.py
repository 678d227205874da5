"""The `plot` fence draws the output block above it, or a kept table; the `bits` fence draws number formats.

```plot
caption: Loss of each method.
x: step
y: loss, log
```

The first column is x, and each other column is a line. The output of a block is compared with a real run when the
project is tested, so the lines are what the code above them printed. Columns are two spaces or more apart; a cell that
is not a number is left out. Columns are drawn as lines with a dot at each number, unless they are named otherwise:

```plot
caption: A step, by the number of buckets.
data: benchmarks/results/curves.txt::buckets
columns: buckets, formula, simulated
lines: formula
points: simulated
x: buckets
y: time
```

`data` names a kept table, as `path` or `path::heading` (a line such as `── buckets ──`); `columns` chooses some of it.
`lines` are without dots, `points` are dots alone, and `steps` stay level until the next number; each takes names of
columns, or `all`. The file begins with its origin, which ends the caption (results.py):

```text
# command: python benchmarks/curves.py
# machine: 2 cores, x86_64, Linux, Python 3.11.7
# date: 2026-11-19
```
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import results
from figures import figure_of
from pages import Block, blocks_of

_INK = "#757b85"  # site.css gives it the page's own colour
_COLOURS = ("#0072b2", "#e69f00", "#2bb58c", "#cc79a7", "#56b4e9", "#d55e00", "#8d7a00")  # told apart by most eyes
_BITS = {"sign": "#cc79a7", "exponent": "#e69f00", "fraction": "#56b4e9"}
_DASHES = ("", "7 4", "2 3", "10 3 2 3", "", "7 4", "2 3")
_STYLES = ("lines", "points", "steps")
_LEFT, _RIGHT, _TOP, _BOTTOM, _WIDTH, _HEIGHT = 62, 32, 14, 50, 560, 320
Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """What stands beside an axis, and how numbers are placed on it."""

    title: str
    log: bool
    low: float
    high: float

    def place(self, value: float) -> float:
        """Where a number stands, from 0 to 1."""
        scale: Callable[[float], float] = math.log10 if self.log else float
        width = scale(self.high) - scale(self.low) or 1.0
        return (scale(value) - scale(self.low)) / width

    def ticks(self) -> list[float]:
        """Round numbers to be written beside it."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            found = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
            inside = [value for value in found if self.low * 0.999 <= value <= self.high * 1.001]
            tens = [value for value in inside if f"{value:e}".startswith("1.000")]
            return tens if len(inside) > 7 and len(tens) > 2 else inside
        step = 10.0 ** math.floor(math.log10((self.high - self.low) / 4))
        step *= next(factor for factor in (1, 2, 2.5, 5, 10) if (self.high - self.low) / (factor * step) <= 6)
        first = math.ceil(self.low / step - 1e-9)
        return [step * number for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def with_data(markdown: str, file: Path) -> str:
    """Give every `plot` fence of a page the table of the output block above it, unless it names its data."""
    lines, above = markdown.splitlines(), None
    edits: list[tuple[int, list[str]]] = []
    for block in blocks_of(file, markdown):
        if block.kind == "output":
            above = block
        elif block.kind == "plot" and "data" not in _options(block):
            if above is None:
                raise ValueError(f"{block.place}: a plot draws the output block above it, and there is none")
            edits.append((block.end - 1, [f"{block.indent}| {line}" for line in above.lines]))
    for place, more in reversed(edits):
        lines[place:place] = more
    return "\n".join(lines) + "\n"


def plot(block: Block) -> str:
    """HTML of a `plot` fence that has its table (`with_data`) or names it."""
    options = _options(block)
    lines, caption = [line[1:] for line in block.lines if line.startswith("|")], options.get("caption", "")
    if "data" in options:
        kept = results.kept(options["data"])
        lines, caption = kept.lines, f"{caption} {kept.origin}".strip()
    names, rows = _chosen(options, *_table(lines))
    series: dict[str, list[Point]] = {
        name: [(x, y) for x, *cells in rows if (y := cells[number - 1]) is not None]
        for number, name in enumerate(names)
        if number
    }
    points = [point for line in series.values() for point in line]
    if not points:
        raise ValueError("the table of this plot has no columns of numbers, two spaces or more apart")
    styles = _styles(options, tuple(series))
    across = _axis(options.get("x", names[0]), [x for x, _ in points])
    up = _axis(options.get("y", ""), [y for _, y in points])
    samples = {name: _sample(number, styles[name]) for number, name in enumerate(series)}
    names_of_lines = _legend(samples, 26) if len(series) > 1 else ""  # one line needs no name beside the axis's title
    return figure_of(_svg(across, up, series, styles), caption, names_of_lines, kind="plot")


def _options(block: Block) -> dict[str, str]:
    lines = [line.split(":", 1) for line in block.lines if ":" in line and not line.startswith("|")]
    return {name.strip(): words.strip() for name, words in lines}


def _names(words: str) -> list[str]:
    return [name.strip() for name in words.split(",")]


def _chosen(options: Mapping[str, str], names: list[str], rows: list[list[Any]]) -> tuple[list[str], list[list[Any]]]:
    """The columns that are to be drawn."""
    wanted = _names(options["columns"]) if "columns" in options else names
    if unknown := [name for name in wanted if name not in names]:
        raise ValueError(f"this plot's table has no column {', '.join(unknown)}; there are {', '.join(names)}")
    places = [names.index(name) for name in wanted]
    chosen = [[row[place] for place in places] for row in rows]
    return wanted, [row for row in chosen if row[0] is not None]


def _styles(options: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """How each column is drawn, where that is not a line with dots."""
    found = dict.fromkeys(names, "")
    for style in _STYLES:
        for name in _names(options[style]) if style in options else ():
            if name not in (*names, "all"):
                raise ValueError(f"{style}: this plot has no column {name}; there are {', '.join(names)}")
            found |= dict.fromkeys(names if name == "all" else (name,), style)
    return found


def _sample(number: int, style: str) -> str:
    if style == "points":
        return f'<circle cx="13" cy="5" r="4" fill="{_COLOURS[number % len(_COLOURS)]}"/>'
    return f'<line x1="0" y1="5" x2="26" y2="5" {_stroke(number)}/>'


def _legend(samples: Mapping[str, str], width: int) -> str:
    """What each colour is: HTML, which goes into several rows on a phone."""
    drawn = {
        name: f'<svg width="{width}" height="10" viewBox="0 0 {width} 10" aria-hidden="true">{sample}</svg>'
        for name, sample in samples.items()
    }
    return f'<p class="names">{" ".join(f"<span>{svg}{escape(name)}</span>" for name, svg in drawn.items())}</p>'


def _stroke(number: int) -> str:
    dash = _DASHES[number % len(_DASHES)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'stroke="{_COLOURS[number % len(_COLOURS)]}" stroke-width="2.4"{dashed}'


def _table(lines: Sequence[str]) -> tuple[list[str], list[list[Any]]]:
    """The names above the columns, and the rows of numbers below them."""
    cells = [re.split(r"\s{2,}", line.strip()) for line in lines if line.strip()]
    width = max(map(len, cells), default=0)
    table = [row for row in cells if len(row) == width]
    return table[0] if table else [], [[_number(cell) for cell in row] for row in table[1:]]


def _number(cell: str) -> float | None:
    found = re.fullmatch(r"(-?[\d,.]+(?:e[+-]?\d+)?)(?: ?[A-Za-zµ%×/]+)?", cell)
    return float(found[1].replace(",", "")) if found else None


def _axis(words: str, values: Sequence[float]) -> Axis:
    title, log = re.subn(r", log$", "", words.strip())
    low, high = min(values), max(values)
    if log:
        return Axis(title, True, low * 0.9, high * 1.1)
    margin = 0.04 * (high - low or 1.0)
    return Axis(title, False, 0.0 if 0 <= low < 0.5 * high else low - margin, high + margin)


def _svg(across: Axis, up: Axis, series: dict[str, list[Point]], styles: Mapping[str, str]) -> str:
    inner, deep = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def x(value: float) -> float:
        return _LEFT + inner * across.place(value)

    def y(value: float) -> float:
        return _TOP + deep * (1 - up.place(value))

    parts = [_line(_LEFT, y(tick), _LEFT + inner, y(tick), 0.25) for tick in up.ticks()]
    parts += [_text(_LEFT - 7, y(tick) + 4, f"{tick:,g}", "end") for tick in up.ticks()]
    parts += [_text(x(tick), _TOP + deep + 19, f"{tick:,g}", "middle") for tick in across.ticks()]
    parts += [_line(x(tick), _TOP + deep, x(tick), _TOP + deep + 4, 1) for tick in across.ticks()]
    parts += [_line(_LEFT, _TOP + deep, _LEFT + inner, _TOP + deep, 1)]
    parts += [_text(_LEFT + inner / 2, _HEIGHT - 6, across.title, "middle")]
    parts += [_text(0, 0, up.title, "middle", f"translate(12 {_TOP + deep / 2:.0f}) rotate(-90)")]
    for number, (name, line) in enumerate(series.items()):
        style, colour = styles[name], _COLOURS[number % len(_COLOURS)]
        if style != "points":
            path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in (_stairs(line) if style == "steps" else line))
            parts.append(f'<polyline points="{path}" fill="none" {_stroke(number)}/>')
        if style in ("", "points"):
            size = 4 if style else 3
            parts += [f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="{size}" fill="{colour}"/>' for a, b in line]
    label = escape(f"{up.title} by {across.title}: {', '.join(series)}", quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}" font-family="sans-serif" font-size="14">'
        f"{''.join(parts)}</svg>"
    )


def _stairs(line: Sequence[Point]) -> list[Point]:
    """Level from each number to the place of the next."""
    corners = [((x, y), (following, y)) for (x, y), (following, _) in itertools.pairwise(line)]
    return [*itertools.chain.from_iterable(corners), *line[-1:]]


def _line(x1: float, y1: float, x2: float, y2: float, opacity: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{_INK}" stroke-opacity="{opacity}"/>'


def _text(x: float, y: float, words: str, anchor: str, transform: str = "") -> str:
    moved = f' transform="{transform}"' if transform else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{_INK}"{moved}>{escape(words)}</text>'


# ── number formats ──────────────────────────────────────────────────────────────────────────────────────────────────


def bits(block: Block) -> str:
    """HTML of a `bits` fence: each line is a format's name, its exponent's and its fraction's bits."""
    lines = [line.strip() for line in block.lines if line.strip()]
    caption = lines.pop(0).removeprefix("caption:").strip() if lines and lines[0].startswith("caption:") else ""
    rows = [(name, int(exponent), int(fraction)) for name, exponent, fraction in map(str.split, lines)]
    cell, left, high = 13, 66, 48
    widest = max(1 + exponent + fraction for _, exponent, fraction in rows)
    parts = []
    for number, (name, exponent, fraction) in enumerate(rows):
        top, place = 6 + number * high, 0
        parts.append(_text(left - 10, top + 15, name, "end"))
        for count, colour in zip((1, exponent, fraction), _BITS.values(), strict=True):
            size = f'y="{top}" width="{cell - 2}" height="20" rx="2"'
            cells = range(place, place + count)
            parts += [f'<rect x="{left + cell * one}" {size} fill="{colour}"/>' for one in cells]
            parts.append(_text(left + cell * (place + count / 2) - 1, top + 35, str(count), "middle"))
            place += count
    width, height = left + cell * widest + 8, high * len(rows) + 4
    label = escape("; ".join(f"{name}: 1 sign bit, {e} exponent bits, {f} fraction bits" for name, e, f in rows))
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{label}" font-family="sans-serif" font-size="13">{"".join(parts)}</svg>'
    )
    squares = {word: f'<rect width="10" height="10" rx="2" fill="{colour}"/>' for word, colour in _BITS.items()}
    return figure_of(svg, caption, _legend(squares, 10), kind="plot")
