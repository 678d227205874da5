"""Memory that several processes see: an anonymous file, mapped by all who were handed its descriptor.

It has no name that another program could guess, and the kernel takes it back when the last process that maps it is
gone, however that process ended. The file is as large as it may ever become; only pages that are touched take memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch


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
