"""Ranks that share a GPU read each other's tensors there; tensors of the CPU go through shared memory as ever.

It is the transport of shared memory, with the same channels and messages. Three things differ:

    allocations.py   where a tensor lies: in GPU memory to which each rank has a handle
    marks.py         when it may be read and written: the GPU runs behind the host, so streams wait for each other
    driver.py        the calls of CUDA's driver for that

Ranks meet on the host, to say where a tensor lies. No thread waits for the GPU.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import threading
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from microparallel.transport.cuda import driver
from microparallel.transport.cuda.allocations import OwnAllocations, TheirAllocations
from microparallel.transport.cuda.marks import StreamOrder
from microparallel.transport.shared_memory.channel import COPIED, LANES
from microparallel.transport.shared_memory.peers import RankStatus
from microparallel.transport.shared_memory.regions import OwnRegions
from microparallel.transport.shared_memory.transport import SharedMemoryTransport
from microparallel.transport.shared_memory.works import Copy

# A collective's tensor of at most so many bytes is copied, so that its rank may go on and change it: waiting until the
# others have read it costs more than the copy.
_COPIED_BYTES = 8 * 2**20
_AGAIN = 0.05  # seconds until what a dead rank's GPU may still have written is written over again
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
    at_once = True

    def __init__(
        self, store: dist.Store, rank: int, world_ranks: Sequence[int], timeout: float, *, device: torch.device
    ) -> None:
        self.device = device
        self._registered: list[int] = []
        self._closed = os.eventfd(0)
        super().__init__(store, rank, world_ranks, timeout)
        self.name = "cuda"
        driver.use(device)
        for segment in self._segments.values():
            there = driver.register(segment.address, segment.control_bytes)
            self._registered.append(segment.address)
            for channel in itertools.chain(*(channels.values() for channels in (*self._out, *self._in))):
                channel.lies_at(segment, there)
        self._watch = threading.Thread(
            target=self._release_for_those_who_die, name="microparallel peers of the GPU", daemon=True
        )
        self._watch.start()

    def _own_regions(self, connections: Mapping[int, socket.socket], status: RankStatus) -> OwnAllocations:
        return OwnAllocations(connections, status, self.device)

    def _regions_of(self, peer: int, connection: socket.socket, status: RankStatus) -> TheirAllocations:
        return TheirAllocations(peer, connection, status, self.device)

    def _make_order(self) -> StreamOrder:
        return StreamOrder(self.device)

    def _copy_to_offer(self, tensor: torch.Tensor, lane: int) -> Copy | None:
        """A copy of a message, so that its rank may go on."""
        if not tensor.is_cuda:
            return super()._copy_to_offer(tensor, lane)
        if not tensor.numel():
            return None
        self._reclaim(lane)
        return DeviceCopy(tensor, self._regions)

    def copy(self, tensor: torch.Tensor, adds_to_sent: bool = True) -> Copy | None:
        """Copy a tensor of a collective if its program adds to it while others read it, and it is not large."""
        if not tensor.is_cuda:
            return super().copy(tensor, adds_to_sent)
        return self._copy_to_offer(tensor, lane=0) if adds_to_sent and tensor.nbytes <= _COPIED_BYTES else None

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _release_for_those_who_die(self) -> None:
        """In a thread: when a rank dies, let this rank's GPU go on that waits for it.

        What the GPU computes then is wrong, and no call of this group will say that it was right: the next one fails.
        But a thread that waits for the GPU comes back.
        """
        ends = select.poll()
        ranks = {connection.fileno(): rank for rank, connection in self._connections.items()}
        for descriptor in ranks:
            ends.register(descriptor, select.POLLRDHUP)
        ends.register(self._closed, select.POLLIN)
        while True:
            for descriptor, _ in ends.poll():
                if descriptor == self._closed:
                    return
                rank = ranks[descriptor]
                if self.peers.has_closed(rank):
                    ends.unregister(descriptor)
                else:  # again and again: what its GPU had to do may not have ended yet
                    self._release(rank)
                    time.sleep(_AGAIN)

    def _release(self, rank: int) -> None:
        for lane in range(LANES):
            self._out[lane][rank].release()
            self._in[lane][rank].release()

    def close(self) -> None:
        """Leave the group: when the others have read what this rank has sent, or are gone."""
        everything_read = self._all_is_read(time.monotonic() + _LAST_WAIT)
        if not everything_read:
            # To let go of memory is to wait for all streams, and one may wait for a rank that never comes.
            self._their_regions.clear()
        os.eventfd_write(self._closed, 1)
        self._watch.join()
        os.close(self._closed)
        super().close()
        if everything_read:
            for address in self._registered:
                driver.unregister(address)

    def _all_is_read(self, deadline: float) -> bool:
        """Wait until the others have read this rank's memory, and this rank what it reads of theirs."""
        try:
            for sent in itertools.chain(*self._staged):
                sent.wait_until_taken(max(0.0, deadline - time.monotonic()))
            end = self.order.here().mark()
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
        self._place = COPIED + number, offset
        self._begin(tensor.nbytes)

    @property
    def place(self) -> tuple[int, int]:
        """Where the peers find it: in which allocation, and at which offset."""
        return self._place

    def _free(self) -> None:
        self._memory = None
