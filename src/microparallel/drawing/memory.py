"""What ranks hold, drawn under their timelines: bytes over time as a strip, and how much of what there is at the peak.

```
rank 0        │F0│F1│·····│B0   │B1   │
       bytes  ▅▅▅▆▆▆▆▆▆▆▆▆██████▇▇▇▇▇▇        in a figure: an area for each kind, one upon the other
```

All strips of a drawing have one scale, also those of several programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from microparallel.drawing.kinds import BACKWARD, FORWARD, OPTIMIZER_STEP, SEND, Kind
from microparallel.drawing.legend import Entry
from microparallel.drawing.lines import Line, Segment, clipped
from microparallel.drawing.markup import BASELINE, CHARACTER, FAINT, INK, MONOSPACE, Markup, element, joined, label
from microparallel.text import short, show_size
from microparallel.trace import RankMemory, Trace
from microparallel.trace.intervals import Interval
from microparallel.trace.memory import Kind as Held

# From the bottom up. What an operation makes, or needs, has its colour: forwards make activations.
KINDS: dict[Held, Kind] = {
    "parameters": Kind("p", "parameters", "#009e73"),
    "optimizer": Kind("o", "optimizer state", OPTIMIZER_STEP.fill),
    "gradients": Kind("g", "gradients", BACKWARD.fill),
    "activations": Kind("a", "activations", FORWARD.fill),
    "in flight": Kind("f", "in flight", SEND.fill),
}
NAME = "bytes"  # of a strip, where rows have names
HEIGHT = 56.0  # of a strip in a figure
_ROOM_FOR_NUMBER = 13.0  # above the highest strip
_LEVELS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Strips:
    """What each rank of a trace holds, on the scale of a drawing.

    Attributes:
        ranks: what each holds.
        most: how many bytes fill a strip: the most that any rank of the drawing holds at once.
    """

    ranks: list[RankMemory]
    most: float

    @property
    def kinds(self) -> list[Held]:
        """The kinds that there are, from the bottom up."""
        return [kind for kind in KINDS if any(rank.peak_of(kind) for rank in self.ranks)]


def strips_of(traces: Sequence[Trace]) -> list[Strips]:
    """The strips of several traces, all on one scale."""
    most = max((peak for trace in traces for peak in trace.peak_memory), default=0.0)
    return [Strips(trace.memory, most) for trace in traces]


def size_text(size: float) -> str:
    """A number of bytes; a small one may be a fraction, since ranks share."""
    return f"{short(size)} B" if size < 1000 else show_size(size)


# ── as text ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def strip_text(strips: Strips, rank: int, column: Callable[[float], int], columns: int) -> Segment:
    """One rank's strip: in each column, the most bytes that it holds there, as a block of that height.

    Args:
        strips: of the trace.
        rank: whose.
        column: in which column a time falls.
        columns: how many there are.
    """
    highest = [0.0] * columns
    changes = strips.ranks[rank].total
    for (time, size), (following, _) in pairwise([*changes, (math.inf, 0.0)]):
        first = column(time)
        last = columns if following == math.inf else max(column(following), first + 1)
        for at in range(first, min(last, columns)):
            highest[at] = max(highest[at], size)
    blocks = (math.ceil((len(_LEVELS) - 1) * size / (strips.most or 1) - 1e-9) for size in highest)
    return Segment("".join(_LEVELS[level] for level in blocks), style=KINDS["parameters"].fill)


def strip_legend(strips: Strips) -> Entry:
    """What a full block of a strip is."""
    return Entry(_LEVELS[-1], f"{size_text(strips.most)} held")


def peak_table(strips: Strips, width: int | None, when: Callable[[float], str] = short) -> list[Line]:
    """For each rank, how much it holds at most, when (in the words of `when`), and how much of that is what."""
    kinds = strips.kinds
    rows = [["peak", "time", "all", *kinds]]
    for rank, memory in enumerate(strips.ranks):
        time, then = memory.highest
        size = sum(then.values())
        rows.append([f"rank {rank}", when(time), size_text(size), *(size_text(then[kind]) for kind in kinds)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    between = 2 if width is None or sum(widths) + 2 * len(widths) - 2 <= width else 1
    lines = []
    for number, (name, *cells) in enumerate(rows):
        padded = "".join(cell.rjust(room + between) for cell, room in zip(cells, widths[1:], strict=True))
        line = [Segment(name.ljust(widths[0]), style="bold"), Segment(padded, style="" if number else "dim")]
        lines.append(line if width is None else clipped(line, width))
    return lines


# ── as a figure ───────────────────────────────────────────────────────────────────────────────────────────────────────


def strip_figure(strips: Strips, rank: int, top: float, x: Callable[[float], float], bounds: Interval) -> Markup:
    """One rank's strip: an area for each kind, one upon the other, and a mark with its number at the peak.

    Args:
        strips: of the trace.
        rank: whose.
        top: the upper edge.
        x: where a time is.
        bounds: when the drawing begins and ends.
    """
    memory = strips.ranks[rank]
    start, end = bounds
    bottom = top + HEIGHT
    pixels = (HEIGHT - _ROOM_FOR_NUMBER) / (strips.most or 1)
    place = {"x": x(start), "y": top, "width": x(end) - x(start), "height": HEIGHT}
    parts = [element("rect", **place, fill=FAINT, fill_opacity=0.1, class_="track")]
    below = [0.0] * len(memory.moments)
    for kind in strips.kinds:
        above = [base + sizes[kind] for base, (_, sizes) in zip(below, memory.moments, strict=True)]
        if above != below:
            edges = [x(min(time, end)) for time in (*(time for time, _ in memory.moments), end)]
            upper, lower = (_steps(edges, [bottom - size * pixels for size in sizes]) for sizes in (above, below))
            outline = " ".join(f"{across:.1f},{down:.1f}" for across, down in (*upper, *reversed(lower)))
            words = f"{KINDS[kind].word} of rank {rank}: at most {size_text(memory.peak_of(kind))}"
            parts.append(element("polygon", element("title", words), points=outline, fill=KINDS[kind].fill))
        below = above
    return element("g", joined(*parts, _peak(memory, x, bounds, bottom, pixels)), class_="memory")


def _steps(edges: Sequence[float], heights: Sequence[float]) -> list[tuple[float, float]]:
    """A line that stays at each height from its edge to the next."""
    return [(x, height) for ends, height in zip(pairwise(edges), heights, strict=True) for x in ends]


def _peak(memory: RankMemory, x: Callable[[float], float], bounds: Interval, bottom: float, pixels: float) -> Markup:
    """A dot where a rank holds the most for the first time, and how many bytes that is."""
    time, size = memory.peak
    at, height = x(time), bottom - size * pixels
    text = size_text(size)
    room = len(text) * CHARACTER + 10
    left = at + room > x(bounds[1]) and at - room > x(bounds[0])
    parts = memory.highest[1].items()
    shares = ", ".join(f"{KINDS[kind].word} {size_text(part)}" for kind, part in parts if part)
    return element(
        "g",
        element("title", f"the most: {text}: {shares}"),
        element("circle", cx=at, cy=height, r=2.6, fill=INK),
        label(text, at - 6 if left else at + 6, height - 7, text_anchor="end" if left else "start", class_="peak"),
    )


def strip_name(top: float, left: float) -> Markup:
    """What stands before a strip."""
    return element("text", f"  {NAME}", x=left, y=top + HEIGHT / 2 + BASELINE, font_family=MONOSPACE)


def all_kinds(strips: Sequence[Strips]) -> list[Entry]:
    """The kinds that are in a figure, for its legend."""
    return [Entry("", look.word, look) for kind, look in KINDS.items() if any(kind in one.kinds for one in strips)]


def scale_note(strips: Strips) -> str:
    """What the strips have in common."""
    return f"all strips of bytes have one scale; the highest is {size_text(strips.most)}"
