"""Sizes as people write them: `4KB`, `64 KiB`, `1.5MB`, `100`."""

from __future__ import annotations

import re

from microparallel.errors import UsageError

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}{end}": 1000**power for power, letter in enumerate("kmg", 1) for end in ("", "b")}
_UNITS |= {f"{letter}i{end}": 1024**power for power, letter in enumerate("kmg", 1) for end in ("", "b")}


def parse_sizes(text: str, flag: str) -> tuple[int, ...]:
    """Read sizes in bytes, separated by commas: a KB is 1000 bytes and a KiB 1024."""
    return tuple(dict.fromkeys(_parse_size(part.strip(), f"{flag} {text}") for part in text.split(",")))


def _parse_size(text: str, place: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.lower())
    if found is None or found[2] not in _UNITS:
        raise UsageError(f"{place}: {text!r} is no size; write sizes like 4KB,1MiB,100MB (bytes, KB, MB, GB, KiB, …)")
    size = float(found[1]) * _UNITS[found[2]]
    if size < 1 or size != int(size):
        raise UsageError(f"{place}: {text!r} is no whole number of bytes, at least 1; try 4KB")
    return int(size)
