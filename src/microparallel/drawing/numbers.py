"""Numbers as a reader wants them: short, and at round distances on an axis."""

from __future__ import annotations

import math

_UNITS = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def short(number: float) -> str:
    """A number in about four digits: 33, 0.25, 27.31."""
    rounded = round(number)
    if math.isclose(number, rounded, rel_tol=1e-9, abs_tol=1e-12):
        return str(rounded)
    return f"{number:.0f}" if abs(number) >= 1000 else f"{number:.4g}"


def count(number: int, noun: str, plural: str = "s") -> str:
    """A number of things: `2 ranks`."""
    return f"{number} {noun}{plural if number != 1 else ''}"


def percent(fraction: float) -> str:
    """A share with one digit after the point."""
    return f"{100 * fraction:.1f} %"


def seconds(time: float) -> str:
    """A time in the unit that suits it: `12.3 ms`."""
    unit, scale = next(((unit, scale) for unit, scale in _UNITS if time * scale >= 1), _UNITS[-1])
    return f"{short(float(f'{time * scale:.3g}'))} {unit}"


def round_step(smallest: float) -> float:
    """The first of …, 0.1, 0.2, 0.5, 1, 2, 5, 10, … that is no smaller."""
    power: float = 10.0 ** math.floor(math.log10(smallest))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= smallest * (1 - 1e-9))


def unit_of(length: float) -> tuple[float, str]:
    """The unit an axis of this length is counted in, and how to say so: small times are counted in thousandths."""
    exponent = 3 * math.floor(math.log10(length) / 3) if 0 < length < 1 else 0
    return 10.0**exponent, f"×10{str(exponent).translate(_SUPERSCRIPTS)}" if exponent else ""
