"""Counts, sizes, times and names as a sentence has them: the one way in which the project writes each of them.

Neither torch nor numpy is needed here, and nothing of the project but its errors. A KB is 1000 bytes, as 1 GB/s is
1,000,000,000 bytes a second.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from microparallel.errors import UsageError

_SIZES = ((10**9, "GB"), (10**6, "MB"), (10**3, "KB"))
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_AGES = ((2 * 86400, 86400, "days"), (2 * 3600, 3600, "h"), (120, 60, "min"))  # from how many seconds on, in which unit

# What people write behind a number of bytes.
_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}{end}": 1000**power for power, letter in enumerate("kmg", 1) for end in ("", "b")}
_UNITS |= {f"{letter}i{end}": 1024**power for power, letter in enumerate("kmg", 1) for end in ("", "b")}


# ── numbers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def count(number: int, noun: str, ending: str = "s") -> str:
    """A number of things: `2 ranks`, `1 rank`, `0 ranks`."""
    return f"{number} {noun}{ending if number != 1 else ''}"


def short(number: float, digits: int = 4) -> str:
    """A number without a unit in about so many digits: `33`, `0.25`, `27.31`, `1000000`."""
    rounded = round(number)
    if math.isclose(number, rounded, rel_tol=1e-9, abs_tol=1e-12):
        return str(rounded)
    return f"{number:.0f}" if abs(number) >= 10 ** (digits - 1) else f"{number:.{digits}g}"


def show_number(number: float) -> str:
    """A measured number in three digits, or all that stand before the point: `0.12`, `1.20`, `12.3`, `1234`."""
    return f"{number:.0f}" if number >= 99.95 else f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"


def show_percent(fraction: float) -> str:
    """A share with one digit after the point: `12.5 %`."""
    return f"{100 * fraction:.1f} %"


# ── times ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def show_seconds(time: float) -> str:
    """A measured time in the unit that suits it, to three digits: `45.0 µs`, `12.3 ms`, `1.50 s`; nothing is `0 s`."""
    length, unit = time_unit(time)
    return f"{show_number(time / length)} {unit}" if time else "0 s"


def show_age(time: float) -> str:
    """How long ago something was, or for how long it has lasted: `0.4 s`, `12 s`, `3 min`, `5 h`, `12 days`."""
    for least, length, unit in _AGES:
        if time >= least:
            return f"{time / length:.0f} {unit}"
    return f"{max(0.0, time):.1f} s" if time < 9.95 else f"{time:.0f} s"


def time_unit(time: float) -> tuple[float, str]:
    """The unit that suits a time, with its length in seconds: for a row or a table of times in one unit."""
    return next(((length, unit) for length, unit in _TIMES if time >= 0.9995 * length), _TIMES[-1])


# ── sizes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def show_size(number: float) -> str:
    """A number of bytes: `256 KB`, `1.5 MB`."""
    for factor, unit in _SIZES:
        if number >= factor:
            return f"{number / factor:.4g} {unit}"
    return f"{number:.0f} B"


def parse_sizes(text: str, flag: str) -> tuple[int, ...]:
    """Read sizes with commas between them, as people write them: `4KB`, `64 KiB`, `1.5MB`, `100`.

    A KB is 1000 bytes and a KiB 1024. The error names the flag.
    """
    return tuple(dict.fromkeys(_parse_size(part.strip(), f"{flag} {text}") for part in text.split(",")))


def _parse_size(text: str, place: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.lower())
    if found is None or found[2] not in _UNITS:
        raise UsageError(f"{place}: {text!r} is no size; write sizes like 4KB,1MiB,100MB (bytes, KB, MB, GB, KiB, …)")
    number = float(found[1]) * _UNITS[found[2]]
    if number < 1 or number != int(number):
        raise UsageError(f"{place}: {text!r} is no whole number of bytes, at least 1; try 4KB")
    return int(number)


# ── names ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def show_ranks(ranks: Iterable[int]) -> str:
    """Ranks by number: `rank 2`, `ranks 0, 1`."""
    listed = list(ranks)
    return f"{'rank' if len(listed) == 1 else 'ranks'} {', '.join(map(str, listed))}"


def show_some(names: Sequence[str], most: int = 3) -> str:
    """The first few of many names: `a, b, c and 4 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def show_ranges(ranks: Iterable[int]) -> str:
    """Many ranks in short, in their order: `0-3,7`."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def parse_ranges(text: str) -> tuple[int, ...]:
    """The ranks that `show_ranges` has written; of a text that was cut (`0-3,7…`), those before the cut."""
    ranks: list[int] = []
    for part in text.partition("…")[0].split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            ranks += range(int(first), int(last if last.isdigit() else first) + 1)
    return tuple(ranks)


def one_of(names: Iterable[str]) -> str:
    """Names to choose from: `adam, adamw or sgd`."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice that a user who wrote `name` probably meant: spelled nearly so, or with the name as a part."""
    known = list(choices)
    near = difflib.get_close_matches(name, known, n=1)
    if not near and len(name) >= 3:
        near = [one for one in known if name in one]
    return near[0] if near else None


def did_you_mean(name: str, choices: Iterable[str], otherwise: str | None = None) -> str:
    """What to do about a name that is none of the choices: `did you mean 'ring'?`.

    Args:
        name: what was written.
        choices: what there is.
        otherwise: what to say when none of them is near; by default, all of them are listed.
    """
    known = list(choices)
    near = nearest(name, known)
    if near is not None:
        return f"did you mean {near!r}?"
    return f"choose one of {', '.join(known)}" if otherwise is None else otherwise


def without_nan(value: Any) -> Any:
    """Put null where a number is not finite, since JSON has no word for it."""
    if isinstance(value, dict):
        return {key: without_nan(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
