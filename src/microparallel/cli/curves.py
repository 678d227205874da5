"""Draw curves in the terminal, one mark for each.

2.38 ┤◆
│ ×▲                   ● every step   ▲ accumulation   × averaging   ◆ several
│  ●  ▲
│   ×● ×●  ▲
0.29 ┤          ●●
└──────────────
0         7680
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_MARKS, _SEVERAL = "●▲×", "◆"
_WIDTH, _HEIGHT = 60, 12


def draw_curves(curves: dict[str, Sequence[float]], x: Sequence[float], x_title: str) -> str:
    """Up to three curves over common points; what is not a finite number is left out."""
    finite = [value for values in curves.values() for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    cells: dict[tuple[int, int], str] = {}
    for mark, values in zip(_MARKS, curves.values(), strict=False):
        for place, value in zip(x, values, strict=True):
            if math.isfinite(value):
                cell = _position(high - value, high - low, _HEIGHT), _position(place - x[0], x[-1] - x[0], _WIDTH)
                cells[cell] = mark if cells.get(cell, mark) == mark else _SEVERAL
    lines = ["".join(cells.get((row, column), " ") for column in range(_WIDTH)) for row in range(_HEIGHT)]
    labels = {0: f"{high:.3g}", _HEIGHT - 1: f"{low:.3g}"}
    margin = max(map(len, labels.values()))
    drawn = [f"{labels.get(row, ''):>{margin}} {'┤' if row in labels else '│'}{line}" for row, line in enumerate(lines)]
    ends = f"{x[0]:g}".ljust(_WIDTH - len(last := f"{x[-1]:g}")) + last
    legend = "   ".join(f"{mark} {name}" for mark, name in zip(_MARKS, curves, strict=False))
    frame = [f"{'':{margin}} └{'─' * _WIDTH}", f"{'':{margin}}  {ends}  {x_title}"]
    return "\n".join(line.rstrip() for line in [*drawn, *frame, f"{'':{margin}}  {legend}   {_SEVERAL} several"])


def _position(distance: float, length: float, cells: int) -> int:
    return round(distance / length * (cells - 1)) if length else 0
