"""What each rank says of itself when it joins, and which ranks share a machine.

The ranks tell each other through the store. Whether two of them are on one machine is found out by trying: each rank
has a door, a socket that only processes which could also share its memory can reach. Neither a name nor an address says
as much: containers may share a kernel and no memory, or have the same address on two machines.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from microparallel.topology.placement import Placement
from microparallel.transport.interfaces import address_towards

if TYPE_CHECKING:
    from torch.distributed import Store

_PATIENCE = 5.0  # seconds until a door counts as shut


@dataclass(frozen=True, slots=True)
class Answer:
    """What is known of a rank.

    Attributes:
        host: the name of its machine.
        address: of its machine, on the way to the store.
        nccl: whether it can use NCCL.
        shm: whether it can use shared memory.
        machine: the lowest rank that it can share memory with; the same number for all ranks of one machine.
        gpu: the identity of the GPU that it would share with other ranks; empty if there is none.
    """

    host: str
    address: str
    nccl: bool
    shm: bool
    machine: int
    gpu: str = ""


def places(answers: Sequence[Answer]) -> list[str]:
    """The machine of each rank, as errors name it: two machines of one name are told apart."""
    machines_of: dict[str, set[int]] = {}
    for one in answers:
        machines_of.setdefault(one.host, set()).add(one.machine)
    return [one.host if len(machines_of[one.host]) == 1 else f"{one.host} of rank {one.machine}" for one in answers]


def roll_call(placement: Placement, store: Store, *, nccl: bool, shm: bool, gpu: str = "") -> list[Answer]:
    """What every rank says of itself, in rank order; waits until all of them have come."""
    ranks = range(placement.world_size)
    address = address_towards(placement.address, placement.port)
    mine = {"host": socket.gethostname(), "address": address, "nccl": nccl, "shm": shm, "gpu": gpu}
    with _door() as door:
        store.set(f"can/{placement.rank}", json.dumps(mine | {"door": door}))
        said = [json.loads(store.get(f"can/{rank}")) for rank in ranks]
        doors = [one.pop("door") for one in said]
        machine = next(rank for rank in ranks if rank == placement.rank or _is_open(doors[rank]))
        store.set(f"machine/{placement.rank}", str(machine))
        return [Answer(**said[rank], machine=int(store.get(f"machine/{rank}"))) for rank in ranks]


@contextlib.contextmanager
def _door() -> Iterator[str]:
    """A socket under a name of the kernel's, which exists on one machine (in one network namespace) alone."""
    if sys.platform != "linux":
        yield socket.gethostname()
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        name = f"microparallel-{secrets.token_hex(16)}"
        listener.bind(f"\0{name}")
        listener.listen(socket.SOMAXCONN)
        yield name


def _is_open(door: str) -> bool:
    """Whether a process of this user, on this machine, stands behind a door."""
    if sys.platform != "linux":
        return door == socket.gethostname()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as visitor:
        visitor.settimeout(_PATIENCE)
        try:
            visitor.connect(f"\0{door}")
        except OSError:
            return False
        _, user, _ = struct.unpack("3i", visitor.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return bool(user == os.getuid())
