"""The same as a figure: how each bucket fills, leaves and comes back while backward runs."""

from __future__ import annotations

from dataclasses import dataclass

from microparallel.drawing.kinds import BACKWARD
from microparallel.drawing.layout import CHARACTER, MARGIN
from microparallel.drawing.marks import BASELINE, FAINT, INK, MONOSPACE, label
from microparallel.drawing.markup import Markup, element, joined
from microparallel.drawing.overlap import (
    EXPOSED,
    HIDDEN,
    BucketRow,
    Computed,
    RankRows,
    heading,
    ticks,
    time_text,
)
from microparallel.drawing.svg import svg
from microparallel.trace import Trace

_WIDTH, _LEFT, _TOP = 960.0, 96.0, 62.0
_ROW, _BUCKET, _GAP, _BETWEEN_RANKS = 26.0, 16.0, 4.0, 16.0
_AXIS, _LEGEND = 32.0, 30.0
_DOT = 3.0


@dataclass(frozen=True, slots=True)
class _Canvas:
    """From time to pixels, and how times are written."""

    makespan: float
    seconds: bool

    @property
    def pixels_per_time(self) -> float:
        return (_WIDTH - _LEFT - MARGIN) / (self.makespan or 1.0)

    def x(self, time: float) -> float:
        return _LEFT + time * self.pixels_per_time

    def text(self, time: float) -> str:
        return time_text(time, seconds=self.seconds)


def overlap_figure(trace: Trace, rows: list[RankRows], *, seconds: bool) -> str:
    """Draw ranks and their buckets as an SVG image; hovering over a bar says when it left and came back."""
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
    parts += [_axis(canvas, bottom), *blocks, _legend(bottom + _AXIS)]
    text = svg(joined(*parts), _WIDTH, bottom + _AXIS + _LEGEND, role="img", label=" · ".join([title, *metrics]))
    return text + "\n"


def _height(rows: RankRows) -> float:
    return _ROW + len(rows.buckets) * (_BUCKET + _GAP)


def _rank(rows: RankRows, top: float, canvas: _Canvas) -> Markup:
    """What a rank computes, its buckets below, and where its computation ends."""
    parts = [_name(f"rank {rows.rank}", top + _ROW / 2, weight=600), _track(top, _ROW)]
    parts += [_stretch(stretch, top, canvas) for stretch in rows.computed]
    at = top + _ROW + _GAP
    for bucket in rows.buckets:
        parts += [_name(bucket.name, at + _BUCKET / 2), _track(at, _BUCKET), _bar(bucket, at, canvas)]
        at += _BUCKET + _GAP
    if rows.computed:
        x = canvas.x(rows.computed[-1].end)
        line = {"x1": x, "x2": x, "y1": top, "y2": at - _GAP}
        parts.append(element("line", **line, stroke=INK, stroke_dasharray="3 3", class_="end"))
    return element("g", joined(*parts), class_="rank")


def _name(text: str, middle: float, *, weight: float | None = None) -> Markup:
    place = {"x": _LEFT - 10, "y": middle + BASELINE}
    return element("text", text, **place, text_anchor="end", font_family=MONOSPACE, font_size=11, font_weight=weight)


def _track(top: float, height: float) -> Markup:
    place = {"x": _LEFT, "y": top, "width": _WIDTH - _LEFT - MARGIN, "height": height}
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
    """A dot for each gradient, a line while the full bucket waits, and a bar while it travels."""
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
    parts += [
        element("circle", cx=canvas.x(time), cy=middle, r=_DOT, fill=BACKWARD.fill, stroke=INK, stroke_width=0.6)
        for time in bucket.ready
    ]
    return element("g", *parts, class_="bucket")


def _length(bucket: BucketRow) -> float:
    return sum(last - first for first, last in bucket.exposed)


def _axis(canvas: _Canvas, bottom: float) -> Markup:
    parts = [element("line", x1=_LEFT, x2=_WIDTH - MARGIN, y1=bottom, y2=bottom, stroke=FAINT)]
    for time, text in ticks(canvas.makespan, 60 / canvas.pixels_per_time, seconds=canvas.seconds):
        x = canvas.x(time)
        parts.append(element("line", x1=x, x2=x, y1=_TOP - 6, y2=bottom, stroke=FAINT, stroke_opacity=0.35))
        parts.append(element("text", text, x=x, y=bottom + 15, text_anchor="middle", font_size=11))
    name = "ms" if canvas.seconds else "time"
    parts.append(element("text", name, x=_LEFT - 10, y=bottom + 15, text_anchor="end", font_size=11))
    return element("g", joined(*parts), class_="axis")


def _legend(top: float) -> Markup:
    """The signs of a bucket, each with what it means."""
    y, middle = top + 10, top + 6
    signs: list[tuple[Markup, str]] = [
        (
            element("circle", cx=8, cy=6, r=_DOT, fill=BACKWARD.fill, stroke=INK, stroke_width=0.6),
            "gradient ready",
        ),
        (
            element("line", x1=0, x2=16, y1=6, y2=6, stroke=HIDDEN.fill, stroke_width=1.5),
            "full, waits for its turn or for a rank",
        ),
        (element("rect", width=16, height=12, rx=2, fill=HIDDEN.fill), "all-reduce behind computation"),
        (element("rect", width=16, height=12, rx=2, fill=EXPOSED.fill), "exposed: nothing to hide behind"),
        (
            element("line", x1=8, x2=8, y1=0, y2=12, stroke=INK, stroke_dasharray="3 3"),
            "computation ends",
        ),
    ]
    parts: list[Markup] = []
    x = MARGIN
    for sign, words in signs:
        parts.append(element("g", sign, transform=f"translate({x:.0f} {middle - 6:.0f})"))
        parts.append(element("text", words, x=x + 22, y=y))
        x += 22 + len(words) * 6.0 + 14
    return element("g", joined(*parts), class_="legend")
