"""Where everything of a timeline stands in a figure, in pixels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

from microparallel.drawing.numbers import round_step, unit_of
from microparallel.drawing.rows import Cell, Row, Rows
from microparallel.drawing.scale import deciding
from microparallel.program import Collective

CHARACTER, MARGIN = 6.7, 12.0
_PADDING, _ROW, _THIN_ROW, _GAP = 7.0, 26.0, 18.0, 3.0
_BETWEEN_RANKS, _ROOM_FOR_ARROWS = 8.0, 30.0
_LEAST_BETWEEN_MARKS, _NARROWEST_AXIS = 44.0, 240.0


@dataclass(frozen=True, slots=True)
class Place:
    """A row and where it stands."""

    row: Row
    top: float
    height: float

    @property
    def middle(self) -> float:
        """Where its cells are written."""
        return self.top + self.height / 2


@dataclass(frozen=True, slots=True)
class Layout:
    """Places for rows and times: time 0 is at `left`, the last row ends at `bottom`."""

    places: list[Place]
    left: float
    bottom: float
    pixels_per_time: float
    makespan: float
    shortest: float
    short_names: bool

    def x(self, time: float) -> float:
        """Where a time is."""
        return self.left + time * self.pixels_per_time

    @property
    def right(self) -> float:
        """Where the time axis ends."""
        return self.x(self.makespan)

    def name_in(self, cell: Cell, room: float) -> str:
        """As much of a cell's name as fits."""
        names = (cell.short, cell.kind.letter) if self.short_names else (cell.full, cell.short, cell.kind.letter)
        return next((name for name in names if len(name) * CHARACTER <= room), "")

    def marks(self) -> tuple[list[float], float, str]:
        """Round times for the axis, the unit they are counted in, and its name."""
        if not self.makespan:
            return [0], 1, ""
        step = round_step(max(_LEAST_BETWEEN_MARKS / self.pixels_per_time, self.shortest))
        unit, name = unit_of(self.makespan)
        return [index * step for index in range(int(self.makespan / step + 1e-9) + 1)], unit, name


def lay_out(rows: Rows, *, left: float, top: float, widest: float) -> Layout:
    """Give every row its place; time gets as many pixels as the cells' names need, up to a width."""
    talking = isinstance(rows.trace.followed.goal, Collective)
    places: list[Place] = []
    at = top
    for _, mine in groupby(rows.rows, key=lambda row: row.rank):
        if talking:  # what a rank sends and receives stands in one row, with room for arrows below it
            places += [Place(row, at, _ROW) for row in mine]
            at += _ROW + _GAP + _ROOM_FOR_ARROWS
        else:
            for row in mine:
                places.append(Place(row, at, _THIN_ROW if row.name else _ROW))
                at += places[-1].height + _GAP
            at += _BETWEEN_RANKS
    at -= _ROOM_FOR_ARROWS if talking else _BETWEEN_RANKS
    pixels, short_names = _pixels_per_time(rows, widest - left, talking=talking)
    return Layout(places, left, at, pixels, rows.trace.makespan, rows.shortest, short_names)


def _pixels_per_time(rows: Rows, room: float, *, talking: bool) -> tuple[float, bool]:
    makespan = rows.trace.makespan
    if not makespan:
        return 0, False
    most = room / makespan
    for short_names, needed in _needed(deciding(rows), talking):
        if needed <= most:
            return max(needed, min(most, _NARROWEST_AXIS / makespan)), short_names
    return most, True


def _needed(cells: list[Cell], talking: bool) -> Iterator[tuple[bool, float]]:
    """The pixels a unit of time needs if all names are full, and if all are short."""
    names: tuple[tuple[bool, Callable[[Cell], str]], ...] = (
        (False, lambda cell: cell.full),
        (True, lambda cell: cell.short),
    )
    for short_names, name in names[talking:]:  # arrows say who sends to whom, so short names are enough
        # A send and a receive share a row, and the arrows pass between their names.
        widths = [(len(name(cell)) * CHARACTER + _PADDING) * (3.3 if talking else 1) / cell.duration for cell in cells]
        yield short_names, max(widths, default=0)
