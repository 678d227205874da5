"""What it costs to send a message from one rank to another; and slow ranks and links, as people write them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from microparallel.errors import ConfigError, UsageError


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


Port = tuple[str, int]  # ("out", 1): where messages leave node 1; ("in", 1): where they enter it


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes with several ranks each, numbered node by node: ranks 0 to 3 are on node 0, ranks 4 to 7 on node 1.

    Args:
        nodes: how many there are.
        per_node: how many ranks each has.
        inside: the connection between two ranks of one node.
        between: the connection between ranks of different nodes.
        shared_nic: whether all ranks of a node share one network port. It sends one message to other nodes at a time,
            and receives one. If not, every rank has a port of its own.
    """

    nodes: int
    per_node: int
    inside: Link
    between: Link
    shared_nic: bool = True

    def __post_init__(self) -> None:
        for name, number, what in (
            ("nodes", self.nodes, "a cluster has at least 1 node"),
            ("per_node", self.per_node, "a node has at least 1 rank"),
        ):
            if not isinstance(number, int) or number < 1:
                raise UsageError(f"Costs.cluster: {name}={number}: {what}")
        for name, link in (("inside", self.inside), ("between", self.between)):
            if not isinstance(link, Link):
                raise UsageError(f"Costs.cluster: {name}={link!r}: give mp.Link(latency=…, seconds_per_byte=…)")

    @property
    def ranks(self) -> int:
        """How many ranks all nodes have together."""
        return self.nodes * self.per_node

    def node_of(self, rank: int) -> int:
        """The node on which a rank is."""
        return rank // self.per_node

    def link(self, sender: int, receiver: int) -> Link:
        """The connection from one rank to another."""
        return self.inside if self.node_of(sender) == self.node_of(receiver) else self.between

    def ports(self, sender: int, receiver: int) -> tuple[Port, ...]:
        """The shared ports that a message passes; none inside a node."""
        source, target = self.node_of(sender), self.node_of(receiver)
        return (("out", source), ("in", target)) if self.shared_nic and source != target else ()


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
        found[ends] = parse_link(match[3], given)
    return found


def parse_link(text: str, given: str) -> Link:
    """Read a latency, a bandwidth or both: `5ms,100Mbit`; `given` is how the user wrote it, for the error."""
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


def show_link(link: Link) -> str:
    """A link as `parse_link` reads it, to three digits: `5ms,100Mbit`."""
    time, per_byte = link.latency or 0.0, link.seconds_per_byte or 0.0
    length, unit = next(((one, unit) for one, unit in ((1, "s"), (1e-3, "ms")) if time >= one), (1e-6, "us"))
    parts = [f"{_plain(time / length)}{unit}"]
    if per_byte:
        bits = 8 / per_byte
        prefix = next((prefix for prefix in "GMK" if bits >= _PREFIXES[prefix]), "")
        parts.append(f"{_plain(bits / _PREFIXES[prefix])}{prefix}bit")
    return ",".join(parts)


def _plain(number: float) -> str:
    """Three digits, and never an exponent."""
    return f"{float(f'{number:.3g}'):.9f}".rstrip("0").rstrip(".")


def _require_rank(given: str, rank: int, ranks: int) -> None:
    if rank >= ranks:
        raise ConfigError(f"{given}: there is no rank {rank}; ranks are 0 to {ranks - 1}")
