"""A collective as text: a table of who sends what to whom in each hop, and what everybody holds after it.

```
        │ hop 1         │ hop 2         │
rank 0  │ >C0@1 <+C1@1  │ >C1@1 <C0@1   │
rank 1  │ >C1@0 <+C0@0  │ >C0@0 <C1@0   │

what each rank then holds, slice by slice: whose contributions are in it
        │ rank 0  │ rank 1  │
start   │ 0· 0·   │ ·1 ·1   │
hop 1   │ 0· 01   │ 01 ·1   │
hop 2   │ 01 01   │ 01 01   │
```
"""

from __future__ import annotations

from collections.abc import Callable

from microparallel.drawing.heading import key_to, per_rank, title_of
from microparallel.drawing.hops import Held, Symbol, Walkthrough, complete
from microparallel.drawing.kinds import kind_of
from microparallel.drawing.lines import WIDEST, Line, Segment, clipped, flow, prose, width_of
from microparallel.program import Op, Part, Recv
from microparallel.text import count

_DONE = "bold green"
Row = tuple[str, list[Line]]  # its name, and its cells
Write = Callable[[Symbol, int], str]


def hop_table(walkthrough: Walkthrough, width: int | None) -> list[Line]:
    """Draw a collective hop by hop; tables that are too wide go on below."""
    program, hops = walkthrough.program, walkthrough.hops
    sent = f"messages sent {per_rank(program.messages_sent())}"
    head = f"{title_of(program)} · {count(len(hops), 'hop')} · {sent}"
    lines = prose(head, width, style="bold", between=" · ")
    if not hops:
        return lines + prose("nothing happens: no rank sends anything", width, style="dim")
    columns = [f"hop {number}" for number in range(1, len(hops) + 1)]
    ranks = [f"rank {rank}" for rank in range(program.world_size)]
    moves = [(name, [_ops(hop.ops[rank]) for hop in hops]) for rank, name in enumerate(ranks)]
    lines += _table(columns, moves, width or WIDEST)
    lines += flow(_legend(walkthrough), "   ", width)
    return [*lines, [], *_holdings(walkthrough, columns, ranks, width or WIDEST)]


def _ops(ops: list[Op]) -> Line:
    line: Line = []
    for op in ops:
        line += [Segment(" ")] if line else []
        line.append(Segment(str(op), kind_of(op)))
    return line or [Segment("·", style="dim")]


def _table(columns: list[str], rows: list[Row], width: int) -> list[Line]:
    """Columns as wide as their widest cell, in as many bands below each other as it takes."""
    gutter = max(len(name) for name, _ in rows) + 2
    room = width - gutter - 1
    widths = [min(_widest(rows, at, name), room - 3) for at, name in enumerate(columns)]
    lines: list[Line] = []
    for band in _bands(widths, room):
        lines += [[]] if lines else []
        titles = [Segment(f"│ {columns[at]:{widths[at]}} ", style="bold") for at in band]
        lines.append([Segment(" " * gutter), *titles, Segment("│")])
        for name, cells in rows:
            body = [segment for at in band for segment in _padded(cells[at], widths[at])]
            lines.append([Segment(name.ljust(gutter), style="bold"), *body, Segment("│")])
    return lines


def _widest(rows: list[Row], column: int, name: str = "") -> int:
    return max(len(name), *(width_of(cells[column]) for _, cells in rows))


def _bands(widths: list[int], room: int) -> list[list[int]]:
    bands: list[list[int]] = [[]]
    used = 0
    for at, width in enumerate(widths):
        if bands[-1] and used + width + 3 > room:
            bands.append([])
            used = 0
        bands[-1].append(at)
        used += width + 3
    return bands


def _padded(cell: Line, width: int) -> Line:
    cell = clipped(cell, width)
    return [Segment("│ "), *cell, Segment(" " * (width - width_of(cell) + 1))]


def _legend(walkthrough: Walkthrough) -> list[Line]:
    ops = [op for hop in walkthrough.hops for mine in hop.ops for op in mine]
    apart = any(isinstance(op, Recv) and isinstance(op.value, Part) for op in ops)
    meanings = ["C slice", *(["P contribution kept apart"] if apart else []), "@ rank", "· idle"]
    keys = map(key_to, dict.fromkeys(map(kind_of, ops)))
    return [*keys, *([Segment(meaning, style="dim")] for meaning in meanings)]


def _holdings(walkthrough: Walkthrough, columns: list[str], ranks: list[str], width: int) -> list[Line]:
    """What each rank holds: whose contributions, if there is room, or how many."""
    moments = [("start", walkthrough.start), *zip(columns, (hop.held for hop in walkthrough.hops), strict=True)]
    forms: list[tuple[Write, str, int]] = [(_names, "whose", 2), (_counts, "how many", 4)]
    for write, meaning, most_bands in forms:
        one = len(write({}, walkthrough.program.world_size))
        if (one + 1) * walkthrough.goal.slices + 11 > width:
            continue  # before the table is made: with p² slices it is large
        rows = [(name, [_held(held, walkthrough, write) for held in each]) for name, each in moments]
        table = _table(ranks, rows, width)
        whole = all(_widest(rows, rank) + 12 <= width for rank in range(len(ranks)))
        if whole and len(table) <= most_bands * (len(rows) + 2):
            heading = f"what each rank then holds, slice by slice: {meaning} contributions are in it"
            return [*prose(heading, width, style="dim"), *table]
    return prose("what each rank holds takes more room: a greater width shows it, as does HTML", width, style="dim")


def _held(held: Held, walkthrough: Walkthrough, write: Write) -> Line:
    line: Line = []
    ranks = walkthrough.program.world_size
    for index, symbol in enumerate(held.slices):
        done = complete(walkthrough.goal, ranks, index, symbol)
        line += [Segment(" ")] if line else []
        line.append(Segment(write(symbol, ranks), style=_DONE if done else ""))
    parts = "".join(f" P{rank}" for rank in sorted(held.parts))
    return [*line, Segment(parts, style="dim")] if parts else line


def _names(symbol: Symbol, ranks: int) -> str:
    """A place for each rank: `0·2` is what ranks 0 and 2 had; a `!` stands for what was added more than once."""
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    places = []
    for rank in range(ranks):
        times = symbol.get(rank, 0)
        places.append("·" if times == 0 else digits[rank % len(digits)] if times == 1 else "!")
    return "".join(places)


def _counts(symbol: Symbol, ranks: int) -> str:
    return f"{sum(symbol.values()):>{len(str(ranks))}}"
