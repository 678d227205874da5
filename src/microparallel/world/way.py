"""The way to the other ranks: the address at which a rank is reached, and who cannot reach whom.

```
    rank 2 ─────── the way to the store ───────▶ MASTER_ADDR
    eth0: 10.0.0.2 is where it begins, so this is where the others reach rank 2
```

gloo would ask what the machine's own name stands for. On Debian and Ubuntu that is 127.0.1.1, where no other machine
reaches it. So gloo and NCCL are told which interface to use, unless the user has told them already. Where all ranks are
on one machine, they use its loopback interface, which other machines cannot reach.

Before gloo connects every rank to every other, one rank of each machine tries to reach one of each other. All ranks are
told what came of it, so that all of them can say who cannot reach whom, and end.
"""

from __future__ import annotations

import array
import contextlib
import ipaddress
import json
import os
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from microparallel.errors import CommsError, UsageError

if TYPE_CHECKING:
    from torch.distributed import Store

    from microparallel.world.roll_call import Answer

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_PATIENCE = 10.0  # seconds until a machine counts as out of reach: a lost packet is sent again after 1, 3 and 7
_GOODBYE = 2.0  # seconds that rank 0 stays for the others, when all of them end
_LOOPBACK = "127.0.0.1"
_told: dict[str, str] = {}  # what this process has put into these variables; anything else there is the user's choice


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


def take_the_way(answers: Sequence[Answer], rank: int) -> str:
    """Tell gloo and NCCL which interface to use; returns the address at which this rank is reached."""
    if chosen := _chosen_by_user():
        return chosen
    address = _address(answers, rank)
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


def _address(answers: Sequence[Answer], rank: int) -> str:
    """Where the other ranks reach this one."""
    mine = answers[rank]
    if all(one.machine == mine.machine for one in answers):
        return _LOOPBACK
    if not is_loopback(mine.address):
        return mine.address
    # The store is on this machine, and its name leads here without leaving it: so see which way leads to the others.
    elsewhere = (one.address for one in answers if one.machine != mine.machine and not is_loopback(one.address))
    other = next(elsewhere, None)
    return mine.address if other is None else address_towards(other, 0)


# ── can they be reached? ────────────────────────────────────────────────────────────────────────────────────────────


def require_reach(store: Store, answers: Sequence[Answer], rank: int, address: str, timeout: float) -> None:
    """Let one rank of each machine try to reach one of each other; all ranks raise if any of them cannot.

    Raises:
        CommsError: who cannot reach whom, at which address, and why.
    """
    firsts = [other for other, one in enumerate(answers) if one.machine == other]
    if len(firsts) == 1:
        return
    with contextlib.ExitStack() as listening:
        if rank in firsts:
            listener = listening.enter_context(_listener(address))
            store.set(f"way/{rank}", json.dumps([address, listener.getsockname()[1]]))
            others = {other: json.loads(store.get(f"way/{other}")) for other in firsts if other != rank}
            tried = {other: _why_not_reached(place, min(timeout, _PATIENCE)) for other, place in others.items()}
            failures = [
                f"rank {rank} on {answers[rank].host} ({address}) cannot reach rank {other} on {answers[other].host} "
                f"at {others[other][0]}: {reason}"
                for other, reason in tried.items()
                if reason
            ]
            store.set(f"reached/{rank}", json.dumps(failures))
        found = [failure for other in firsts for failure in json.loads(store.get(f"reached/{other}"))]
    if found:
        _let_all_read(store, rank, len(answers))
        raise CommsError(
            "\n".join(found) + f"\n  each rank uses the interface by which it reaches MASTER_ADDR; {GLOO}=NAME chooses "
            "another one; a firewall must let the ranks connect to any port of each other's"
        )


def _let_all_read(store: Store, rank: int, ranks: int) -> None:
    """Let rank 0, which may serve the store, stay until all ranks have read why they end; but not for long."""
    store.set(f"told/{rank}", "")
    if rank == 0:
        with contextlib.suppress(RuntimeError):
            store.wait([f"told/{other}" for other in range(ranks)], timedelta(seconds=_GOODBYE))


def _listener(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN)


def _why_not_reached(place: Sequence[object], patience: float) -> str:
    address, port = str(place[0]), int(str(place[1]))
    try:
        socket.create_connection((address, port), timeout=patience).close()
    except OSError as error:
        return why(error, patience)
    return ""


def why(error: OSError, patience: float) -> str:
    """Why nobody was reached, in a few words; `patience` is for how many seconds it was tried."""
    if isinstance(error, TimeoutError) and error.errno is None:
        return f"no answer within {patience:g} s"
    return (error.strerror or str(error)).lower()
