"""How the ranks of one machine find each other: each gives its segment to every other, over a private socket.

Each rank listens on a socket whose name is long and random, and writes the name into torch's store. Each pair of ranks
then makes one connection, over which both send their rank and the descriptor of their segment. Processes of other users
are refused. The names are the kernel's, not files, so nothing is left behind however a rank ends. The connections stay
open: when a process dies, the kernel closes them, and the other ranks notice.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from microparallel.errors import CommsError, TransportTimeout
from microparallel.text import show_ranks

_HELLO = struct.Struct("II")  # rank, how many ranks it expects


def this_machine() -> str:
    """A text that is the same for all processes that can reach each other's sockets: machine, boot and network."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/net').stat().st_ino}"


def exchange_descriptors(
    store: dist.Store, rank: int, ranks: int, here: Sequence[int], descriptor: int, timeout: float
) -> dict[int, tuple[socket.socket, int]]:
    """Give this rank's descriptor to all others on this machine; returns each peer's connection and descriptor.

    Args:
        store: where the ranks meet.
        rank: this one.
        ranks: how many the group has.
        here: those of them that are on this machine, this one among them.
        descriptor: of this rank's segment.
        timeout: seconds to wait for the others.
    """
    with _listening(store, rank) as listener:
        listener.settimeout(timeout)
        peers: dict[int, tuple[socket.socket, int]] = {}
        for peer in here:
            if peer < rank:  # the higher rank of a pair connects to the lower
                peers[peer] = _connect(store, peer, rank, ranks, descriptor, timeout)
        while len(peers) < len(here) - 1:
            connection = _accept(listener, sorted({*here} - {rank} - peers.keys()), timeout)
            connection.settimeout(timeout)
            if not _same_user(connection):
                connection.close()
                continue
            try:
                peer, theirs = _receive(connection, ranks, None)
                _send(connection, rank, ranks, descriptor)
            except ConnectionError:  # the peer closed the connection, and may connect again
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
        raise TransportTimeout(f"{show_ranks(missing)} did not connect within {timeout:g} s") from error


@contextmanager
def _listening(store: dist.Store, rank: int) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        name = f"microparallel-{secrets.token_hex(16)}"
        listener.bind(_address(name))
        listener.listen()
        store.set(f"socket/{rank}", name)
        yield listener


def _address(name: str) -> str:
    return f"\0{name}"  # a name that begins with zero is the kernel's, not a file's


def _connect(
    store: dist.Store, peer: int, rank: int, ranks: int, descriptor: int, timeout: float
) -> tuple[socket.socket, int]:
    """Connect to a lower rank, and exchange descriptors with it.

    A group of the same ranks may have had the same name before, and the names of its sockets may still be in the store.
    So a socket that does not exist means that the lower rank has not written its new name yet.
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
        raise ConnectionResetError("another rank closed its connection before it had sent its descriptor")
    rank, their_ranks = _HELLO.unpack(message)
    if their_ranks != ranks or not 0 <= rank < ranks or (expected is not None and rank != expected):
        raise CommsError(f"a rank {rank} of {their_ranks} connected to a group of {ranks} ranks")
    return rank, descriptors[0]


def _same_user(connection: socket.socket) -> bool:
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.getuid())
