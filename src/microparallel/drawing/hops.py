"""A collective hop by hop: who sends what to whom in each hop, and what every rank holds after it.

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

A hop is a tick of a clock by which every message takes one tick, and everything else no time. So hops are a property of
the program, whatever its messages cost on some machine. What a rank holds is found by walking the program on symbols.
Nothing is judged here (that is `mp.verify`): a wrong program can be drawn too, and then shows what went wrong.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from microparallel.drawing.heading import per_rank, title_of
from microparallel.drawing.kinds import kind_of
from microparallel.drawing.legend import Entry, legend_text, of_kind
from microparallel.drawing.lines import WIDEST, Line, Segment, clipped, prose, width_of
from microparallel.errors import ProgramError, UsageError
from microparallel.program import Add, Collective, Op, Part, Program, Recv, Send, Slices, Walk, symbols
from microparallel.program.rules import written
from microparallel.simulator import Costs, simulate
from microparallel.text import count
from microparallel.trace import Trace

Contributions = Mapping[int, int]  # contributing rank → how many times; never changed once made


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds at one moment: its tensor, slice by slice, and whose whole contributions it keeps apart."""

    slices: tuple[Contributions, ...]
    parts: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message of a hop: its two ranks, and the operation of each."""

    sender: int
    receiver: int
    send: Send
    receive: Recv


@dataclass(frozen=True, slots=True)
class Hop:
    """What happens in one tick: each rank's operations, the messages, and what each rank holds when it has passed."""

    ops: list[list[Op]]
    messages: list[Transfer]
    held: list[Held]


@dataclass(frozen=True, slots=True)
class Walkthrough:
    """A collective from beginning to end."""

    program: Program
    goal: Collective
    start: list[Held]
    hops: list[Hop]


def hops_of(program: Program) -> Walkthrough:
    """Walk through a collective, one hop after another."""
    goal = program.goal
    if not isinstance(goal, Collective):
        raise UsageError(f"{program.name} ({goal}) has no hops; try the timeline or the clock view")
    trace = simulate(program, Costs(latency=1))
    ticks = _ticks(trace)
    ops: list[list[list[Op]]] = [[[] for _ in program.ranks] for _ in range(round(trace.makespan))]
    held: list[list[Held]] = [[] for _ in range(len(ops) + 1)]
    for rank, states in enumerate(held_after_each(program, goal)):
        after = {0: states[0]}
        for op, state, tick in zip(program.ranks[rank], states[1:], ticks[rank], strict=False):
            if tick is not None:
                ops[tick][rank].append(op)
                after[tick + 1] = state if not isinstance(op, Send) else after.get(tick + 1, state)
        for tick, at in enumerate(held):
            at.append(after[tick] if tick in after else held[tick - 1][rank])
    hops = [Hop(here, _transfers(here), then) for here, then in zip(ops, held[1:], strict=True)]
    return Walkthrough(program, goal, held[0], hops)


def _ticks(trace: Trace) -> list[list[int | None]]:
    """For each operation of each rank: the tick in which it happens; None if it never does."""
    begun: dict[tuple[int, Op], deque[int]] = defaultdict(deque)  # of a rank's equal operations, in their order
    for event in sorted(trace.events, key=lambda event: event.start):
        begun[event.rank, event.operation].append(round(event.start))
    last = max(0, round(trace.makespan) - 1)
    ticks: list[list[int | None]] = []
    for rank, ops in enumerate(trace.followed.ranks):
        mine: list[int | None] = []
        at = 0
        for op in ops:
            if isinstance(op, Send | Recv):
                tick = begun[rank, op].popleft() if begun[rank, op] else None
                at = tick if isinstance(op, Recv) and tick is not None else at
                mine.append(tick)
            else:
                mine.append(min(at, last) if trace.makespan else None)  # it belongs to the message it follows
        ticks.append(mine)
    return ticks


def _transfers(ops: list[list[Op]]) -> list[Transfer]:
    """Within a hop a rank receives from another at most once, so sends and receives find each other by rank."""
    receives = {(op.source, rank): op for rank, mine in enumerate(ops) for op in mine if isinstance(op, Recv)}
    return [
        Transfer(rank, op.to, op, receives[rank, op.to])
        for rank, mine in enumerate(ops)
        for op in mine
        if isinstance(op, Send) and (rank, op.to) in receives
    ]


# ── what each rank holds ──────────────────────────────────────────────────────────────────────────────────────────────


def complete(goal: Collective, ranks: int, index: int, symbol: Contributions) -> bool:
    """Whether a slice holds what the goal promises, on whichever rank it is."""
    return symbol == _whose(symbols.whole(goal, ranks, index))


def held_after_each(program: Program, goal: Collective) -> list[list[Held]]:
    """For each rank: what it holds at first, and after each of its operations."""
    contents = [symbols.Contents(goal, rank) for rank in range(program.world_size)]
    states = [[Held(tuple(map(_whose, mine.slices)))] for mine in contents]
    for cursor in Walk(program):
        op, mine, held = cursor.op, contents[cursor.rank], states[cursor.rank][-1]
        _require_slices(cursor.rank, op, goal)
        with contextlib.suppress(ProgramError):  # it reads what is not there: then nothing is written either
            mine.do(op, cursor.message)
        if isinstance(op, Recv | Add):
            held = _written(held, op, mine)
        states[cursor.rank].append(held)
    return states


def _written(held: Held, op: Recv | Add, contents: symbols.Contents) -> Held:
    """What a rank holds once an operation has written its value; its other slices and parts stay the same."""
    value = written(op)
    if isinstance(value, Slices):
        new = map(_whose, contents.slices[value.start : value.stop])
        return replace(held, slices=(*held.slices[: value.start], *new, *held.slices[value.stop :]))
    return replace(held, parts=held.parts | {value.rank}) if isinstance(value, Part) else held


def _whose(symbol: symbols.Symbol) -> Contributions:
    counts: Counter[int] = Counter()
    for (rank, _), times in symbol.items():
        counts[rank] += times
    return dict(sorted(counts.items()))


def _require_slices(rank: int, op: Op, goal: Collective) -> None:
    for value in (getattr(op, "value", None), getattr(op, "into", None)):
        if isinstance(value, Slices) and value.stop > goal.slices:
            raise ProgramError(f"rank {rank} does {op}, and the tensor has {goal.slices} slices")


# ── as text ───────────────────────────────────────────────────────────────────────────────────────────────────────────

_DONE = "bold green"
Row = tuple[str, list[Line]]  # its name, and its cells
Write = Callable[[Contributions, int], str]


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
    lines += legend_text(_legend(walkthrough), width)
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


def _legend(walkthrough: Walkthrough) -> list[Entry]:
    ops = [op for hop in walkthrough.hops for mine in hop.ops for op in mine]
    apart = any(isinstance(op, Recv) and isinstance(op.value, Part) for op in ops)
    signs = {"C": "slice", **({"P": "contribution kept apart"} if apart else {}), "@": "rank", "·": "idle"}
    kinds = dict.fromkeys(map(kind_of, ops))
    return [*map(of_kind, kinds), *(Entry(sign, words, quiet=True) for sign, words in signs.items())]


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


def _names(symbol: Contributions, ranks: int) -> str:
    """A place for each rank: `0·2` is what ranks 0 and 2 had; a `!` stands for what was added more than once."""
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    places = []
    for rank in range(ranks):
        times = symbol.get(rank, 0)
        places.append("·" if times == 0 else digits[rank % len(digits)] if times == 1 else "!")
    return "".join(places)


def _counts(symbol: Contributions, ranks: int) -> str:
    return f"{sum(symbol.values()):>{len(str(ranks))}}"
