"""Numbers on an axis: at round distances, in a unit that suits its length."""

from __future__ import annotations

import math

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def round_step(smallest: float) -> float:
    """The first of …, 0.1, 0.2, 0.5, 1, 2, 5, 10, … that is no smaller."""
    power: float = 10.0 ** math.floor(math.log10(smallest))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= smallest * (1 - 1e-9))


def unit_of(length: float) -> tuple[float, str]:
    """The unit an axis of this length is counted in, and how to say so: small times are counted in thousandths."""
    exponent = 3 * math.floor(math.log10(length) / 3) if 0 < length < 1 else 0
    return 10.0**exponent, f"×10{str(exponent).translate(_SUPERSCRIPTS)}" if exponent else ""
