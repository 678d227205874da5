"""A data-parallel step bucket by bucket: how each fills while backward runs, and when its all-reduce begins and ends.

```
rank 0      │forward    │B3    │B2    │B1    │B0    │
  bucket 0                     •      •████████
  bucket 1                                   •      •──██░░░░░░
            ├─────┼─────┼─────┼─────┼─────┼─────┼─────┼─────┤
```

It is read off a trace alone, so a simulated step and a measured one are drawn alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from microparallel.drawing.kinds import BACKWARD, FORWARD, Kind, kind_of
from microparallel.drawing.legend import Entry, legend_figure, legend_text
from microparallel.drawing.lines import NARROWEST, Line, Segment, coloured, plain, prose
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
from microparallel.drawing.rows import from_zero
from microparallel.drawing.scale import round_step
from microparallel.errors import UsageError
from microparallel.program import AllReduce, Backward, Bucket, Forward, ForwardStages, TrainingStep
from microparallel.text import count, short, show_percent, show_seconds
from microparallel.trace import Event, Trace
from microparallel.trace.intervals import Interval, length, outside, union

__all__ = ["BucketRow", "RankRows", "coloured", "draw_overlap", "overlap_lines", "rows_by_bucket"]

Format = Literal["text", "svg"]
# The colour of what computation hides is that of every all-reduce; of what it does not, one that calls for attention.
HIDDEN, EXPOSED = Kind("█", "all-reduce behind computation", "#0072b2", "#ffffff"), Kind("░", "exposed", "#d55e00")
_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Computed:
    """A stretch of computation: the whole forward, or the backward of one layer."""

    name: str
    kind: Kind
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class BucketRow:
    """One bucket of one rank, from its first gradient until its sum is there."""

    name: str
    ready: tuple[float, ...]  # when each layer had its gradients
    full: float
    start: float  # when it was full, the buckets before it were done, and all ranks had come
    end: float
    exposed: tuple[Interval, ...]  # while the rank computed nothing


@dataclass(frozen=True, slots=True)
class RankRows:
    """One rank: what it computes, and its buckets in the order of their all-reduces."""

    rank: int
    computed: list[Computed]
    buckets: list[BucketRow]


def draw_overlap(
    trace: Trace, as_: Format = "text", *, rank: int | None = None, seconds: bool = False, width: int = _WIDTH
) -> str:
    """Draw a data-parallel step bucket by bucket, and return the drawing.

    Args:
        trace: of a step that all-reduces buckets: measured (`mp.course.HookTracker`) or simulated (`mp.schedules.ddp`).
        as_: "text" for a terminal, "svg" for a figure.
        rank: draw this rank only.
        seconds: the trace's times are seconds, and are shown in milliseconds; otherwise they have no unit.
        width: columns of a text.

    Example:
        ```python
        trace = mp.simulate(mp.schedules.ddp(layers=8, buckets=4, ranks=2), mp.Costs(seconds_per_byte=1))
        print(mp.course.draw_overlap(trace))
        ```
    """
    if as_ not in get_args(Format):
        raise UsageError(f"as_={as_!r}: this drawing is one of {', '.join(get_args(Format))}")
    if as_ == "text":
        return plain(overlap_lines(trace, rank=rank, seconds=seconds, width=width))
    return overlap_figure(trace, rows_by_bucket(trace, rank), seconds=seconds)


def rows_by_bucket(trace: Trace, rank: int | None = None) -> list[RankRows]:
    """What the drawing shows, of every rank or of one; time begins at 0."""
    goal = trace.followed.goal
    if not isinstance(goal, TrainingStep) or not goal.buckets:
        raise UsageError(f"{trace.followed.name} ({goal}) has no buckets to draw; try mp.draw")
    if rank is not None and not 0 <= rank < trace.followed.world_size:
        raise UsageError(f"rank={rank}: the trace has ranks 0 to {trace.followed.world_size - 1}")
    events = from_zero(trace).by_rank
    ranks = range(trace.followed.world_size) if rank is None else [rank]
    return [RankRows(number, _computed(events[number]), _buckets(events[number], goal)) for number in ranks]


def heading(trace: Trace, *, seconds: bool) -> list[str]:
    """What the step is, how long it took, and how much communication was hidden."""
    ranks, messages = trace.followed.world_size, len(trace.followed.all_reduces())
    title = f"{trace.followed.name} · {count(ranks, 'rank')} · {count(messages, 'all-reduce')}"
    communicating = max(length(times) for times in trace.communicating)
    hidden = (
        f"communication {time_text(communicating, seconds=seconds)}, {show_percent(trace.hidden_share)} of it hidden"
    )
    return [title, f"step {time_text(trace.makespan, seconds=seconds)}", hidden]


def time_text(time: float, *, seconds: bool) -> str:
    """A length of time in words: in seconds or milliseconds, or without a unit."""
    return show_seconds(time) if seconds else short(time)


def _computed(events: list[Event]) -> list[Computed]:
    """The forward as one stretch, then each backward: buckets leave during the backward."""
    forwards = [event for event in events if isinstance(event.op, Forward | ForwardStages) and event.duration > 0]
    stretches = [Computed("forward", FORWARD, forwards[0].start, max(f.end for f in forwards))] if forwards else []
    for event in events:
        if event.duration > 0 and event.computes and not isinstance(event.op, Forward | ForwardStages):
            name = f"B{event.op.stage}" if isinstance(event.op, Backward) else str(event.op)
            stretches.append(Computed(name, kind_of(event.operation), event.start, event.end))
    return stretches


def _buckets(events: list[Event], goal: TrainingStep) -> list[BucketRow]:
    computing = union((event.start, event.end) for event in events if event.computes)
    ready = {event.op.stage: event.end for event in events if isinstance(event.op, Backward)}
    rows = []
    for event in events:
        if isinstance(event.op, AllReduce) and isinstance(event.op.value, Bucket):
            index = event.op.value.index
            mine = tuple(sorted(ready[stage] for stage in range(*goal.buckets[index]) if stage in ready))
            exposed = tuple(outside([(event.start, event.end)], computing))
            full = mine[-1] if mine else event.start
            rows.append(BucketRow(_name(index, goal), mine, full, event.start, event.end, exposed))
    return rows


def _name(index: int, goal: TrainingStep) -> str:
    return f"gradient {goal.buckets[index][0]}" if _one_by_one(goal) else f"bucket {index}"


def _one_by_one(goal: TrainingStep) -> bool:
    """Whether every bucket holds one gradient: then its row is named by the gradient's number."""
    return all(stop == start + 1 for start, stop in goal.buckets)


def _legend(trace: Trace) -> list[Entry]:
    goal = trace.followed.goal
    singly = isinstance(goal, TrainingStep) and _one_by_one(goal)
    what = "0 (layer, or weight)" if singly else "layer 0"
    line = element("line", x1=0, x2=16, y1=6, y2=6, stroke=HIDDEN.fill, stroke_width=1.5)
    return [
        Entry("│B0 ", f"backward of {what}", BACKWARD),
        Entry("•", "its gradient is ready", mark=_dot(8, 6)),
        Entry("─", "full: waits its turn, or other ranks", mark=line),
        Entry("█", "all-reduce behind computation", HIDDEN),
        Entry("░", "all-reduce with nothing to hide behind", EXPOSED),
    ]


def _dot(x: float, y: float) -> Markup:
    return element("circle", cx=x, cy=y, r=3, fill=BACKWARD.fill, stroke=INK, stroke_width=0.6)


# ── as text ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def overlap_lines(trace: Trace, *, rank: int | None = None, seconds: bool = False, width: int = _WIDTH) -> list[Line]:
    """Draw as lines that know their colours: `plain` makes a string of them, `coloured` what rich prints."""
    if width < NARROWEST:
        raise UsageError(f"width={width}: a drawing needs at least {NARROWEST} columns")
    rows = rows_by_bucket(trace, rank)
    gutter = max((len(f"  {bucket.name} ") for mine in rows for bucket in mine.buckets), default=8)
    columns = width - gutter - 1
    scale = columns / (trace.makespan or 1.0)
    lines = prose(" · ".join(heading(trace, seconds=seconds)), width, style="bold", between=" · ")
    for mine in rows:
        lines.append([Segment(f"rank {mine.rank}".ljust(gutter), style="bold"), *_compute_row(mine, scale, columns)])
        lines += [_bucket_row(bucket, gutter, scale) for bucket in mine.buckets]
    return [
        *lines,
        *_axis(trace.makespan, scale, gutter, columns, seconds=seconds),
        *legend_text(_legend(trace), width),
    ]


def _compute_row(rows: RankRows, scale: float, columns: int) -> Line:
    line: Line = []
    at = 0
    for stretch in rows.computed:
        start, end = max(at, round(stretch.start * scale)), round(stretch.end * scale)
        if end > start:
            line += [Segment("·" * (start - at), style="dim"), _cell(stretch, end - start)]
            at = end
    return [*line, Segment("│" + "·" * (columns - at - 1) + "│" * (at < columns), style="dim")]


def _cell(stretch: Computed, width: int) -> Segment:
    name = next((name for name in (stretch.name, stretch.kind.letter) if len(name) < width), "")
    return Segment(f"│{name}".ljust(width), stretch.kind)


def _bucket_row(bucket: BucketRow, gutter: int, scale: float) -> Line:
    def column(time: float) -> int:
        return round(time * scale)

    def kind(at: int) -> Kind:
        middle = min(max((at + 0.5) / scale, bucket.start), bucket.end)
        return EXPOSED if any(first <= middle <= last for first, last in bucket.exposed) else HIDDEN

    start = column(bucket.start)
    signs = [" "] * start
    for at in range(column(bucket.full), start):
        signs[at] = "─"
    for time in bucket.ready if start else ():
        signs[min(column(time), start - 1)] = "•"
    bar = [kind(at) for at in range(start, max(column(bucket.end), start + 1))]
    name = Segment(f"  {bucket.name}".ljust(gutter), style="dim")
    return [name, Segment("".join(signs)), *(Segment(kind.letter, kind) for kind in bar)]


def _axis(makespan: float, scale: float, gutter: int, columns: int, *, seconds: bool) -> list[Line]:
    marks, numbers = ["─"] * (columns + 1), [" "] * (columns + 1)
    for time, text in ticks(makespan, 8 / scale, seconds=seconds):
        column = round(time * scale)
        marks[column] = "┼"
        if column + len(text) <= columns + 1:
            numbers[column : column + len(text)] = text
    marks[0], marks[-1] = "├", "┤"
    name = "ms" if seconds else "time"
    return [
        [Segment(" " * gutter + "".join(marks), style="dim")],
        [Segment(name.ljust(gutter) + "".join(numbers).rstrip())],
    ]


def ticks(makespan: float, least: float, *, seconds: bool) -> Iterator[tuple[float, str]]:
    """Round times no closer together than `least`, each with its number."""
    factor = 1e3 if seconds else 1.0
    step = round_step(least * factor)
    for index in range(math.floor(makespan * factor / step + 1e-9) + 1):
        yield index * step / factor, short(index * step)


# ── as a figure ───────────────────────────────────────────────────────────────────────────────────────────────────────

_FIGURE_WIDTH, _LEFT, _TOP = 960.0, 96.0, 62.0
_ROW, _BUCKET, _GAP, _BETWEEN_RANKS = 26.0, 16.0, 4.0, 16.0
_AXIS = 32.0


@dataclass(frozen=True, slots=True)
class _Canvas:
    """From time to pixels, and how times are written."""

    makespan: float
    seconds: bool

    @property
    def pixels_per_time(self) -> float:
        return (_FIGURE_WIDTH - _LEFT - MARGIN) / (self.makespan or 1.0)

    def x(self, time: float) -> float:
        return _LEFT + time * self.pixels_per_time

    def text(self, time: float) -> str:
        return time_text(time, seconds=self.seconds)


def overlap_figure(trace: Trace, rows: list[RankRows], *, seconds: bool) -> str:
    """Draw ranks and their buckets as an SVG image; hovering over a bar says when its all-reduce began and ended."""
    canvas = _Canvas(trace.makespan, seconds)
    title, *metrics = heading(trace, seconds=seconds)
    parts = [
        element("title", " · ".join([title, *metrics])),
        element("text", title, x=MARGIN, y=24, font_size=15, font_weight=600),
        element("text", " · ".join(metrics), x=MARGIN, y=43),
    ]
    at = _TOP
    blocks = []
    for mine in rows:
        blocks.append(_rank(mine, at, canvas))
        at += _height(mine) + _BETWEEN_RANKS
    bottom = at - _BETWEEN_RANKS + _GAP
    end = element("line", x1=8, x2=8, y1=0, y2=12, stroke=INK, stroke_dasharray="3 3")
    backward, *others = _legend(trace)
    named = replace(backward, words=f"B0 {backward.words}")
    entries = [named, *others, Entry("", "computation ends", mark=end)]
    legend, height = legend_figure(entries, [], bottom + _AXIS, _FIGURE_WIDTH)
    parts += [_figure_axis(canvas, bottom), *blocks, legend]
    words = " · ".join([title, *metrics])
    return svg(joined(*parts), _FIGURE_WIDTH, bottom + _AXIS + height, role="img", label=words) + "\n"


def _height(rows: RankRows) -> float:
    return _ROW + len(rows.buckets) * (_BUCKET + _GAP)


def _rank(rows: RankRows, top: float, canvas: _Canvas) -> Markup:
    """What a rank computes, its buckets below, and where its computation ends."""
    parts = [_figure_name(f"rank {rows.rank}", top + _ROW / 2, weight=600), _track(top, _ROW)]
    parts += [_stretch(stretch, top, canvas) for stretch in rows.computed]
    at = top + _ROW + _GAP
    for bucket in rows.buckets:
        parts += [_figure_name(bucket.name, at + _BUCKET / 2), _track(at, _BUCKET), _bar(bucket, at, canvas)]
        at += _BUCKET + _GAP
    if rows.computed:
        x = canvas.x(rows.computed[-1].end)
        line = {"x1": x, "x2": x, "y1": top, "y2": at - _GAP}
        parts.append(element("line", **line, stroke=INK, stroke_dasharray="3 3", class_="end"))
    return element("g", joined(*parts), class_="rank")


def _figure_name(text: str, middle: float, *, weight: float | None = None) -> Markup:
    place = {"x": _LEFT - 10, "y": middle + BASELINE}
    return element("text", text, **place, text_anchor="end", font_family=MONOSPACE, font_size=11, font_weight=weight)


def _track(top: float, height: float) -> Markup:
    place = {"x": _LEFT, "y": top, "width": _FIGURE_WIDTH - _LEFT - MARGIN, "height": height}
    return element("rect", **place, rx=2, fill=FAINT, fill_opacity=0.12, class_="track")


def _stretch(stretch: Computed, top: float, canvas: _Canvas) -> Markup:
    x, width = canvas.x(stretch.start), (stretch.end - stretch.start) * canvas.pixels_per_time
    inset = min(0.75, width / 4)
    place = {"x": x + inset, "y": top, "width": width - 2 * inset, "height": _ROW}
    words = f"{stretch.name}, from {canvas.text(stretch.start)} to {canvas.text(stretch.end)}"
    parts = [element("title", words), element("rect", **place, rx=min(3, width / 4), fill=stretch.kind.fill)]
    fitting = [name for name in (stretch.name, stretch.kind.letter) if len(name) * CHARACTER < width - 4]
    if fitting:
        parts.append(label(fitting[0], x + width / 2, top + _ROW / 2, fill=stretch.kind.ink))
    return element("g", *parts, class_=f"cell {stretch.kind.name}")


def _bar(bucket: BucketRow, top: float, canvas: _Canvas) -> Markup:
    """A dot for each gradient, a line while the full bucket waits, and a bar while its all-reduce runs."""
    middle = top + _BUCKET / 2
    start, end = canvas.x(bucket.start), canvas.x(bucket.end)
    words = (
        f"{bucket.name}: ready at {canvas.text(bucket.full)}, under way from {canvas.text(bucket.start)} "
        f"to {canvas.text(bucket.end)}, of which {canvas.text(_length(bucket))} exposed"
    )
    parts = [element("title", words)]
    if bucket.start > bucket.full:
        line = {"x1": canvas.x(bucket.full), "x2": start, "y1": middle, "y2": middle}
        parts.append(element("line", **line, stroke=HIDDEN.fill, stroke_width=1.5, class_="waits"))
    box = {"x": start, "y": top, "width": max(end - start, 1.0), "height": _BUCKET}
    parts.append(element("rect", **box, rx=2, fill=HIDDEN.fill, class_="hidden"))
    for first, last in bucket.exposed:
        box = {"x": canvas.x(first), "y": top, "width": canvas.x(last) - canvas.x(first), "height": _BUCKET}
        parts.append(element("rect", **box, rx=2, fill=EXPOSED.fill, class_="exposed"))
    parts += [_dot(canvas.x(time), middle) for time in bucket.ready]
    return element("g", *parts, class_="bucket")


def _length(bucket: BucketRow) -> float:
    return sum(last - first for first, last in bucket.exposed)


def _figure_axis(canvas: _Canvas, bottom: float) -> Markup:
    parts = [element("line", x1=_LEFT, x2=_FIGURE_WIDTH - MARGIN, y1=bottom, y2=bottom, stroke=FAINT)]
    for time, text in ticks(canvas.makespan, 60 / canvas.pixels_per_time, seconds=canvas.seconds):
        x = canvas.x(time)
        parts.append(element("line", x1=x, x2=x, y1=_TOP - 6, y2=bottom, stroke=FAINT, stroke_opacity=0.35))
        parts.append(element("text", text, x=x, y=bottom + 15, text_anchor="middle", font_size=11))
    name = "ms" if canvas.seconds else "time"
    parts.append(element("text", name, x=_LEFT - 10, y=bottom + 15, text_anchor="end", font_size=11))
    return element("g", joined(*parts), class_="axis")
