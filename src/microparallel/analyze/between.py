"""What the hosts of a world are to each other: who reaches whom, how fast, by which clock, with which versions.

Every host goes through the same four parts and ends with the same report, which is made from what all have said:

```
    1  each tells its address, interface and versions
    2  each tries to reach each other one
    3  pairs measure their link, all hosts at the same time, but none two links at once:
           round 1   0–3  1–2        round 2   0–2  3–1        round 3   0–1  2–3
    4  if nobody is out of reach, they become the ranks of a gloo world, and time messages as ranks send them
```
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

import microparallel
from microparallel.analyze.checkup import Problem
from microparallel.analyze.hosts import ANSWER_TIMEOUT, Party, Progress
from microparallel.analyze.link_probe import Door, Measured, measure
from microparallel.bench.messages import fit_link, one_way
from microparallel.errors import MicroparallelError, TransportError
from microparallel.text import show_seconds
from microparallel.topology import Link
from microparallel.train.fingerprint import versions
from microparallel.transport.interfaces import GLOO, interface_of, take_the_way
from microparallel.transport.torch_distributed import TRANSLATED
from microparallel.world.connect import join
from microparallel.world.roll_call import roll_call
from microparallel.world.way import why

_PATIENCE = 8.0  # seconds until a host counts as out of reach: a lost packet is sent again after 1, 3 and 7
_TRIES_AT_ONCE = 32
_SMALL, _LARGE, _LEAST_LARGE = 4 << 10, 32 << 20, 64 << 10  # bytes of messages
_SECONDS_OF_MESSAGES, _MOST_MESSAGES = 0.7, 100  # how long messages of one size may take, and how many they are
_CLOCKS_APART = 0.5  # seconds from which on clocks are a problem
_ENOUGH = 1.0  # bytes a second


@dataclass(frozen=True)
class Host:
    """What a host says of itself.

    Attributes:
        name: by which it was named.
        address: at which the others reach it.
        interface: which has that address; empty where that is not known.
        mtu: the largest packet that the interface sends, in bytes; 0 where that is not known.
        versions: of Python, torch and microparallel, and a checksum of microparallel's code.
    """

    name: str
    address: str
    interface: str
    mtu: int
    versions: dict[str, str]


@dataclass(frozen=True)
class Pair:
    """Two hosts, by their numbers, and what is known of the link between them.

    Attributes:
        first: the host that measured.
        second: the other one.
        measured: the link; None if it could not be measured.
        link: what a message costs that a rank sends to another one over gloo; None if that was not measured.
    """

    first: int
    second: int
    measured: Measured | None = None
    link: Link | None = None


@dataclass(frozen=True)
class Report:
    """The same on every host.

    Attributes:
        place: where the hosts met.
        hosts: those that came.
        missing: the names of those that did not.
        pairs: every two of those that came.
        problems: what is wrong, each with its fix.
    """

    place: str
    hosts: list[Host]
    missing: list[str]
    pairs: list[Pair]
    problems: list[Problem] = field(default_factory=list)

    @property
    def slowest(self) -> Pair | None:
        """The link over which a large message takes longest."""
        known = [pair for pair in self.pairs if pair.link is not None]
        return max(known, key=lambda pair: pair.link.seconds(_LARGE) if pair.link else 0.0, default=None)


def examine(party: Party, number: int, progress: Progress) -> Report:
    """Look at all hosts and the links between them; each calls this, with its number.

    Raises:
        MicroparallelError: a host ended, or fell silent, while the others counted on it.
    """
    try:
        with TRANSLATED:
            report = _Examination(party, number, progress).report()
            party.store.set("problems", str(len(report.problems)))
            return report
    except TransportError as error:
        raise MicroparallelError(
            f"{party.names[number]} waited {ANSWER_TIMEOUT:g} s for what another host found; a host ended or was "
            f"cut off meanwhile: {error}"
        ) from None


def problems_found(party: Party) -> int:
    """Wait until the hosts have looked at each other; returns how many problems they found."""
    with TRANSLATED:
        party.store.wait(["problems"], timedelta(seconds=ANSWER_TIMEOUT * (len(party.names) + 1)))
        return int(party.store.get("problems"))


class _Examination:
    """One host's part in it."""

    def __init__(self, party: Party, number: int, progress: Progress) -> None:
        self._party, self._number, self._progress = party, number, progress
        self._store = party.store
        self._count = len(party.names)
        self._problems: list[Problem] = []

    def report(self) -> Report:
        party = self._party
        for name in party.missing:
            self._note(
                f"{name} did not come to {party.place} within {party.waited:g} s",
                f"run the same command on {name}; if it runs there, it says what is in its way",
            )
        if self._count == 1:
            hosts = self._told("host", _host(party.names[0], socket.gethostname()))
            return Report(party.place, [Host(**one) for one in hosts], [*party.missing], [], self._problems)
        self._progress("who is where")
        answers = roll_call(party.placement, self._store, nccl=False, shm=False)
        address = take_the_way(answers, self._number)
        if self._number == 0:
            self._store.set("word", secrets.token_hex(16))
        word = self._store.get("word").decode()
        with closing(Door(address, word)) as door:
            mine = _host(party.names[self._number], address)
            told = self._told("host", {**mine, "port": door.port})
            ports = [one.pop("port") for one in told]
            hosts = [Host(**one) for one in told]
            reached = self._reach(hosts, ports)
            pairs = self._measure(hosts, ports, reached, word)
        self._problems += differences(hosts, pairs)
        if all(pair.measured is not None for pair in pairs) and not any(map(any, reached)):
            pairs = self._time_messages(pairs)
        return Report(party.place, hosts, [*party.missing], pairs, self._problems)

    def _note(self, what: str, fix: str) -> None:
        self._problems.append(Problem(what, fix))

    def _told(self, key: str, mine: Any) -> list[Any]:
        """What every host says under this key, in the order of their numbers."""
        self._store.set(f"{key}/{self._number}", json.dumps(mine))
        return [json.loads(self._store.get(f"{key}/{other}")) for other in range(self._count)]

    # ── who reaches whom ────────────────────────────────────────────────────────────────────────────────────────

    def _reach(self, hosts: Sequence[Host], ports: Sequence[int]) -> list[list[str]]:
        """For each host, why it does not reach each other one; empty where it does."""
        self._progress("who reaches whom")
        others = [other for other in range(self._count) if other != self._number]
        with ThreadPoolExecutor(min(len(others), _TRIES_AT_ONCE)) as several:
            reasons = several.map(lambda other: _why_not(hosts[other].address, ports[other]), others)
        found = dict(zip(others, reasons, strict=True))
        table: list[list[str]] = self._told("reach", [found.get(other, "") for other in range(self._count)])
        for one, row in enumerate(table):
            for other, reason in enumerate(row):
                if reason:
                    self._note(
                        f"{hosts[one].name} ({hosts[one].address}) cannot reach {hosts[other].name} at "
                        f"{hosts[other].address}: {reason}",
                        f"let {hosts[one].name} connect to every port of {hosts[other].name} (a firewall?); if this is "
                        f"the wrong network, choose the interface with {GLOO}=NAME on every host",
                    )
        return table

    # ── links ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _measure(
        self, hosts: Sequence[Host], ports: Sequence[int], reached: Sequence[Sequence[str]], word: str
    ) -> list[Pair]:
        """Let each pair measure its link, where one of the two reaches the other."""

        def measured(first: int, second: int) -> Any:
            one, other = (first, second) if not reached[first][second] else (second, first)
            if reached[one][other]:
                return None
            if one != self._number:
                return json.loads(self._store.get(f"link/{first}-{second}"))
            try:
                found = [one, other, vars(measure(hosts[other].address, ports[other], word))]
            except OSError as error:
                found = [one, other, why(error, _PATIENCE)]
            self._store.set(f"link/{first}-{second}", json.dumps(found))
            return found

        pairs = []
        for number, group in enumerate(rounds(self._count)):
            self._progress(f"links, round {number + 1} of {self._count - 1 + self._count % 2}")
            for first, second in sorted(group, key=lambda pair: self._number not in pair):
                found = measured(first, second)
                if found is None:
                    pairs.append(Pair(first, second))
                elif isinstance(found[2], str):
                    pairs.append(Pair(found[0], found[1]))
                    self._note_broken(hosts, *found)
                else:
                    pairs.append(Pair(found[0], found[1], _as_measured(found[2])))
        self._problems.sort(key=lambda one: one.what)
        return sorted(pairs, key=lambda pair: (min(pair.first, pair.second), max(pair.first, pair.second)))

    def _note_broken(self, hosts: Sequence[Host], one: int, other: int, reason: str) -> None:
        mtus = " and ".join(f"{hosts[end].mtu} on {hosts[end].name}" for end in (one, other))
        self._note(
            f"{hosts[one].name} reaches {hosts[other].name} at {hosts[other].address}, but its link breaks: {reason}",
            f"small packets that pass where large ones do not are a matter of the MTU ({mtus}); else look at the cable "
            "and the switch",
        )

    # ── messages of ranks ───────────────────────────────────────────────────────────────────────────────────────

    def _time_messages(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Become ranks that talk through gloo, and time messages between each two of them."""
        self._progress("messages of ranks")
        store = dist.PrefixStore("ranks", self._store)
        try:
            comms = join(self._party.placement, store, transport="gloo", timeout=ANSWER_TIMEOUT / 2)
        except MicroparallelError as error:
            reason = str(error).partition("\n")[0]
            comms = None
        reasons = self._told("joined", "" if comms is not None else reason)
        if comms is None or any(reasons):
            said = next((f"{self._party.names[number]}: {one}" for number, one in enumerate(reasons) if one), "")
            self._note(f"the hosts reach each other, but gloo does not ({said})", f"unset {GLOO}, or name an interface")
            return [*pairs]
        by_ends = {frozenset((pair.first, pair.second)): pair for pair in pairs}
        with closing(comms):
            for group in rounds(self._count):
                for ends in map(frozenset, group):
                    if self._number in ends and (measured := by_ends[ends].measured) is not None:
                        first, second = sorted(ends)
                        other = second if self._number == first else first
                        times = [
                            (1.0, size, one_way(comms, other, self._number == first, size, repeats))
                            for size, repeats in _messages(measured)
                        ]
                        if self._number == first:
                            self._store.set(f"messages/{first}-{second}", json.dumps(times))
                comms.barrier()
        found = []
        for pair in pairs:
            first, second = sorted((pair.first, pair.second))
            times = json.loads(self._store.get(f"messages/{first}-{second}"))
            found.append(Pair(pair.first, pair.second, pair.measured, fit_link(times)))
        return found


# ── what differs ────────────────────────────────────────────────────────────────────────────────────────────────────


def differences(hosts: Sequence[Host], pairs: Sequence[Pair]) -> list[Problem]:
    """What is not the same on all hosts: versions, and clocks."""
    found = [
        Problem(
            f"{name} differs: {said}",
            "install the same on all hosts: ranks that run other code may compute something else, or wait for ever",
        )
        for name, said in differing(hosts).items()
    ]
    for pair in pairs:
        if pair.measured is not None and abs(pair.measured.ahead) - pair.measured.clock_error > _CLOCKS_APART:
            way = "ahead of" if pair.measured.ahead > 0 else "behind"
            found.append(
                Problem(
                    f"{hosts[pair.second].name}'s clock is {show_seconds(abs(pair.measured.ahead))} {way} "
                    f"{hosts[pair.first].name}'s",
                    "let both follow a time server (chrony, systemd-timesyncd), or their logs cannot be compared",
                )
            )
    return found


def differing(hosts: Sequence[Host]) -> dict[str, str]:
    """Which versions are not the same everywhere, and where they are what."""
    found = {}
    for name in hosts[0].versions:
        values = [host.versions[name] for host in hosts]
        if len({*values}) > 1:
            kinds = [value for number, value in enumerate(values) if value not in values[:number]]
            found[name] = "; ".join(
                f"{kind} on {', '.join(host.name for host in hosts if host.versions[name] == kind)}" for kind in kinds
            )
    return found


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """All pairs of so many hosts, in rounds in which each host is in one pair at most.

    As in a tournament: one host keeps its seat, the others move on by one seat each round, and who sits opposite plays.
    """
    seats: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    half = len(seats) // 2
    for _ in range(len(seats) - 1):
        ends = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(min(one, other), max(one, other)) for one, other in ends if one is not None and other is not None]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def _messages(link: Measured) -> list[tuple[int, int]]:
    """Sizes of messages that this link carries in good time, and how many of each."""
    rate = max(_ENOUGH, min(link.there, link.back))
    large = int(min(_LARGE, max(_LEAST_LARGE, rate * _SECONDS_OF_MESSAGES / 20)))
    found = []
    for size in (_SMALL, large // 8, large):
        seconds = link.round_trip + 2 * size / rate
        found.append((size, int(min(_MOST_MESSAGES, max(3, _SECONDS_OF_MESSAGES / seconds)))))
    return found


def _as_measured(found: dict[str, Any]) -> Measured:
    low, high = found.pop("spread")
    return Measured(spread=(low, high), **found)


def _host(name: str, address: str) -> dict[str, Any]:
    interface = interface_of(address) or ""
    made = {"Python": platform.python_version(), **versions(), "microparallel's code": _code()}
    return {"name": name, "address": address, "interface": interface, "mtu": _mtu(interface), "versions": made}


def _mtu(interface: str) -> int:
    try:
        return int(Path(f"/sys/class/net/{interface}/mtu").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def _code() -> str:
    """A checksum of this library's sources: two hosts may have other ones of the same version."""
    folder = Path(str(microparallel.__file__)).parent
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(os.fsencode(file.relative_to(folder)) + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def _why_not(address: str, port: int) -> str:
    try:
        socket.create_connection((address, port), timeout=_PATIENCE).close()
    except OSError as error:
        return why(error, _PATIENCE)
    return ""
