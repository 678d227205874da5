"""A data-parallel step bucket by bucket: how each fills while backward runs, when it leaves, when it is back.

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
from dataclasses import dataclass
from typing import Literal, get_args

from microparallel.drawing.kinds import BACKWARD, FORWARD, Kind, kind_of
from microparallel.drawing.lines import NARROWEST, Line, Segment, coloured, flow, plain, prose
from microparallel.drawing.numbers import round_step
from microparallel.drawing.rows import from_zero
from microparallel.errors import UsageError
from microparallel.program import AllReduce, Backward, Bucket, Forward, ForwardStages, TrainingStep
from microparallel.text import count, short, show_percent, show_seconds
from microparallel.trace import Event, Trace
from microparallel.trace.intervals import Span, length, outside, union

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
    """One bucket of one rank, from its first gradient until it is back."""

    name: str
    ready: tuple[float, ...]  # when each layer's gradients were
    full: float
    start: float  # full, its turn, and all ranks there
    end: float
    exposed: tuple[Span, ...]  # while the rank computed nothing


@dataclass(frozen=True, slots=True)
class RankRows:
    """One rank: what it computes, and its buckets in the order in which they leave."""

    rank: int
    computed: list[Computed]
    buckets: list[BucketRow]


def draw_overlap(
    trace: Trace, as_: Format = "text", *, rank: int | None = None, seconds: bool = False, width: int = _WIDTH
) -> str:
    """Draw a data-parallel step bucket by bucket, and return the drawing.

    Args:
        trace: of a step that all-reduces buckets: measured (`mp.HookTracker`) or simulated (`mp.schedules.ddp`).
        as_: "text" for a terminal, "svg" for a figure.
        rank: draw this rank only.
        seconds: the trace's times are seconds, and are shown in milliseconds; otherwise they have no unit.
        width: columns of a text.

    Example:
        ```python
        trace = mp.simulate(mp.schedules.ddp(layers=8, buckets=4, ranks=2), mp.Costs(seconds_per_byte=1))
        print(mp.draw_overlap(trace))
        ```
    """
    if as_ not in get_args(Format):
        raise UsageError(f"as_={as_!r}: this drawing is one of {', '.join(get_args(Format))}")
    if as_ == "text":
        return plain(overlap_lines(trace, rank=rank, seconds=seconds, width=width))
    from microparallel.drawing.overlap_svg import overlap_figure

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
    talking = max(length(times) for times in trace.communicating)
    hidden = f"communication {time_text(talking, seconds=seconds)}, {show_percent(trace.hidden_share)} of it hidden"
    return [title, f"step {time_text(trace.makespan, seconds=seconds)}", hidden]


def time_text(time: float, *, seconds: bool) -> str:
    """A length of time as a reader wants it."""
    return show_seconds(time) if seconds else short(time)


def _computed(events: list[Event]) -> list[Computed]:
    """The forward as a whole, for it is the backward that the buckets leave from."""
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
    """Whether every gradient travels by itself: then it is the gradient that has a number, not a bucket or a layer."""
    return all(stop == start + 1 for start, stop in goal.buckets)


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
        *flow(_legend(trace), "   ", width),
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


def _legend(trace: Trace) -> list[Line]:
    goal = trace.followed.goal
    singly = isinstance(goal, TrainingStep) and _one_by_one(goal)
    what = "0 (layer, or weight)" if singly else "layer 0"
    return [
        [Segment("│B0 ", BACKWARD), Segment(f" backward of {what}")],
        [Segment("• its gradient is ready")],
        [Segment("─ full: waits its turn, or other ranks")],
        [Segment("█", HIDDEN), Segment(" all-reduce behind computation")],
        [Segment("░", EXPOSED), Segment(" all-reduce with nothing to hide behind")],
    ]
