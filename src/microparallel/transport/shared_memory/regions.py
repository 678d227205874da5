"""Memory of torch's own that was moved to where the peers can read it, if the user has asked for that.

torch's DistributedDataParallel keeps gradients in buckets that it allocates itself. Each all-reduce begins by copying
them into the segment. With `MICROPARALLEL_MOVE=1` in the environment, a large tensor that all-reduce meets for the
second time is moved, once: torch puts its memory into an anonymous file, under every view of it at the same time
(`Tensor.share_memory_` does so, too), and we hand the file's descriptor to the peers over the connections that are
there anyway. `benchmarks/torch_ddp.py` measures what it gains.

It is not the default, because a pointer into the old memory that torch knows nothing of dangles from then on: what
`Tensor.data_ptr` returned, or a tensor that was handed over by DLPack before. What `Tensor.numpy` has shown is safe:
torch marks such memory, and it is left alone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import struct
import weakref
from collections import deque
from collections.abc import Mapping

import torch

from microparallel.errors import CommsError, PeerGone
from microparallel.topology import available_memory
from microparallel.torch_private import share_by_descriptor
from microparallel.transport.shared_memory.segment import MARGIN, Status

VARIABLE = "MICROPARALLEL_MOVE"
_LEAST = 2**20  # bytes; copying less costs next to nothing
_MOST_REGIONS = 256  # at a time: each takes a descriptor
_FOLDER = "/dev/shm"  # where torch's anonymous files take their memory from
_NEWS = struct.Struct("QQ")  # a region's number and size, with its descriptor; or its number and 0, when it is gone

_library = ctypes.CDLL(None, use_errno=True)
_library.mmap.restype = ctypes.c_void_p
_library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_long)
_library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


class OwnRegions:
    """The storages that this rank has moved, each with a number that the peers know it by."""

    def __init__(self, connections: Mapping[int, socket.socket], status: Status) -> None:
        self._connections = connections
        self._status = status
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._gone: deque[int] = deque()
        self._count = 0
        self._given_up = os.environ.get(VARIABLE) != "1"

    def find(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """The number of the region that a tensor lies in, and where in it; None when it lies elsewhere."""
        if not self._known:
            return None
        storage = tensor.untyped_storage()
        number, address = self._known.get(storage, (0, 0))
        return (number, tensor.data_ptr() - address) if number and storage.data_ptr() == address else None

    def move_what_comes_again(self, tensor: torch.Tensor) -> None:
        """Move a tensor's memory if it is worth it: if it is large, and not here for the first time."""
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
        except RuntimeError:  # it lies where it was, and is copied each time as before
            self._given_up = True
            return
        self._count += 1
        if self._tell(self._count, size, [descriptor]):
            self._known[storage] = self._count, storage.data_ptr()
            weakref.finalize(storage, self._gone.append, self._count).atexit = False

    def tell_what_is_gone(self) -> None:
        """Let the peers forget regions whose tensors are gone here; their memory is free when all have."""
        while self._gone:
            self._tell(self._gone.popleft(), 0, [])

    def _tell(self, number: int, size: int, descriptors: list[int]) -> bool:
        try:
            for connection in self._connections.values():
                socket.send_fds(connection, [_NEWS.pack(number, size)], descriptors)
        except OSError:  # whoever is gone, or reads nothing, is for others to notice
            self._given_up = True
            return False
        self._status.tell()
        return True


class TheirRegions:
    """The storages that a peer has moved, as this rank maps them."""

    def __init__(self, peer: int, connection: socket.socket, status: Status) -> None:
        self._peer = peer
        self._connection = connection
        self._status = status
        self._read = 0
        self._regions: dict[int, torch.Tensor] = {}

    def refresh(self) -> None:
        """Read what the peer has told since the last time."""
        while self._read != self._status.told:
            self._read = (self._read + 1) % 2**32
            self._read_news()

    def bytes_of(self, number: int) -> torch.Tensor:
        """A region's memory; a peer tells of it before it offers anything there."""
        self.refresh()
        if number not in self._regions:
            raise CommsError("a peer offers memory that it has not handed over")
        return self._regions[number]

    def _read_news(self) -> None:
        try:
            message, descriptors, _, _ = socket.recv_fds(self._connection, _NEWS.size, 1)
        except ConnectionError as error:
            raise PeerGone([self._peer]) from error
        except OSError as error:
            raise CommsError(f"a peer has not handed over what it told of: {error}") from error
        if len(message) != _NEWS.size:
            raise PeerGone([self._peer])
        number, size = _NEWS.unpack(message)
        if not size:
            self._regions.pop(number, None)
        elif descriptors:
            self._regions[number] = _mapped(descriptors[0], size)
        else:
            raise CommsError(f"no descriptor was left for a peer's memory; raise `ulimit -n`, or unset {VARIABLE}")

    def close(self) -> None:
        """Let go of everything."""
        self._regions.clear()


def _mapped(descriptor: int, size: int) -> torch.Tensor:
    """A file's memory, to be read; unlike Python's own map, it does not keep a descriptor."""
    try:
        address = _library.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    finally:
        os.close(descriptor)
    if address == _FAILED:
        raise CommsError(f"{size:,} bytes of a peer's memory cannot be mapped: {os.strerror(ctypes.get_errno())}")
    memory = (ctypes.c_char * size).from_address(address)
    weakref.finalize(memory, _library.munmap, address, size).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)


def _movable(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    size = storage.nbytes()
    whole = tensor.numel() * tensor.element_size() == size
    # Not resizable is what torch calls memory that it does not own alone; NumPy may hold it.
    return size >= _LEAST and whole and storage.resizable() and not storage.is_shared()


def _fits(size: int) -> bool:
    """Whether there is room: where the folder is small, as in many containers, copies in the segment serve."""
    try:
        folder = os.statvfs(_FOLDER)
    except OSError:
        return False
    memory = available_memory()
    return size < folder.f_bavail * folder.f_frsize and (memory is None or size < memory - MARGIN)
