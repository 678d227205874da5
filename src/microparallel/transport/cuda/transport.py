"""Ranks that share a GPU read each other's tensors there; tensors of the CPU go through shared memory as ever.

It is the transport of shared memory, with the same channels and messages. Three things differ:

    allocations.py   where a tensor lies: in GPU memory to which each rank has a handle
    events.py        when it may be read and written: the GPU runs behind the host, so messages carry events
    driver.py        the calls of CUDA's driver for that

Ranks meet on the host: a rank can wait only for an event that was recorded. But no thread waits for the GPU.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from microparallel.transport.cuda.allocations import OwnAllocations, TheirAllocations
from microparallel.transport.cuda.driver import HANDLE_BYTES
from microparallel.transport.cuda.events import EventOrder, OwnEvents, TheirEvents
from microparallel.transport.shared_memory.channel import LANES, SEGMENT, SLOTS
from microparallel.transport.shared_memory.peers import RankStatus
from microparallel.transport.shared_memory.regions import OwnRegions
from microparallel.transport.shared_memory.transport import SharedMemoryTransport
from microparallel.transport.shared_memory.works import Copy

# A collective's tensor of at most so many bytes is copied, so that its rank may go on and change it: waiting until the
# others have read it costs more than the copy.
_COPIED_BYTES = 8 * 2**20
_LAST_WAIT = 2.0  # seconds for peers to read what was sent to them, before this rank's memory goes


class CudaTransport(SharedMemoryTransport):
    """One rank's connection to the others, all of which use one GPU.

    Args:
        store: where the ranks meet.
        rank: this one.
        world_ranks: the numbers of the group's ranks in the world.
        timeout: seconds that a rank waits for another.
        device: the GPU, as this process numbers it.
    """

    carries = frozenset({"cpu", "cuda"})

    def __init__(
        self, store: dist.Store, rank: int, world_ranks: Sequence[int], timeout: float, *, device: torch.device
    ) -> None:
        self.device = device
        super().__init__(store, rank, world_ranks, timeout)
        self.name = "cuda"

    def _control_bytes(self, ranks: int) -> int:
        """Room for the handles of this rank's events."""
        return _most_events(ranks) * HANDLE_BYTES

    def _own_regions(self, connections: Mapping[int, socket.socket], status: RankStatus) -> OwnAllocations:
        return OwnAllocations(connections, status, self.device)

    def _regions_of(self, peer: int, connection: socket.socket, status: RankStatus) -> TheirAllocations:
        return TheirAllocations(peer, connection, status, self.device)

    def _make_order(self, start: int) -> EventOrder:
        own = OwnEvents(self._segment, start, _most_events(self.world_size), self.device)
        segments = {peer: segment for peer, segment in self._segments.items() if peer != self.rank}
        theirs = {peer: TheirEvents(segment, start, self.device) for peer, segment in segments.items()}
        return EventOrder(own, theirs, self.device)

    def _copy_to_offer(self, tensor: torch.Tensor, lane: int) -> Copy | None:
        """A copy of a message, and of a collective's tensor if it is small."""
        if not tensor.is_cuda:
            return super()._copy_to_offer(tensor, lane)
        if not tensor.numel() or (lane == 0 and tensor.nbytes > _COPIED_BYTES):
            return None
        self._reclaim(lane)
        return DeviceCopy(tensor, self._regions)

    def copy(self, tensor: torch.Tensor) -> Copy | None:
        """Copy a tensor for a collective, if it is small or lies where peers cannot read it."""
        return self._copy_to_offer(tensor, lane=0) if tensor.is_cuda else super().copy(tensor)

    def close(self) -> None:
        """Leave the group: when the others have read what this rank has sent, or are gone."""
        deadline = time.monotonic() + _LAST_WAIT
        if not self._all_is_read(deadline):
            # A stream waits for a rank that is gone, for ever, and to let go of memory is to wait for all streams.
            self._their_regions.clear()
        super().close()

    def _all_is_read(self, deadline: float) -> bool:
        """Wait until the others have read this rank's memory, and this rank what it reads of theirs."""
        try:
            for sent in itertools.chain(*self._staged):
                sent.wait_until_taken(max(0.0, deadline - time.monotonic()))
            end = self.order.now()
            while not (end.passed and all(sent.settled() for sent in itertools.chain(*self._staged))):
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.0005)
        except RuntimeError:  # a rank is gone, or the GPU has failed: this rank has said so before
            return False
        return True


class DeviceCopy(Copy):
    """A tensor's copy in GPU memory."""

    def __init__(self, tensor: torch.Tensor, allocations: OwnRegions) -> None:
        self._memory: torch.Tensor | None = tensor.clone()
        number, offset = allocations.find(self._memory) or (0, 0)
        self._place = SEGMENT + number, offset
        self._begin(tensor.nbytes)

    @property
    def place(self) -> tuple[int, int]:
        """Where the peers find it: in which allocation, and at which offset."""
        return self._place

    def _free(self) -> None:
        self._memory = None


def _most_events(ranks: int) -> int:
    """How many events a rank may need at a time: two for each slot of its channels."""
    return 2 * ranks * LANES * (SLOTS + 1)
