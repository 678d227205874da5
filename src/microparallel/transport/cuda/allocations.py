"""GPU memory that ranks read from each other: a handle to each allocation is handed over once, and kept open.

torch keeps many tensors in one allocation of the driver, and a handle is to the whole. So a message says: allocation 7,
from byte 4096 on. The handle travels over the connection between two ranks when a tensor in the allocation is first
offered (`shared_memory/regions.py`: it is memory that a rank has handed over). When torch gives an allocation back to
the driver, the peers are told, and let go of it; until they do, the driver keeps the memory.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping

import torch

from microparallel.errors import CommsError, UsageError
from microparallel.transport.cuda.driver import Allocation, Opened, allocation_at, share, use
from microparallel.transport.shared_memory.peers import RankStatus
from microparallel.transport.shared_memory.regions import OwnRegions, TheirRegions

_LOOK_EVERY = 1.0  # seconds between two looks for allocations that torch has given back


class OwnAllocations(OwnRegions):
    """The allocations in which this rank has offered tensors, each with a number that the peers know it by."""

    def __init__(self, connections: Mapping[int, socket.socket], status: RankStatus, device: torch.device) -> None:
        super().__init__(connections, status)
        self._device = device
        self._numbers: dict[int, int] = {}  # of each allocation that was handed over, by its identity
        self._starts: dict[int, int] = {}  # where it begins, by its identity
        self._next_look = 0.0
        self._handing_over = threading.Lock()  # held by the thread that sends notices: one offers, another looks

    def find(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """The number of the allocation that a tensor lies in, and the offset in it."""
        if not tensor.is_cuda:
            return super().find(tensor)
        if not tensor.numel():
            return None
        address = tensor.data_ptr()
        allocation = allocation_at(address)
        if allocation is None:
            raise CommsError(
                f"a tensor of {tensor.nbytes} bytes on {tensor.device} lies in no allocation of the driver"
            )
        number = self._numbers.get(allocation.identity)
        if number is None:
            if not allocation.can_be_shared:
                raise _not_shareable(tensor)
            with self._handing_over:
                number = self._numbers.get(allocation.identity) or self._hand_over(allocation)
        return number, address - allocation.start

    def _hand_over(self, allocation: Allocation) -> int:
        use(self._device)
        handle = share(allocation.start)
        self._count += 1
        self._send_notice(self._count, allocation.size, [], handle)
        self._starts[allocation.identity] = allocation.start
        self._numbers[allocation.identity] = self._count
        return self._count

    def announce_gone(self) -> None:
        """Let the peers let go of allocations that torch has given back to the driver."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK_EVERY
            self._look()
        with self._handing_over:
            super().announce_gone()

    def _look(self) -> None:
        """Find the allocations that are no more what was handed over."""
        with self._handing_over:
            for identity, start in list(self._starts.items()):
                allocation = allocation_at(start)
                if allocation is None or allocation.identity != identity:
                    self._gone.append(self._numbers.pop(identity))
                    del self._starts[identity]


class TheirAllocations(TheirRegions):
    """The allocations that a peer has handed over, as this rank reads them."""

    def __init__(self, peer: int, connection: socket.socket, status: RankStatus, device: torch.device) -> None:
        super().__init__(peer, connection, status)
        self._device = device
        self._opened: dict[int, Opened] = {}

    def _open(self, number: int, size: int, handle: bytes) -> None:
        use(self._device)
        self._opened[number] = Opened(handle, size, self._device)
        self._regions[number] = self._opened[number].bytes

    def _forget(self, number: int) -> None:
        super()._forget(number)
        if (opened := self._opened.pop(number, None)) is not None:
            use(self._device)
            opened.close()


def _not_shareable(tensor: torch.Tensor) -> UsageError:
    return UsageError(
        f"a tensor of {tensor.nbytes} bytes on {tensor.device} lies in memory that other processes cannot open: "
        "torch was told to use expandable_segments; take that out of PYTORCH_CUDA_ALLOC_CONF (or PYTORCH_ALLOC_CONF), "
        "or choose transport='gloo'"
    )
