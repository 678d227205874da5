"""Memory of torch's own that was moved to where the peers can read it.

torch's DistributedDataParallel keeps gradients in buckets that it allocates itself. Each all-reduce
would begin by copying them into the segment. So a large tensor that comes for the second time is moved, once: torch
puts its memory into an anonymous file, under every view of it at the same time (`Tensor.share_memory_` does so, too),
and we hand the file's descriptor to the peers over the connections that are there anyway.

A pointer into the old memory that torch knows nothing of would dangle from then on. NumPy arrays are safe (torch marks
what it has shown to NumPy, and such memory is left alone), and callers name only tensors that hardly anybody else
holds: those that are reduced during a backward pass. `MICROPARALLEL_MOVE=0` in the environment leaves everything where
it is.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import weakref
from collections.abc import Mapping

import torch

from microparallel.errors import CommsError
from microparallel.topology import available_memory

VARIABLE = "MICROPARALLEL_MOVE"
_LEAST = 2**20  # bytes; copying less costs next to nothing
_MOST_REGIONS = 256  # that a rank moves in the life of a group: each takes a few descriptors and some address space
_MARGIN = 64 * 2**20  # bytes that are left to everybody else
_FOLDER = "/dev/shm"  # where torch's anonymous files take their memory from
_NEWS = struct.Struct("QQ")  # the region's number and its size; the descriptor comes with it


class OwnRegions:
    """The storages that this rank has moved, each with a number that the peers know it by."""

    def __init__(self, connections: Mapping[int, socket.socket]) -> None:
        self._connections = connections
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._numbers: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        self._count = 0
        self._given_up = os.environ.get(VARIABLE) == "0"

    def find(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """The number of the region that a tensor lies in, and where in it; None when it lies elsewhere."""
        if not self._numbers:
            return None
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage)
        return None if number is None else (number, tensor.data_ptr() - storage.data_ptr())

    def move_what_comes_again(self, tensor: torch.Tensor) -> None:
        """Move a tensor's memory if it is worth it: if it is large, and not here for the first time."""
        storage = tensor.untyped_storage()
        if self._given_up or storage in self._numbers or not _movable(tensor, storage):
            return
        if storage not in self._seen:
            self._seen.add(storage)
        elif self._count == _MOST_REGIONS or not _fits(storage.nbytes()):
            self._given_up = True
        else:
            self._move(storage)

    def _move(self, storage: torch.UntypedStorage) -> None:
        try:
            descriptor, size = storage._share_fd_cpu_()
        except RuntimeError:  # it lies where it was, and is copied each time as before
            self._given_up = True
            return
        self._count += 1
        mapping = mmap.mmap(descriptor, size)
        weakref.finalize(storage, _take_back, mapping).atexit = False
        try:
            for connection in self._connections.values():
                socket.send_fds(connection, [_NEWS.pack(self._count, size)], [descriptor])
        except OSError:  # whoever is gone, or reads nothing, is for others to notice
            self._given_up = True
        else:
            self._numbers[storage] = self._count


class TheirRegions:
    """The storages that a peer has moved, as this rank maps them."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._regions: dict[int, torch.Tensor] = {}

    def bytes_of(self, number: int) -> torch.Tensor:
        """A region's memory; a peer sends news of it before it offers anything there."""
        while number not in self._regions:
            self._read_news()
        return self._regions[number]

    def _read_news(self) -> None:
        try:
            message, descriptors, _, _ = socket.recv_fds(self._connection, _NEWS.size, 1)
        except OSError as error:
            raise CommsError(f"a peer offers memory that it has not handed over: {error}") from error
        if len(message) != _NEWS.size or len(descriptors) != 1:
            raise CommsError("a peer went away while it handed over memory")
        number, size = _NEWS.unpack(message)
        try:
            self._regions[number] = torch.frombuffer(mmap.mmap(descriptors[0], size), dtype=torch.uint8)
        finally:
            os.close(descriptors[0])

    def close(self) -> None:
        """Let go of everything."""
        self._regions.clear()


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
    return size < folder.f_bavail * folder.f_frsize and (memory is None or size < memory - _MARGIN)


def _take_back(mapping: mmap.mmap) -> None:
    """Return a region's memory to the system though peers still map it: nobody will read it again."""
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_REMOVE)
    mapping.close()
