"""Which interface of this machine leads to the other ranks.

```
    rank 2 ─────── the way to the store ───────▶ MASTER_ADDR
    eth0: 10.0.0.2 is where it begins, so this is where the others reach rank 2
```

gloo would ask what the machine's own name stands for. On Debian and Ubuntu that is 127.0.1.1, where no other machine
reaches it. So gloo and NCCL are told which interface to use, unless the user has told them already. Where all ranks are
on one machine, they use its loopback interface, which other machines cannot reach.
"""

from __future__ import annotations

import array
import contextlib
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from microparallel.errors import UsageError

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_LOOPBACK = "127.0.0.1"
_told: dict[str, str] = {}  # what this process has put into these variables; anything else there is the user's choice


class Stands(Protocol):
    """Where a rank is: on which machine, and at which address of it the way to the store begins."""

    @property
    def machine(self) -> Hashable:
        """The same for all ranks of one machine."""

    @property
    def address(self) -> str:
        """Of its machine, on the way to the store."""


def address_towards(host: str, port: int) -> str:
    """The address of this machine from which packets to another would leave; none is sent.

    Raises:
        UsageError: `host` is the name of no machine, or there is no way to it.
    """
    try:
        found = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"MASTER_ADDR={host}: this machine, {socket.gethostname()}, knows no host of that name ({error}); "
            "give an address, or a name that all hosts know"
        ) from None
    refused: OSError | None = None
    for family, kind, _, _, place in found:
        with socket.socket(family, kind) as probe:
            try:
                probe.connect(place)
                return str(probe.getsockname()[0])
            except OSError as error:
                refused = error
    raise UsageError(
        f"MASTER_ADDR={host}: this machine, {socket.gethostname()}, has no way to {found[0][4][0]} ({refused}); "
        "is its network up?"
    )


def is_loopback(address: str) -> bool:
    """Whether an address is this machine's for itself; a name is none."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


# ── interfaces ──────────────────────────────────────────────────────────────────────────────────────────────────────

_SIOCGIFCONF, _IFREQ, _NAME = 0x8912, 40, 16


def interfaces() -> list[tuple[str, str]]:
    """The interfaces of this machine, each with an address; of several addresses, gloo takes the first."""
    if sys.platform != "linux":
        return []
    return [*_interfaces_4(), *_interfaces_6()]


def _interfaces_4() -> Iterator[tuple[str, str]]:
    import fcntl

    room = array.array("B", bytes(_IFREQ * 1024))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("iL", len(room), room.buffer_info()[0])
        size, _ = struct.unpack("iL", fcntl.ioctl(any_socket.fileno(), _SIOCGIFCONF, asked))
    for at in range(0, size, _IFREQ):
        one = room[at : at + _IFREQ].tobytes()
        yield one[:_NAME].partition(b"\0")[0].decode(), socket.inet_ntoa(one[_NAME + 4 : _NAME + 8])


def _interfaces_6() -> Iterator[tuple[str, str]]:
    with contextlib.suppress(OSError):  # a kernel without IPv6
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            number, *_, name = line.split()
            yield name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number))


def interface_of(address: str) -> str | None:
    """The interface that has an address; None where that is not known."""
    wanted = address.partition("%")[0]
    return next((name for name, found in interfaces() if found == wanted), None)


# ── which interface this rank uses ──────────────────────────────────────────────────────────────────────────────────


def take_the_way(ranks: Sequence[Stands], rank: int) -> str:
    """Tell gloo and NCCL which interface to use; returns the address at which this rank is reached."""
    if chosen := _chosen_by_user():
        return chosen
    address = _address(ranks, rank)
    interface = interface_of(address)
    if interface is None:
        return address
    for variable, value in ((GLOO, interface), (NCCL, f"={interface}")):
        if os.environ.get(variable) in (None, _told.get(variable)):
            os.environ[variable] = _told[variable] = value
    return next(first for name, first in interfaces() if name == interface)


def _chosen_by_user() -> str | None:
    """The address of the interface that the user has chosen for gloo."""
    chosen = os.environ.get(GLOO, "").split(",")[0]
    if not chosen or os.environ[GLOO] == _told.get(GLOO):
        return None
    address = next((address for name, address in interfaces() if name == chosen), None)
    if address is None and (there := {name: None for name, _ in interfaces()}):
        raise UsageError(
            f"{GLOO}={chosen}: {socket.gethostname()} has no interface of that name with an address; "
            f"it has {', '.join(there)}"
        )
    return address


def _address(ranks: Sequence[Stands], rank: int) -> str:
    """Where the other ranks reach this one."""
    mine = ranks[rank]
    if all(one.machine == mine.machine for one in ranks):
        return _LOOPBACK
    if not is_loopback(mine.address):
        return mine.address
    # The store is on this machine, and its name leads here without leaving it: so see which way leads to the others.
    elsewhere = (one.address for one in ranks if one.machine != mine.machine and not is_loopback(one.address))
    other = next(elsewhere, None)
    return mine.address if other is None else address_towards(other, 0)
