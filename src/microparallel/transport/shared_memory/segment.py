"""Memory that several processes see: an anonymous file, mapped by all who were handed its descriptor.

It has no name that another program could guess, and the kernel takes it back when the last process that maps it is
gone, however that process ended. The file is as large as it may ever become; only pages that are touched take memory.
"""

from __future__ import annotations

import bisect
import ctypes
import json
import mmap
import os
import threading
from collections import deque
from typing import Any

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

    def address_of_word(self, index: int) -> int:
        """Where a 32-bit number lies in this process."""
        return self.address + 4 * index

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Where in the segment a tensor lies; None when it lies elsewhere."""
        offset = tensor.data_ptr() - self.address
        return offset if 0 <= offset < self.size else None


def create(size: int) -> tuple[int, Segment]:
    """Make a segment; returns the descriptor to hand to the peers, and the segment as this process maps it."""
    descriptor = os.memfd_create("microparallel", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    return descriptor, Segment(descriptor, size)


# Hand out pieces of a segment, and take them back.


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


# A rank's last words: at the beginning of its segment, where the others can still read them when it is gone.


STATUS_BYTES = 4096
_WELL, _CLOSED, _FAILED = 0, 1, 2
_TEXT = 64


class Status:
    """How a rank is doing: well, closed, or failed with the reason."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    @property
    def closed(self) -> bool:
        """Whether the rank has left in an orderly way."""
        return self._segment.words[0] == _CLOSED

    @property
    def called(self) -> int:
        """How many collectives the rank has called, modulo 2³²; it may not have run them."""
        return self._segment.words[2]

    def has_called(self, number: int) -> bool:
        """Whether the rank has called the collective of this number."""
        return (self.called - number) % 2**32 < 2**31

    def call(self) -> int:
        """Count one more; returns its number."""
        self._segment.words[2] = number = (self.called + 1) % 2**32
        return number

    @property
    def told(self) -> int:
        """How many pieces of news the rank has sent to all others (`regions.py`), modulo 2³²."""
        return self._segment.words[3]

    def tell(self) -> None:
        """Count one more."""
        self._segment.words[3] = (self.told + 1) % 2**32

    def close(self) -> None:
        """Leave."""
        if self._segment.words[0] == _WELL:
            self._segment.words[0] = _CLOSED

    def fail(self, account: dict[str, Any]) -> None:
        """Leave word of what went wrong; the first word counts."""
        if self._segment.words[0] != _WELL:
            return
        text = json.dumps(account).encode()[: STATUS_BYTES - _TEXT]
        self._segment.map[_TEXT : _TEXT + len(text)] = text
        self._segment.words[1] = len(text)
        self._segment.words[0] = _FAILED

    def account(self) -> dict[str, Any] | None:
        """What went wrong on that rank, if it said so."""
        if self._segment.words[0] != _FAILED:
            return None
        text = self._segment.map[_TEXT : _TEXT + self._segment.words[1]]
        try:
            account = json.loads(text)
        except ValueError:  # cut off, or half-written by a rank that died over it
            return {}
        return account if isinstance(account, dict) else {}
