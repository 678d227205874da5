"""Hand every rank's segment to every other rank, over private sockets.

Each rank listens on a socket in a folder that only its user can enter, and writes the path into the store where the
ranks meet. A pair of ranks then has one connection: each end says who it is and hands over a descriptor. The folder is
gone when all have met. The connections stay: a rank that dies, in whatever way, closes them, and the others notice.
"""

from __future__ import annotations

import os
import socket
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from microparallel.errors import CommsError

_HELLO = struct.Struct("II")  # rank, how many ranks it expects


class Store(Protocol):
    """Where ranks leave notes for each other before they can talk; torch's stores are such."""

    def set(self, key: str, value: str) -> None:
        """Leave a note."""

    def get(self, key: str) -> bytes:
        """Wait for a note, and read it."""


def this_machine() -> str:
    """The same text for processes that can meet: the machine since it was started, and the files they see."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/mnt').stat().st_ino}"


def exchange_descriptors(
    store: Store, rank: int, ranks: int, descriptor: int, timeout: float
) -> dict[int, tuple[socket.socket, int]]:
    """Give our descriptor to all others; returns each peer's connection and descriptor."""
    with _listening(store, rank) as listener:
        listener.settimeout(timeout)
        peers: dict[int, tuple[socket.socket, int]] = {}
        for peer in range(rank):  # the higher rank of a pair connects to the lower
            connection = _connect(store.get(f"socket/{peer}").decode(), timeout)
            _send(connection, rank, ranks, descriptor)
            peers[peer] = (connection, _receive(connection, ranks, peer)[1])
        while len(peers) < ranks - 1:
            connection, _ = listener.accept()
            connection.settimeout(timeout)
            peer, theirs = _receive(connection, ranks, None)
            _send(connection, rank, ranks, descriptor)
            peers[peer] = (connection, theirs)
    for connection, _ in peers.values():
        connection.setblocking(False)
    return peers


@contextmanager
def _listening(store: Store, rank: int) -> Iterator[socket.socket]:
    with (
        tempfile.TemporaryDirectory(prefix="microparallel-") as folder,  # which nobody else may enter
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
    ):
        path = str(Path(folder) / "socket")
        listener.bind(path)
        listener.listen()
        store.set(f"socket/{rank}", path)
        yield listener


def _connect(path: str, timeout: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout)
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        raise CommsError(f"the socket of another rank cannot be reached: {error}") from error
    return connection


def _send(connection: socket.socket, rank: int, ranks: int, descriptor: int) -> None:
    socket.send_fds(connection, [_HELLO.pack(rank, ranks)], [descriptor])


def _receive(connection: socket.socket, ranks: int, expected: int | None) -> tuple[int, int]:
    _require_same_user(connection)
    message, descriptors, _, _ = socket.recv_fds(connection, _HELLO.size, 1)
    if len(message) != _HELLO.size or len(descriptors) != 1:
        raise CommsError("another rank went away while the ranks were meeting")
    rank, their_ranks = _HELLO.unpack(message)
    if their_ranks != ranks or not 0 <= rank < ranks or (expected is not None and rank != expected):
        raise CommsError(f"a rank {rank} of {their_ranks} came to a meeting of {ranks} ranks")
    return rank, descriptors[0]


def _require_same_user(connection: socket.socket) -> None:
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.getuid():
        raise CommsError(f"user {user} came to a meeting of user {os.getuid()}'s ranks, and was refused")
