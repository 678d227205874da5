"""The time axis: round numbers in a unit that suits its length, and how many columns of a text a unit of time gets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from microparallel.drawing.rows import Cell, Rows
from microparallel.program import Lane

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def round_step(smallest: float) -> float:
    """The first of …, 0.1, 0.2, 0.5, 1, 2, 5, 10, … that is no smaller."""
    power: float = 10.0 ** math.floor(math.log10(smallest))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= smallest * (1 - 1e-9))


def unit_of(length: float) -> tuple[float, str]:
    """The unit an axis of this length is counted in, and how to say so: small times are counted in thousandths."""
    exponent = 3 * math.floor(math.log10(length) / 3) if 0 < length < 1 else 0
    return 10.0**exponent, f"×10{str(exponent).translate(_SUPERSCRIPTS)}" if exponent else ""


# ── columns: as many as the labels need, never more for one cell than for another ───────────────────────────────────


@dataclass(frozen=True, slots=True)
class Scale:
    """From time to columns. `end` is the time at which a drawing that would be too wide is cut."""

    columns_per_time: float
    short_names: bool
    end: float

    def column(self, time: float) -> int:
        """The column in which a time falls, to the nearest."""
        return math.floor(min(time, self.end) * self.columns_per_time + 0.5)


def choose_scale(rows: Rows, columns: int) -> Scale:
    """The first of these that fits into the columns there are.

    1. Every cell shows its full name; with a line between cells, then without; then only computations do.
    2. The same with short names.
    3. Names are left out where they do not fit, but every cell of note has a column.
    4. Most cells have a column, and the rest is told below.
    5. Every cell of note has a column, and the drawing is cut.
    """
    makespan = rows.trace.makespan
    cells = deciding(rows)
    if not cells:
        return Scale(1, short_names=False, end=makespan)
    for short_names in (False, True):
        for named in (rows.cells, cells):
            for columns_per_time in _with_names(named, short_names, columns / makespan):
                if columns_per_time * makespan <= columns:
                    return Scale(columns_per_time, short_names, makespan)
    shortest = _shortest_of_note(cells)
    if shortest * columns >= makespan:
        return Scale(math.floor(shortest * columns / makespan) / shortest, True, makespan)
    if median(cell.duration for cell in cells) * columns >= makespan:
        return Scale(columns / makespan, True, makespan)
    return Scale(1 / shortest, True, columns * shortest)


def _shortest_of_note(cells: list[Cell]) -> float:
    """The shortest cell that counts: in a real run some take next to no time, and must not stretch all the others."""
    durations = [cell.duration for cell in cells]
    least = median(durations) / 8
    return min(duration for duration in durations if duration >= least)


def deciding(rows: Rows) -> list[Cell]:
    """Computation decides on the scale where there is any: messages are often far shorter."""
    cells = rows.cells
    return [cell for cell in cells if rows.trace.events[cell.place].lane is Lane.COMPUTE] or cells


def _with_names(cells: list[Cell], short_names: bool, most: float) -> Iterator[float]:
    """The scales at which all of these cells show their names, with a line before each and without."""
    names = [(len(cell.short if short_names else cell.full), cell.duration) for cell in cells]
    for line in (1, 0):
        yield _even(max((length + line) / duration for length, duration in names), cells, most)


def _even(needed: float, cells: list[Cell], most: float) -> float:
    """The next scale at which all cells begin at whole columns, if there is one near; else at which the shortest do."""
    shortest = min(cell.duration for cell in cells)
    times = {time for cell in cells for time in (cell.start, cell.end)}
    least = math.ceil(needed * shortest - 1e-9)
    for count in range(least, 2 * least + 1):
        scale = count / shortest
        if scale <= most and all(abs(time * scale - round(time * scale)) < 1e-6 for time in times):
            return scale
    return least / shortest
