"""Which ranks of a group share a host: the ranks of a host share memory, and a network leads to the others.

The name of a transport says it, so that the run, the simulator and a recorded trace take the same algorithms:

```
shm                      all ranks on one host
gloo                     over the network alone
shm+gloo:0-1+2-3         shared memory inside of two hosts with two ranks each, the network between them
shm+gloo:0.2+1.3:1ms,100Mbit      hosts whose ranks take turns, and what the network between them is known to do
```
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from microparallel.errors import ConfigError, UsageError
from microparallel.settings import TRANSPORTS
from microparallel.text import did_you_mean, one_of, parse_ranges, show_ranges
from microparallel.topology.links import Link, parse_link

MIXED = "shm+gloo"
TRANSPORT_HELP = f"{one_of(TRANSPORTS)}; {MIXED}:0-1+2-3 says which ranks count as being on one host."
LINK_VARIABLE = "MICROPARALLEL_LINK"
USUAL_LINK = Link(latency=200e-6, seconds_per_byte=8e-9)  # Ethernet of 1 Gbit, and what gloo needs for a message


@dataclass(frozen=True, slots=True)
class Hosts:
    """The ranks of a group, host by host; as text, `0-1+2-3`."""

    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, hosts: Sequence[Hashable]) -> Hosts:
        """From the host of each rank, by any name that hosts have."""
        members: dict[Hashable, list[int]] = {}
        for rank, host in enumerate(hosts):
            members.setdefault(host, []).append(rank)
        return cls(tuple(tuple(ranks) for ranks in members.values()))

    @classmethod
    def alike(cls, ranks: int, per_host: int) -> Hosts:
        """Host by host, with so many ranks each; the last may have fewer."""
        return cls.of([rank // per_host for rank in range(ranks)])

    @classmethod
    def parse(cls, text: str) -> Hosts:
        """Read what `str` has written.

        Raises:
            UsageError: unless each rank from 0 on is on one host.
        """
        hosts = cls(tuple(parse_ranges(part.replace(".", ",")) for part in text.split("+")))
        members = [rank for ranks in hosts.ranks for rank in ranks]
        if sorted(members) != list(range(len(members))) or not all(hosts.ranks) or str(hosts) != text:
            raise UsageError(f"hosts {text!r}: name the ranks of each host once, from rank 0 on, as in 0-1+2-3")
        return hosts

    def __str__(self) -> str:
        return "+".join(show_ranges(ranks).replace(",", ".") for ranks in self.ranks)

    @property
    def world_size(self) -> int:
        """How many ranks there are on all hosts."""
        return sum(len(ranks) for ranks in self.ranks)

    @property
    def most(self) -> int:
        """How many ranks the fullest host has."""
        return max(len(ranks) for ranks in self.ranks)

    def among(self, group: Sequence[int]) -> Hosts:
        """The same hosts for some of the ranks, which are numbered by their place in the group."""
        host_of = {rank: host for host, ranks in enumerate(self.ranks) for rank in ranks}
        return Hosts.of([host_of[rank] for rank in group])

    def with_root(self, root: int) -> list[list[int]]:
        """The ranks of each host, with the root before all others."""
        ordered = [
            [root, *(rank for rank in ranks if rank != root)] if root in ranks else [*ranks] for ranks in self.ranks
        ]
        return sorted(ordered, key=lambda ranks: ranks[0] != root)


# ── as names of transports ──────────────────────────────────────────────────────────────────────────────────────────


def check_transport(value: str, given: str) -> None:
    """Raise a `ConfigError` unless there is such a transport; `given` is how the user wrote it."""
    kind = value.partition(":")[0]
    if kind not in TRANSPORTS or (value != kind and hosts_of(value) is None):
        raise ConfigError(f"{given}: {did_you_mean(value, TRANSPORTS)}")
    link_of(value)


def transport_between(hosts: Hosts, link: str = "") -> str:
    """The transport of a group that can share memory inside of its hosts, and has gloo between them."""
    if len(hosts.ranks) == 1:
        return "shm"
    return ":".join([MIXED, str(hosts), *([link] if link else [])])


def hosts_of(transport: str) -> Hosts | None:
    """The hosts that a transport's name tells of; None where it has one way to all ranks."""
    kind, _, rest = transport.partition(":")
    return Hosts.parse(rest.partition(":")[0]) if kind == MIXED and rest else None


def link_of(transport: str) -> Link:
    """The link between hosts, as a transport's name tells; else what is usual."""
    text = transport.partition(":")[2].partition(":")[2]
    return parse_link(text, f"{LINK_VARIABLE}={text}") if text else USUAL_LINK


def among(transport: str, group: Iterable[int]) -> str:
    """The transport of some of the ranks."""
    hosts = hosts_of(transport)
    if hosts is None:
        return transport
    return transport_between(hosts.among(list(group)), transport.partition(":")[2].partition(":")[2])
