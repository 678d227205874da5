"""Memory that several processes share: an anonymous file, mapped by all processes that were given its descriptor.

Each rank makes one such `Segment`; its `Arena` hands out pieces of it for tensors. The file has no name that another
program could guess, and the kernel frees it when the last process that maps it has ended, however it ended.

    control │ where each extent ends │ extent 0 │ │ extent 1          │ │ …

A segment begins with numbers for control, which all ranks map at once. Bytes for tensors follow in extents. The rank
that owns the segment adds one when its arena is full, as large as all before, and writes down where it ends. A peer
maps an extent when it is first to read a tensor there. So a rank has addresses for what is sent, and not for what might
be: `ulimit -v` counts addresses, whether or not they are used.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import threading
import weakref
from collections import deque

import torch

from microparallel.errors import CommsError
from microparallel.topology import available_memory
from microparallel.topology.limits import limit_behind
from microparallel.transport.shared_memory.mapping import mapped, return_pages

_MOST_EXTENTS = 64  # each is as large as all before, unless addresses are few
_TABLE_BYTES = 8 * _MOST_EXTENTS
_FIRST_EXTENT = 16 * 2**20


class Extent:
    """A part of a segment's file, from byte `start` to byte `stop`, as this process maps it."""

    def __init__(self, descriptor: int, start: int, stop: int) -> None:
        self.start = start
        self.stop = stop
        self.memory = mapped(descriptor, stop - start, start, writable=True)
        self.address = ctypes.addressof(self.memory)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.touched = start  # memory above this was never used


class Segment:
    """One file: numbers for control at its beginning, of which each process knows the size, and then extents."""

    def __init__(self, descriptor: int, control: int) -> None:
        self._descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        self._table = -(-control // 8)
        self._begin = _pages(8 * self._table + _TABLE_BYTES)
        try:
            memory = mapped(self._descriptor, self._begin, writable=True)
        except OSError as error:
            raise _not_mapped(self._begin, error) from error
        self.address = ctypes.addressof(memory)
        self.map = memoryview(memory).cast("B")
        self.words = self.map.cast("I")  # 32-bit numbers, which a futex can wait on
        self.longs = self.map.cast("Q")
        self._extents: list[Extent] = []
        self._mapping = threading.Lock()  # held by the thread that maps an extent

    @property
    def control_bytes(self) -> int:
        """How many bytes from its address on are mapped at once, for control."""
        return self._begin

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Where in the segment a tensor lies; None when it lies elsewhere."""
        address = tensor.data_ptr()
        for extent in self._extents:
            offset = address - extent.address + extent.start
            if extent.start <= offset < extent.stop:
                return offset
        return None

    def extent_of(self, offset: int) -> Extent:
        """The extent that holds the byte at an offset, which is mapped now if it was not."""
        for extent in self._extents:
            if extent.start <= offset < extent.stop:
                return extent
        with self._mapping:
            while not self._extents or self._extents[-1].stop <= offset:
                stop = self.longs[self._table + len(self._extents)]
                if not stop:
                    raise CommsError("a rank offers memory that it has not handed over")
                try:
                    self._map_extent(stop)
                except OSError as error:
                    raise _not_mapped(stop - self._next_start(), error) from error
        return self.extent_of(offset)

    def view(self, offset: int, size: int) -> torch.Tensor:
        """The bytes that begin at an offset."""
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        extent = self.extent_of(offset)
        return extent.bytes[offset - extent.start : offset - extent.start + size]

    def grow(self, size: int) -> Extent:
        """Add an extent with room for at least this many bytes. Only the rank that owns the segment may do so."""
        if len(self._extents) == _MOST_EXTENTS:
            raise CommsError(f"shared memory for {size:,} bytes is needed, and there are {_MOST_EXTENTS} parts already")
        so_far = sum(extent.stop - extent.start for extent in self._extents)
        refused = None
        for room in (max(size, so_far, _FIRST_EXTENT), size):  # the second where few addresses are left
            stop = self._next_start() + _pages(room)
            try:
                os.ftruncate(self._descriptor, stop)
                extent = self._map_extent(stop)
            except OSError as error:
                refused = error
                continue
            self.longs[self._table + len(self._extents) - 1] = stop
            return extent
        raise _not_mapped(size, refused)

    def _map_extent(self, stop: int) -> Extent:
        extent = Extent(self._descriptor, self._next_start(), stop)
        self._extents.append(extent)
        return extent

    def _next_start(self) -> int:
        # A page between two extents keeps their free pieces from being joined: no tensor may lie in both.
        return self._extents[-1].stop + mmap.PAGESIZE if self._extents else self._begin


def create_segment(control: int) -> tuple[int, Segment]:
    """Make a segment; returns the descriptor to hand to the peers, and the segment as this process maps it."""
    descriptor = os.memfd_create("microparallel", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, _pages(8 * -(-control // 8) + _TABLE_BYTES))
        return descriptor, Segment(descriptor, control)
    except BaseException:
        os.close(descriptor)
        raise


def _pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _not_mapped(size: int, error: OSError | None) -> CommsError:
    why = None if error is None else limit_behind(error, f"{size:,} bytes of shared memory")
    return CommsError(why or f"{size:,} bytes of shared memory cannot be mapped: {error}")


# ── pieces of a segment ─────────────────────────────────────────────────────────────────────────────────────────────

_LINE = 64  # pieces begin on cache lines of their own
_GIVE_BACK = 32 * 2**20  # larger pieces are returned to the system when they are free, smaller ones kept warm
MARGIN = 64 * 2**20  # bytes of memory that are left to other programs


class Arena:
    """The part of a segment that tensors live in: first fit, and free neighbours are joined. Any thread may call it."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._free: list[tuple[int, int]] = []  # in order, never adjacent
        self._to_free: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()

    def take(self, size: int) -> int:
        """Reserve at least this many bytes, until `give_back`; returns where they begin."""
        size = _rounded(size)
        self._free_what_was_left()
        with self._lock:
            index, start, stop = self._find(size)
            extent = self._segment.extent_of(start)
            _require_memory(start + size - extent.touched, size)
            if stop - start == size:
                del self._free[index]
            else:
                self._free[index] = (start + size, stop)
            extent.touched = max(extent.touched, start + size)
            return start

    def _find(self, size: int) -> tuple[int, int, int]:
        """A free piece that is large enough: its place in the list, where it begins and where it ends."""
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                return index, start, stop
        _require_memory(size, size)
        extent = self._segment.grow(size)
        self._free.append((extent.start, extent.stop))
        return len(self._free) - 1, extent.start, extent.stop

    def give_back(self, start: int, size: int) -> None:
        """Free a piece that `take` has reserved."""
        size = _rounded(size)
        stop = start + size
        with self._lock:
            index = bisect.bisect(self._free, (start, stop))
            if index < len(self._free) and self._free[index][0] == stop:
                stop = self._free.pop(index)[1]
            if index > 0 and self._free[index - 1][1] == start:
                index -= 1
                start = self._free.pop(index)[0]
            self._free.insert(index, (start, stop))
            if size >= _GIVE_BACK:  # with the lock: another thread that took the piece would lose what it writes there
                extent = self._segment.extent_of(start)
                first, last = _pages(start), min(stop, extent.touched) // mmap.PAGESIZE * mmap.PAGESIZE
                if last > first:
                    return_pages(extent.address + first - extent.start, last - first)

    def leave(self, start: int, size: int) -> None:
        """Let the next `take` free a piece.

        Python's garbage collector calls this, at any moment and in any thread, also in one that holds `_lock`. So this
        must not wait for `_lock`.
        """
        self._to_free.append((start, size))

    def _free_what_was_left(self) -> None:
        while self._to_free:
            try:
                start, size = self._to_free.popleft()
            except IndexError:  # another thread has freed it
                return
            self.give_back(start, size)


def _require_memory(fresh: int, size: int) -> None:
    """Raise if there is no memory for pages that were never touched: the kernel would kill the process."""
    if fresh > 2**20:
        available = available_memory()
        if available is not None and fresh > available - MARGIN:
            raise _too_little(size, max(0, available - MARGIN))


def _rounded(size: int) -> int:
    return max(_LINE, -(-size // _LINE) * _LINE)


def _too_little(size: int, available: int) -> CommsError:
    return CommsError(
        f"shared memory for {size:,} bytes is needed, and {available:,} bytes are available; "
        "send less at once, or choose transport='gloo', which needs none"
    )
