"""Memory that several processes share: an anonymous file, mapped by all processes that were given its descriptor.

Each rank makes one such `Segment`; its `Arena` hands out pieces of it for tensors. The file has no name that another
program could guess, and the kernel frees it when the last process that maps it has ended, however it ended. The file is
as large as it may ever become; only pages that are touched take memory.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import threading
from collections import deque

import torch

from microparallel.errors import CommsError
from microparallel.topology import available_memory


class Segment:
    """One mapped file: numbers for control at its beginning, bytes for tensors behind them."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self.map = mmap.mmap(descriptor, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.words = memoryview(self.map).cast("I")  # 32-bit numbers, which a futex can wait on
        self.longs = memoryview(self.map).cast("Q")
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Where in the segment a tensor lies; None when it lies elsewhere."""
        offset = tensor.data_ptr() - self.address
        return offset if 0 <= offset < self.size else None


def create_segment(size: int) -> tuple[int, Segment]:
    """Make a segment; returns the descriptor to hand to the peers, and the segment as this process maps it."""
    descriptor = os.memfd_create("microparallel", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    return descriptor, Segment(descriptor, size)


# ── pieces of a segment ─────────────────────────────────────────────────────────────────────────────────────────────

_LINE = 64  # pieces begin on cache lines of their own
_GIVE_BACK = 32 * 2**20  # larger pieces are returned to the system when they are free, smaller ones kept warm
MARGIN = 64 * 2**20  # bytes of memory that are left to other programs


class Arena:
    """The part of a segment that tensors live in: first fit, and free neighbours are joined. Any thread may call it."""

    def __init__(self, memory: mmap.mmap, start: int, stop: int) -> None:
        self._memory = memory
        self._free = [(start, stop)]  # in order, never adjacent
        self._touched = start  # memory above this was never used
        self._to_free: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()

    def take(self, size: int) -> int:
        """Reserve at least this many bytes, until `give_back`; returns where they begin."""
        size = _rounded(size)
        self._free_what_was_left()
        with self._lock:
            for index, (start, stop) in enumerate(self._free):
                if stop - start >= size:
                    self._require_memory(start + size - self._touched, size)
                    if stop - start == size:
                        del self._free[index]
                    else:
                        self._free[index] = (start + size, stop)
                    self._touched = max(self._touched, start + size)
                    return start
        raise _too_little(size, sum(stop - start for start, stop in self._free))

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
        if size >= _GIVE_BACK:
            page = mmap.PAGESIZE
            first, last = -(-start // page) * page, min(stop, self._touched) // page * page
            if last > first:
                self._memory.madvise(mmap.MADV_REMOVE, first, last - first)

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

    def _require_memory(self, fresh: int, size: int) -> None:
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
