"""What it costs to send a message from one rank to another; and slow ranks and links, as people write them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from microparallel.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Link:
    """A one-way connection: every message takes `latency` seconds, and `seconds_per_byte` for each byte.

    What is None is as on all other connections.
    """

    latency: float | None = None
    seconds_per_byte: float | None = None

    def or_else(self, other: Link) -> Link:
        """The same link, with what it does not say taken from another."""
        latency = other.latency if self.latency is None else self.latency
        return Link(latency, other.seconds_per_byte if self.seconds_per_byte is None else self.seconds_per_byte)

    def seconds(self, size: float) -> float:
        """How long a message of this many bytes is under way."""
        return (self.latency or 0) + size * (self.seconds_per_byte or 0)


# ── --slow-rank 2=3x and --slow-link 0-1=5ms,100Mbit ────────────────────────────────────────────────────────────────


_NUMBER = r"\d+(?:\.\d+)?"
_SLOW_RANK = re.compile(rf"(\d+)=({_NUMBER})x?")
_SLOW_LINK = re.compile(r"(\d+)-(\d+)=(.+)")
_TIME = re.compile(rf"({_NUMBER})(us|µs|ms|s)")
_SPEED = re.compile(rf"({_NUMBER})([KMG]?)(bit|B)(?:/s)?")
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}


def parse_slow_ranks(texts: Iterable[str], ranks: int) -> dict[int, float]:
    """Read which ranks compute how many times slower than they could: `2=3x`."""
    found: dict[int, float] = {}
    for text in texts:
        match = _SLOW_RANK.fullmatch(text)
        if match is None or float(match[2]) < 1:
            raise ConfigError(f"--slow-rank {text}: name a rank and how many times slower it is, as in 2=3x")
        _require_rank(f"--slow-rank {text}", int(match[1]), ranks)
        if int(match[1]) in found:
            raise ConfigError(f"--slow-rank {text}: rank {match[1]} has a speed already; leave one of them out")
        found[int(match[1])] = float(match[2])
    return found


def parse_slow_links(texts: Iterable[str], ranks: int) -> dict[frozenset[int], Link]:
    """Read which connections are slow, both ways: `0-1=5ms,100Mbit` has that latency and that bandwidth."""
    found: dict[frozenset[int], Link] = {}
    for text in texts:
        given = f"--slow-link {text}"
        match = _SLOW_LINK.fullmatch(text)
        if match is None:
            raise ConfigError(f"{given}: name two ranks, a latency and a bandwidth, as in 0-1=5ms,100Mbit")
        ends = frozenset((int(match[1]), int(match[2])))
        for rank in ends:
            _require_rank(given, rank, ranks)
        if len(ends) < 2:
            raise ConfigError(f"{given}: a link leads from one rank to another; name two")
        if ends in found:
            raise ConfigError(f"{given}: these two have a link already; say both at once, as in 0-1=5ms,100Mbit")
        found[ends] = _parse_link(match[3], given)
    return found


def _parse_link(text: str, given: str) -> Link:
    latency = seconds_per_byte = 0.0
    for part in text.split(","):
        time, speed = _TIME.fullmatch(part), _SPEED.fullmatch(part)
        if time is not None:
            latency = float(time[1]) * _SECONDS[time[2]]
        elif speed is not None and float(speed[1]) > 0:
            bits = float(speed[1]) * _PREFIXES[speed[2]] * (1 if speed[3] == "bit" else 8)
            seconds_per_byte = 8 / bits
        else:
            raise ConfigError(f"{given}: {part!r} is neither a time such as 5ms nor a bandwidth such as 100Mbit or 1GB")
    return Link(latency, seconds_per_byte)


def _require_rank(given: str, rank: int, ranks: int) -> None:
    if rank >= ranks:
        raise ConfigError(f"{given}: there is no rank {rank}; ranks are 0 to {ranks - 1}")
