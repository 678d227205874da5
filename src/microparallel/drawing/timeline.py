"""The timeline as text: time runs to the right, and every column is the same length of time.

```
rank 0  │F0│F1│·····│B0   │··│B1   │
rank 1  ···│F0│B0   │F1│B1   │·····│
        ├──┼──┼──┼──┼──┼──┼──┼──┼──┤
time    0  1  2  3  4  5  6  7  8  9
```
"""

from __future__ import annotations

import math

from microparallel.drawing.heading import head_of, notes_of
from microparallel.drawing.legend import Entry, legend_text, of_rows
from microparallel.drawing.lines import WIDEST, Line, Segment, prose
from microparallel.drawing.memory import NAME, Strips, peak_table, strip_legend, strip_text
from microparallel.drawing.rows import Cell, Row, Rows
from microparallel.drawing.scale import Scale, choose_scale, round_step, unit_of
from microparallel.text import short


def timeline(rows: Rows, width: int | None, strips: Strips | None = None) -> list[Line]:
    """Draw rows of cells into at most `width` columns; without one, as wide as the labels need.

    With strips, what a rank holds stands below its rows.
    """
    names = _names(rows)
    below_others = len(names[0]) < max(map(len, names))  # `rank 0` has rows with names of their own
    strip_name = f"{' ' * (len(_rank_name(rows, 0)) + 1 if below_others else 2)}{NAME}"
    gutter = max(map(len, names if strips is None else [*names, strip_name])) + 2
    room = (width or WIDEST) - gutter
    scale = choose_scale(rows, room - 1)  # a line ends the rows
    body: list[Line] = []
    for number, (row, name) in enumerate(zip(rows.rows, names, strict=True)):
        body.append(_row(row, name.ljust(gutter), scale, rows))
        if strips is not None and (number + 1 == len(rows.rows) or rows.rows[number + 1].rank != row.rank):
            strip = strip_text(strips, row.rank, scale.column, scale.column(scale.end))
            body.append([Segment(strip_name.ljust(gutter), style="bold"), strip])
    notes = [*notes_of(rows), *_notes_on_scale(rows, scale)]
    return [
        *prose(head_of(rows.trace), width, style="bold", between=" · "),
        *body,
        *_axis(gutter, scale, rows.shortest, room),
        *legend_text([*_legend(rows, scale), *([] if strips is None else [strip_legend(strips)])], width),
        *([] if strips is None else peak_table(strips, width)),
        *(line for note in notes for line in prose(note, width, style="dim")),
    ]


def _names(rows: Rows) -> list[str]:
    """`rank 0` once, then only what else its rows show."""
    names = []
    previous = None
    for row in rows.rows:
        rank = _rank_name(rows, row.rank)
        rank = rank if row.rank != previous else " " * len(rank)
        names.append(f"{rank} {row.name}".rstrip())
        previous = row.rank
    return names


def _rank_name(rows: Rows, rank: int) -> str:
    return f"rank {rank:>{len(str(rows.trace.followed.world_size - 1))}}"


def _row(row: Row, name: str, scale: Scale, rows: Rows) -> Line:
    line = [Segment(name, style="bold")]
    at = 0
    for cell in row.cells:
        start, end = max(at, scale.column(cell.start)), scale.column(cell.end)
        if end > start:
            line += _idle(start - at, after_cell=at > 0)
            line.append(Segment(_cell(cell, end - start, scale), cell.kind, cell.shade))
            at = end
    line += _idle(scale.column(scale.end) - at, after_cell=at > 0)
    return [*line, Segment("…" if scale.end < rows.trace.makespan else "│", style="dim")]


def _idle(width: int, *, after_cell: bool) -> Line:
    if width <= 0:
        return []
    # The line that ends a cell stands in the first column after it.
    return [Segment(("│" if after_cell and width > 1 else "·").ljust(width, "·"), style="dim")]


def _cell(cell: Cell, width: int, scale: Scale) -> str:
    name = cell.short if scale.short_names else cell.full
    if len(name) < width:
        return f"│{name}".ljust(width)
    if len(name) == width:
        return name
    return cell.kind.letter.ljust(width) if len(cell.kind.letter) <= width else cell.kind.letter[:width]


def _axis(gutter: int, scale: Scale, shortest: float, room: int) -> list[Line]:
    """Marks at round times, and their numbers below, as far as there is room; each begins below its mark."""
    columns = scale.column(scale.end)
    if not columns:
        return []
    unit, _ = unit_of(scale.end)
    step = _step(scale, unit, shortest)
    marks, numbers = ["─"] * (columns + 1), [" "] * (columns + 12)
    for time in _marks(scale, step):
        column = scale.column(time)
        marks[column] = "┼"
        number = short(time / unit)
        if column + len(number) <= room:
            numbers[column : column + len(number)] = number
    marks[0], marks[-1] = "├", "┤"
    indent = " " * gutter
    return [[Segment(indent + "".join(marks), style="dim")], [Segment("time".ljust(gutter) + "".join(numbers))]]


def _legend(rows: Rows, scale: Scale) -> list[Entry]:
    entries = [*of_rows(rows), Entry("·", "idle", quiet=True)] if rows.cells else []
    if any(kind.letter.isalpha() for kind in rows.kinds):
        entries.append(Entry("", rows.naming.meaning(short=scale.short_names)))
    _, unit_name = unit_of(scale.end)
    return [*entries, Entry("", f"time {unit_name}")] if unit_name else entries


def _step(scale: Scale, unit: float, shortest: float) -> float:
    """The smallest round distance at which the numbers do not touch; no smaller than a cell."""
    step = round_step(max(1 / scale.columns_per_time, shortest))
    while step * scale.columns_per_time < max(len(short(time / unit)) for time in _marks(scale, step)) + 2:
        step = round_step(step * 1.01)
    return step


def _marks(scale: Scale, step: float) -> list[float]:
    return [index * step for index in range(math.floor(scale.end / step + 1e-9) + 1)]


def _notes_on_scale(rows: Rows, scale: Scale) -> list[str]:
    notes = []
    shown = [cell for cell in rows.cells if cell.start < scale.end]
    widths = [scale.column(cell.end) - scale.column(cell.start) for cell in shown]
    unseen = sum(width == 0 for width in widths)
    names = [cell.short if scale.short_names else cell.full for cell in shown]
    unnamed = sum(0 < width < len(name) for width, name in zip(widths, names, strict=True))
    if scale.short_names and rows.naming.several_stages and rows.naming.several_microbatches:
        notes.append("stages are not named: a greater width shows them, and so does the clock view")
    if scale.end < rows.trace.makespan:
        notes.append(f"cut at time {short(scale.end)} of {short(rows.trace.makespan)}: a greater width shows more")
    if unnamed:
        notes.append(f"{unnamed} cells are too narrow for their name: a greater width shows it")
    if unseen:
        notes.append(f"{unseen} cells are too short to be seen: a greater width shows them")
    return notes
