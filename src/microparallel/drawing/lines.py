"""Text that knows what it shows: lines of segments, which become a plain string or colours in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from microparallel.drawing.kinds import Kind, shaded

if TYPE_CHECKING:
    from rich.text import Text


class Segment(NamedTuple):
    """A piece of a line: `kind` gives the colour of an operation, `style` (one of rich's) that of other text."""

    text: str
    kind: Kind | None = None
    shade: int = 0
    style: str = ""


Line = list[Segment]
WIDEST = 400  # columns of a drawing without a given width
NARROWEST = 40


def plain(lines: list[Line]) -> str:
    """The lines without colour, without blanks at their ends."""
    return "".join("".join(segment.text for segment in line).rstrip() + "\n" for line in lines)


def coloured(lines: list[Line]) -> Text:
    """The lines as rich shows them in a terminal; only this needs rich."""
    from rich.text import Text

    text = Text(no_wrap=True, overflow="ignore", end="")
    for line in lines:
        for segment in line:
            text.append(segment.text, _style(segment))
        text.append("\n")
    return text


def width_of(line: Line) -> int:
    """How many columns a line takes."""
    return sum(len(segment.text) for segment in line)


def clipped(line: Line, width: int) -> Line:
    """As much of a line as fits; an ellipsis (…) says that there was more."""
    kept: Line = []
    room = width - 1
    if width_of(line) <= width:
        return line
    for segment in line:
        if len(segment.text) > room:
            return [*kept, segment._replace(text=segment.text[:room]), Segment("…")]
        kept.append(segment)
        room -= len(segment.text)
    return kept


def flow(items: list[Line], between: str, width: int | None) -> list[Line]:
    """Put items one after another, in as many lines as it takes for none to be wider than `width`."""
    lines: list[Line] = [[]]
    for item in items:
        if width is not None and lines[-1] and width_of(lines[-1]) + len(between) + width_of(item) > width:
            lines.append([])
        lines[-1] += [Segment(between), *item] if lines[-1] else item
    return lines


def prose(text: str, width: int | None, *, style: str, between: str = " ") -> list[Line]:
    """A sentence, or a heading of several parts, in as many lines as it takes."""
    if width is not None and max(map(len, text.split(between))) > width:
        between = " "
    return flow([[Segment(part, style=style)] for part in text.split(between)], between, width)


def _style(segment: Segment) -> str:
    if segment.kind is None:
        return segment.style
    return f"{segment.kind.ink} on {shaded(segment.kind.fill, segment.shade)}"
