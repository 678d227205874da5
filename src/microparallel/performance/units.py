"""Numbers with the unit that suits them. 1 KB is 1000 bytes, as 1 GB/s is 1,000,000,000 bytes a second."""

from __future__ import annotations

_SIZES = ((10**9, "GB"), (10**6, "MB"), (10**3, "KB"))
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def show_size(size: float) -> str:
    """A number of bytes: `256 KB`."""
    for factor, unit in _SIZES:
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size:.0f} B"


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit that suits a time, with its length in seconds."""
    return next(((length, unit) for length, unit in _TIMES if seconds >= 0.9995 * length), _TIMES[-1])


def show_number(number: float) -> str:
    """Three digits, or all that stand before the point: `0.123`, `12.3`, `1234`."""
    return f"{number:.0f}" if number >= 99.95 else f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"


def show_seconds(seconds: float) -> str:
    """A time: `12.3 ms`."""
    length, unit = time_unit(seconds)
    return f"{show_number(seconds / length)} {unit}"
