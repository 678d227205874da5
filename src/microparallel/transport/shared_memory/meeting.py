"""Hand every rank's segment to every other rank, over private sockets.

Each rank listens on a socket whose name is long and random, and writes the name into the store where the ranks meet. A
pair of ranks then has one connection: each end says who it is and hands over a descriptor. The names live in the kernel
alone, so that nothing is left behind however a rank ends, and strangers who come are sent away. The connections stay: a
rank that dies, in whatever way, closes them, and the others notice.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from microparallel.errors import CommsError, TransportTimeout

_HELLO = struct.Struct("II")  # rank, how many ranks it expects


class Store(Protocol):
    """Where ranks leave notes for each other before they can talk; torch's stores are such."""

    def set(self, key: str, value: str) -> None:
        """Leave a note."""

    def get(self, key: str) -> bytes:
        """Wait for a note, and read it."""


def this_machine() -> str:
    """The same text for processes that can meet: the machine since it was started, and its network as they see it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/net').stat().st_ino}"


def exchange_descriptors(
    store: Store, rank: int, ranks: int, descriptor: int, timeout: float
) -> dict[int, tuple[socket.socket, int]]:
    """Give our descriptor to all others; returns each peer's connection and descriptor."""
    with _listening(store, rank) as listener:
        listener.settimeout(timeout)
        peers: dict[int, tuple[socket.socket, int]] = {}
        for peer in range(rank):  # the higher rank of a pair connects to the lower
            peers[peer] = _visit(store, peer, rank, ranks, descriptor, timeout)
        while len(peers) < ranks - 1:
            connection = _accept(listener, sorted(set(range(ranks)) - {rank} - peers.keys()), timeout)
            connection.settimeout(timeout)
            if not _same_user(connection):
                connection.close()
                continue
            try:
                peer, theirs = _receive(connection, ranks, None)
                _send(connection, rank, ranks, descriptor)
            except ConnectionError:  # whoever came has gone, and may come again
                connection.close()
                continue
            peers[peer] = (connection, theirs)
    for connection, _ in peers.values():
        connection.setblocking(False)
    return peers


def _accept(listener: socket.socket, missing: list[int], timeout: float) -> socket.socket:
    try:
        return listener.accept()[0]
    except TimeoutError as error:
        names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        raise TransportTimeout(f"{names} did not come to the meeting within {timeout:g} s") from error


@contextmanager
def _listening(store: Store, rank: int) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        name = f"microparallel-{secrets.token_hex(16)}"
        listener.bind(_address(name))
        listener.listen()
        store.set(f"socket/{rank}", name)
        yield listener


def _address(name: str) -> str:
    return f"\0{name}"  # a name that begins with zero is the kernel's, not a file's


def _visit(
    store: Store, peer: int, rank: int, ranks: int, descriptor: int, timeout: float
) -> tuple[socket.socket, int]:
    """Connect to a lower rank.

    A group of the same ranks may have met under the same name before, and its notes may still be in the store. So
    nobody at home means that the new note is yet to come.
    """
    deadline = time.monotonic() + timeout
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout)
        try:
            connection.connect(_address(store.get(f"socket/{peer}").decode()))
            _send(connection, rank, ranks, descriptor)
            return connection, _receive(connection, ranks, peer)[1]
        except ConnectionError as error:
            connection.close()
            if time.monotonic() > deadline:
                raise TransportTimeout(f"the socket of rank {peer} cannot be reached: {error}") from error
            time.sleep(0.001)
        except BaseException:
            connection.close()
            raise


def _send(connection: socket.socket, rank: int, ranks: int, descriptor: int) -> None:
    socket.send_fds(connection, [_HELLO.pack(rank, ranks)], [descriptor])


def _receive(connection: socket.socket, ranks: int, expected: int | None) -> tuple[int, int]:
    if not _same_user(connection):
        raise CommsError("the socket of another rank belongs to another user; ranks must run as the same one")
    message, descriptors, _, _ = socket.recv_fds(connection, _HELLO.size, 1)
    if len(message) != _HELLO.size or len(descriptors) != 1:
        raise ConnectionResetError("another rank went away while the ranks were meeting")
    rank, their_ranks = _HELLO.unpack(message)
    if their_ranks != ranks or not 0 <= rank < ranks or (expected is not None and rank != expected):
        raise CommsError(f"a rank {rank} of {their_ranks} came to a meeting of {ranks} ranks")
    return rank, descriptors[0]


def _same_user(connection: socket.socket) -> bool:
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.getuid())
