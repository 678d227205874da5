"""The legend of a drawing: each sign or colour with what it means, as text, in a figure, and on a page.

```
 F  forward 1    B  backward 2   · idle   the number is the micro-batch
```
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from microparallel.drawing.kinds import Kind
from microparallel.drawing.lines import Line, Segment, flow
from microparallel.drawing.markup import MARGIN, Markup, element, joined
from microparallel.drawing.rows import Rows
from microparallel.text import short

LINE = 21.0  # pixels from one line of a figure's legend to the next


@dataclass(frozen=True, slots=True)
class Entry:
    """One sign and what it means.

    Attributes:
        sign: how it looks in a text; empty for a remark.
        words: what it means.
        kind: gives the sign its colour, and is a swatch of that colour in a figure.
        detail: how long it takes. A figure then names the letter, too, since its cells show it.
        mark: what stands in a figure instead of a swatch, in 16 × 12 pixels.
        quiet: whether it is dim in a terminal.
    """

    sign: str
    words: str
    kind: Kind | None = None
    detail: str = ""
    mark: Markup | None = None
    quiet: bool = False

    @property
    def line(self) -> Line:
        """The entry in a text."""
        if self.kind is None:
            return [Segment(f"{self.sign} {self.words}".strip(), style="dim" if self.quiet else "")]
        return [Segment(self.sign, self.kind), Segment(f" {self.words} {self.detail}".rstrip())]

    @property
    def caption(self) -> str:
        """Its words in a figure."""
        return f"{self.sign.strip()} {self.words}, {self.detail}" if self.detail else self.words


def of_kind(kind: Kind, detail: str = "") -> Entry:
    """The entry of a kind of operation."""
    return Entry(f" {kind.letter} ", kind.word, kind, detail)


def of_rows(rows: Rows) -> list[Entry]:
    """The kinds of operations of a timeline, and how long they take: `2`, or `1 to 3`."""
    times: dict[Kind, list[float]] = {kind: [] for kind in rows.kinds}
    for cell in rows.cells:
        times[cell.kind].append(cell.duration)
    return [
        of_kind(kind, " to ".join(word for word, _ in groupby(map(short, (min(lengths), max(lengths))))))
        for kind, lengths in times.items()
    ]


def legend_text(entries: Iterable[Entry], width: int | None, between: str = "   ") -> list[Line]:
    """The entries one after another, in as many lines as it takes."""
    return flow([entry.line for entry in entries], between, width)


def legend_figure(entries: Iterable[Entry], notes: Sequence[str], top: float, right: float) -> tuple[Markup, float]:
    """Swatches in as many lines as it takes, then notes, a line each; and how high all of it is."""
    parts: list[Markup] = []
    x, line = MARGIN, 0
    for entry in entries:
        width = 22 + len(entry.caption) * 6.2 + 14
        if x > MARGIN and x + width > right:
            x, line = MARGIN, line + 1
        y = top + line * LINE
        if entry.mark is not None:
            parts.append(element("g", entry.mark, transform=f"translate({x:.1f} {y:.1f})"))
        elif entry.kind is not None:
            parts.append(element("rect", x=x, y=y, width=16, height=12, rx=3, fill=entry.kind.fill))
        parts.append(element("text", entry.caption, x=x + 22, y=y + 10))
        x += width
    for note in notes:
        line += bool(parts)
        parts.append(element("text", note, x=MARGIN, y=top + line * LINE + 10, font_size=11))
    return element("g", joined(*parts), class_="legend"), (line + 1) * LINE


def legend_page(entries: Iterable[Entry], notes: Sequence[str]) -> list[Markup]:
    """A list with a coloured square for each entry, then notes, a paragraph each."""
    items = [
        element("li", Markup(f'<i style="background:{entry.kind.fill}"></i>'), entry.caption)
        for entry in entries
        if entry.kind is not None
    ]
    remarks = [element("p", note, class_="quiet") for note in notes]
    return [element("ul", *items, class_="legend"), *remarks] if items else remarks
