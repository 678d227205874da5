"""From a trace to rows of cells, which the text, the SVG and the page all draw.

A rank has a row for what it computes. What it sends and receives gets a row below, if it takes time; two, if a rank
ever sends and receives at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from microparallel.drawing.kinds import KINDS, Kind, Naming, kind_of, naming_of
from microparallel.program import Collective, Free, Join, Lane, Op, Program, Send
from microparallel.program.rules import held_activations
from microparallel.trace import Event, Trace


@dataclass(frozen=True, slots=True)
class Cell:
    """One operation in its place: when, of which kind, and what may be written into it."""

    start: float
    end: float
    op: Op
    kind: Kind
    full: str
    short: str
    shade: int
    related: tuple[int, ...]  # the numbers of what it is about
    place: int  # in `trace.events`
    held: int | None  # activations of its rank while it runs; None if it computes nothing of a training step

    @property
    def duration(self) -> float:
        """How long it takes."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Row:
    """What one rank does on one lane: cells in order, which do not overlap."""

    rank: int
    name: str
    cells: list[Cell]


@dataclass(frozen=True, slots=True)
class Rows:
    """Everything a timeline shows, and what it cannot show."""

    trace: Trace
    naming: Naming
    rows: list[Row]
    instant: list[Event]  # took no time, so there is nothing to draw
    missing: list[tuple[int, Op]]  # operations of the program that never happened

    @property
    def cells(self) -> list[Cell]:
        """All cells, row by row."""
        return [cell for row in self.rows for cell in row.cells]

    @property
    def kinds(self) -> list[Kind]:
        """The kinds that are drawn, always in the same order."""
        drawn = {cell.kind for cell in self.cells}
        return [kind for kind in KINDS if kind in drawn]

    @property
    def shortest(self) -> float:
        """How long the shortest cell takes."""
        return min((cell.duration for cell in self.cells), default=0)


def from_zero(trace: Trace) -> Trace:
    """The same trace with its first event at 0: the clock of a real run begins anywhere."""
    begin = min((event.start for event in trace.events), default=0)
    if not begin:
        return trace
    return replace(trace, events=[event.moved(-begin) for event in trace.events])


def rows_of(trace: Trace) -> Rows:
    """Sort the events of a trace (which begins at 0) into rows."""
    naming = naming_of(trace.followed)
    ranks: list[list[Cell]] = [[] for _ in trace.followed.ranks]
    held = _held(trace)
    for place, event in enumerate(trace.events):
        if event.duration > 0:
            ranks[event.rank].append(_cell(place, event, naming, held.get(id(event))))
    lanes = [_lanes(cells, trace) for cells in ranks]
    together = all(_apart(sends + receives) for _, sends, receives in lanes)
    communicates = any(sends or receives for _, sends, receives in lanes)
    rows: list[Row] = []
    for rank, (computing, sends, receives) in enumerate(lanes):
        if computing or not isinstance(trace.followed.goal, Collective):
            rows += _stack(rank, "", computing)
        if together:
            rows += _stack(rank, "comm", sends + receives) if communicates else []
        else:
            rows += [*_stack(rank, "send", sends), *_stack(rank, "recv", receives)]
    rows = rows or [Row(rank, "", []) for rank in range(trace.followed.world_size)]
    instant = [event for event in trace.events if event.duration <= 0]
    return Rows(trace, naming, rows, instant, _missing(trace.followed, trace.events))


def _held(trace: Trace) -> dict[int, int]:
    """For each computing event (by its id), how many activations its rank holds while it runs."""
    if isinstance(trace.followed.goal, Collective):
        return {}
    counted = (
        zip(events, held_activations(event.operation for event in events), strict=True) for events in trace.compute
    )
    return {id(event): held for pairs in counted for event, held in pairs}


def _cell(place: int, event: Event, naming: Naming, held: int | None) -> Cell:
    op = event.operation
    full, short = naming.forms(op)
    return Cell(
        event.start,
        event.end,
        op,
        kind_of(op),
        full,
        short,
        naming.shade(event.rank, op),
        naming.related(op),
        place,
        held,
    )


def _lanes(cells: list[Cell], trace: Trace) -> tuple[list[Cell], list[Cell], list[Cell]]:
    """What a rank computes, what it sends, and the rest of its communication."""
    computing = [cell for cell in cells if trace.events[cell.place].lane is Lane.COMPUTE]
    communicating = [cell for cell in cells if trace.events[cell.place].lane is not Lane.COMPUTE]
    sends = [cell for cell in communicating if isinstance(cell.op, Send)]
    return computing, sends, [cell for cell in communicating if not isinstance(cell.op, Send)]


def _apart(cells: Iterable[Cell]) -> bool:
    ordered = sorted(cells, key=lambda cell: (cell.start, cell.end))
    return all(first.end <= second.start for first, second in pairwise(ordered))


def _stack(rank: int, name: str, cells: list[Cell]) -> list[Row]:
    """Put cells into one row; those that overlap (in a trace of a real run, say) go into rows below."""
    rows = [Row(rank, name, [])]
    for cell in sorted(cells, key=lambda cell: (cell.start, cell.end)):
        free = next((row for row in rows if not row.cells or row.cells[-1].end <= cell.start), None)
        if free is None:
            free = Row(rank, name, [])
            rows.append(free)
        free.cells.append(cell)
    return rows


def _missing(program: Program, events: list[Event]) -> list[tuple[int, Op]]:
    left: dict[tuple[int, Op], int] = {}
    for event in events:
        key = event.rank, event.operation
        left[key] = left.get(key, 0) + 1
    missing: list[tuple[int, Op]] = []
    for rank, ops in enumerate(program.ranks):
        for op in ops:
            if isinstance(op, Free | Join):
                continue
            left[rank, op] = left.get((rank, op), 0) - 1
            if left[rank, op] < 0:
                missing.append((rank, op))
    return missing
