"""Hand out pieces of a segment, and take them back."""

from __future__ import annotations

import bisect
import mmap
import threading
from collections import deque

from microparallel.errors import CommsError
from microparallel.topology import available_memory

_LINE = 64  # pieces begin on cache lines of their own
_GIVE_BACK = 32 * 2**20  # larger pieces are returned to the system when they are free, smaller ones kept warm
MARGIN = 64 * 2**20  # what is left to everybody else


class Arena:
    """The part of a segment that tensors live in: first fit, neighbours joined when they are free."""

    def __init__(self, memory: mmap.mmap, start: int, stop: int) -> None:
        self._memory = memory
        self._free = [(start, stop)]  # in order, never adjacent
        self._touched = start  # memory above this was never used
        self._left: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()

    def take(self, size: int) -> int:
        """Where a piece of at least this many bytes begins; it is the caller's until `give_back`."""
        size = _rounded(size)
        self._take_back_what_was_left()
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
        """Take a piece back."""
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
        """Leave a piece to be taken back soon.

        Python may collect garbage at any moment, in a thread that holds our lock, too. So whatever it calls then must
        not wait for that lock.
        """
        self._left.append((start, size))

    def _take_back_what_was_left(self) -> None:
        while self._left:
            try:
                start, size = self._left.popleft()
            except IndexError:  # another thread has taken it
                return
            self.give_back(start, size)

    def _require_memory(self, fresh: int, size: int) -> None:
        """Pages that are touched for the first time must exist: without them the kernel would end the process."""
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
