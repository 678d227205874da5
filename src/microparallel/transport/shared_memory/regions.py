"""With MICROPARALLEL_MOVE=1, tensors that torch allocated are moved, once, to memory that the peers can read.

torch's DistributedDataParallel keeps gradients in buckets that it allocates itself. Without the variable, each
all-reduce begins by copying them into the segment. With it, a large tensor that is all-reduced for the second time is
moved: torch puts its memory into an anonymous file, under every view of it at the same time (as `Tensor.share_memory_`
does), and this rank sends a notice with the file's descriptor to every peer, over the connection that is there anyway.
A second notice follows when the tensor is gone. `benchmarks/torch_ddp.py` measures what it gains.

It is not the default, because pointers into the old memory that torch does not know of are invalid from then on: what
`Tensor.data_ptr` returned, or a tensor that was handed over by DLPack. Memory that `Tensor.numpy` has returned is not
moved: torch marks it.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Mapping

import torch

from microparallel.errors import CommsError, PeerGone
from microparallel.topology import available_memory
from microparallel.topology.limits import limit_behind
from microparallel.torch_private import share_by_descriptor
from microparallel.transport.shared_memory.mapping import mapped
from microparallel.transport.shared_memory.peers import RankStatus
from microparallel.transport.shared_memory.segment import MARGIN

VARIABLE = "MICROPARALLEL_MOVE"
_LEAST = 2**20  # bytes; copying less costs next to nothing
_MOST_REGIONS = 256  # at a time: each takes a descriptor
_FOLDER = "/dev/shm"  # where torch's anonymous files take their memory from
# A region's number and size, with its descriptor, or a handle to it; or its number and 0, when it is gone.
_NOTICE = struct.Struct("QQ64s")


class OwnRegions:
    """The storages that this rank has moved, each with a number that the peers know it by."""

    def __init__(self, connections: Mapping[int, socket.socket], status: RankStatus) -> None:
        self._connections = connections
        self._status = status
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._gone: deque[int] = deque()  # regions whose tensors are gone, and the peers do not know yet
        self._count = 0
        self._given_up = os.environ.get(VARIABLE) != "1"

    def find(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """The number of the region that a tensor lies in, and the offset in it; None when the tensor lies elsewhere."""
        if not self._known:
            return None
        storage = tensor.untyped_storage()
        number, address = self._known.get(storage, (0, 0))
        return (number, tensor.data_ptr() - address) if number and storage.data_ptr() == address else None

    def move_what_comes_again(self, tensor: torch.Tensor) -> None:
        """Move a tensor's memory if it is large, and was handed to this method before."""
        storage = tensor.untyped_storage()
        if self._given_up or storage in self._known or not _movable(tensor, storage):
            return
        if storage not in self._seen:
            self._seen.add(storage)
        elif not _fits(storage.nbytes()):
            self._given_up = True
        elif len(self._known) < _MOST_REGIONS:
            self._move(storage)

    def _move(self, storage: torch.UntypedStorage) -> None:
        try:
            descriptor, size = share_by_descriptor(storage)
        except RuntimeError:  # the tensor stays where it was, and is copied each time as before
            self._given_up = True
            return
        self._count += 1
        if self._send_notice(self._count, size, [descriptor]):
            self._known[storage] = self._count, storage.data_ptr()
            weakref.finalize(storage, self._gone.append, self._count).atexit = False

    def announce_gone(self) -> None:
        """Let the peers unmap the regions whose tensors are gone here; the memory is free when all peers have."""
        while self._gone:
            self._send_notice(self._gone.popleft(), 0, [])

    def _send_notice(self, number: int, size: int, descriptors: list[int], handle: bytes = b"") -> bool:
        try:
            for connection in self._connections.values():
                socket.send_fds(connection, [_NOTICE.pack(number, size, handle)], descriptors)
        except OSError:  # a peer died, or does not read: ranks that wait for it will notice (`Peers.require_alive`)
            self._given_up = True
            return False
        self._status.count_notice()
        return True


class TheirRegions:
    """The storages that a peer has moved, as this rank maps them."""

    def __init__(self, peer: int, connection: socket.socket, status: RankStatus) -> None:
        self._peer = peer
        self._connection = connection
        self._status = status
        self._read = 0  # notices, modulo 2³²
        self._reading = threading.Lock()  # held by the thread that reads notices: messages and collectives need them
        self._regions: dict[int, torch.Tensor] = {}

    def refresh(self) -> None:
        """Read the notices that the peer has sent since the last call."""
        if self._read == self._status.notices:
            return
        with self._reading:
            while self._read != self._status.notices:
                try:
                    self._read_notice()
                finally:  # only now: another thread may see that there is nothing to read, and use what was handed over
                    self._read = (self._read + 1) % 2**32

    def bytes_of(self, number: int) -> torch.Tensor:
        """A region's memory. The peer has sent its notice before it offers a tensor there."""
        self.refresh()
        if number not in self._regions:
            raise CommsError(f"rank {self._peer} offers memory that it has not handed over")
        return self._regions[number]

    def _read_notice(self) -> None:
        try:
            message, descriptors, _, _ = socket.recv_fds(self._connection, _NOTICE.size, 1)
        except ConnectionError as error:
            raise PeerGone([self._peer]) from error
        except OSError as error:
            raise CommsError(f"rank {self._peer} has not handed over memory that it announced: {error}") from error
        if len(message) != _NOTICE.size:
            raise PeerGone([self._peer])
        number, size, handle = _NOTICE.unpack(message)
        if not size:
            self._forget(number)
        elif any(handle):
            self._open(number, size, handle)
        elif descriptors:
            self._regions[number] = _mapped(descriptors[0], size)
        else:
            raise CommsError(
                f"no file descriptor is left for memory of rank {self._peer}; raise `ulimit -n`, or unset {VARIABLE}"
            )

    def _open(self, number: int, size: int, handle: bytes) -> None:  # noqa: ARG002
        """Open memory of another kind, to which the peer has sent a handle."""
        raise CommsError(f"rank {self._peer} hands over memory that this rank cannot open")

    def _forget(self, number: int) -> None:
        self._regions.pop(number, None)

    def close(self) -> None:
        """Unmap all regions."""
        for number in list(self._regions):
            self._forget(number)


def _mapped(descriptor: int, size: int) -> torch.Tensor:
    """A file's memory, read-only."""
    try:
        return torch.frombuffer(mapped(descriptor, size), dtype=torch.uint8)
    except OSError as error:
        needed = f"{size:,} bytes of a peer's memory"
        raise CommsError(limit_behind(error, needed) or f"{needed} cannot be mapped: {error.strerror}") from error
    finally:
        os.close(descriptor)


def _movable(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    size = storage.nbytes()
    whole = tensor.numel() * tensor.element_size() == size
    # torch calls memory that it does not own alone not resizable; NumPy may hold it.
    return size >= _LEAST and whole and storage.resizable() and not storage.is_shared()


def _fits(size: int) -> bool:
    """Whether there is room. In many containers the folder is small; then tensors are copied into the segment."""
    try:
        folder = os.statvfs(_FOLDER)
    except OSError:
        return False
    memory = available_memory()
    return size < folder.f_bavail * folder.f_frsize and (memory is None or size < memory - MARGIN)
