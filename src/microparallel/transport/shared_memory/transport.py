"""Move tensors between ranks of one machine by reading each other's memory.

A send posts where the tensor lies; the receiver copies it, or adds it to its own tensor, straight from there. A tensor
that lies neither in its rank's segment nor in memory that was moved (`regions.py`) is copied into the segment first.

    works.py       transfers that were started: a tensor that was offered, borrowed, or is to be received
    channel.py     the slots in which a sender posts its messages
    futex.py       sleep until a number in shared memory changes
    order.py       in which order ranks read and write a tensor, also on a GPU
    peers.py       which ranks are gone, and which made another call
    call_log.py    the last calls of each rank, to say which one differs
    segment.py     the memory itself, and its pieces
    mapping.py     a part of a file as memory
    regions.py     tensors that were moved to where peers can read them
    rendezvous.py  how the ranks get each other's segments
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from microparallel.errors import CommsError, TransportTimeout
from microparallel.topology import available_cores
from microparallel.transport.shared_memory import futex
from microparallel.transport.shared_memory.channel import CHANNEL_BYTES, COPIED, LANES, POSTED, SEGMENT, SLOTS, Channel
from microparallel.transport.shared_memory.order import HostOrder, Order
from microparallel.transport.shared_memory.peers import STATUS_BYTES, Peers, RankStatus
from microparallel.transport.shared_memory.regions import OwnRegions, TheirRegions
from microparallel.transport.shared_memory.rendezvous import exchange_descriptors
from microparallel.transport.shared_memory.segment import Arena, Segment, create_segment
from microparallel.transport.shared_memory.works import (
    Borrowed,
    CallState,
    Copy,
    PendingReceives,
    Received,
    ReceivedFromAny,
    Sent,
    SharedMemoryExchange,
)

_SPINS = 300  # reads before a thread sleeps, some microseconds; only where every rank has a core
_MOST_STAGED = 64 * 2**20  # bytes of copies for collectives that others have not read
_POLL_INTERVAL = 0.0002  # seconds between two looks at all ranks
_LIVENESS_INTERVAL = 0.05  # seconds of sleep between two looks whether the peer is still there


class SharedMemoryTransport:
    """One rank's connection to the others: its own segment and channels, and those of all other ranks.

    Attributes:
        name: what "auto" is resolved for.
        here: the ranks whose memory this one can reach, itself among them: all, unless a subclass reaches the others
            in another way.
        at_once: whether a rank waits for all messages of an exchange, and then works on all of them: as many calls to a
            device become one. Where the CPU does the work, it better works on one while others are on their way.
    """

    carries = frozenset({"cpu"})
    at_once = False

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_ranks: Sequence[int],
        timeout: float,
        here: Sequence[int] | None = None,
    ) -> None:
        self.name = "shm"
        self.rank = rank
        self.world_ranks = tuple(world_ranks)
        self.world_size = ranks = len(world_ranks)
        self.here = frozenset(range(ranks) if here is None else here)
        self.timeout = timeout
        control = STATUS_BYTES + ranks * LANES * CHANNEL_BYTES
        descriptor, self._segment = create_segment(control)
        try:
            found = exchange_descriptors(store, rank, ranks, sorted(self.here), descriptor, timeout)
        finally:
            os.close(descriptor)
        self._arena = Arena(self._segment)
        self._segments = {rank: self._segment}
        for peer, (_, theirs) in found.items():
            self._segments[peer] = Segment(theirs, control)
            os.close(theirs)
        connections = self._connections = {peer: connection for peer, (connection, _) in found.items()}
        self.peers = Peers(rank, self.world_ranks, self._segments, connections)
        statuses = {member: RankStatus(segment) for member, segment in self._segments.items()}
        self._regions = self._own_regions(connections, statuses[rank])
        self._their_regions = {
            peer: self._regions_of(peer, connection, statuses[peer]) for peer, connection in connections.items()
        }
        self.order: Order = self._make_order()
        self._out = [{peer: _channel(self._segment, peer, lane) for peer in self.here} for lane in range(LANES)]
        self._in = [{peer: _channel(self._segments[peer], rank, lane) for peer in self.here} for lane in range(LANES)]
        self._staged: list[deque[Sent]] = [deque() for _ in range(LANES)]  # copies that may not have been read yet
        self._reclaiming = threading.Lock()  # held by the thread that frees copies
        self._pending: dict[tuple[int, int], PendingReceives] = defaultdict(PendingReceives)  # by source and tag
        self._spins = _SPINS if futex.SPINNING_IS_SAFE and len(self.here) <= available_cores() else 0

    # ── what a transport that reads other memory, too, makes in another way ─────────────────────────────────────

    def _own_regions(self, connections: Mapping[int, socket.socket], status: RankStatus) -> OwnRegions:
        return OwnRegions(connections, status)

    def _regions_of(self, peer: int, connection: socket.socket, status: RankStatus) -> TheirRegions:
        return TheirRegions(peer, connection, status)

    def _make_order(self) -> Order:
        return HostOrder()

    # ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in this rank's segment; its memory is free again when the tensor is gone."""
        size = math.prod(shape) * dtype.itemsize
        start = self._arena.take(size)
        # torch keeps the buffer alive as long as the tensor, or a view of it.
        extent = self._segment.extent_of(start)
        buffer = memoryview(extent.memory)[start - extent.start : start - extent.start + max(1, size)]
        weakref.finalize(buffer, self._arena.leave, start, size)
        return torch.frombuffer(buffer, dtype=torch.uint8)[:size].view(dtype).view(tuple(shape))

    # ── collectives: messages in order ──────────────────────────────────────────────────────────────────────────

    def offer(self, tensor: torch.Tensor, to: int, signature: int = 0, copy: Copy | None = None) -> Sent:
        """Offer a contiguous tensor, or its copy, for a collective; wait for it before you change the tensor."""
        return self._post(0, tensor, to, 0, signature, copy)

    def offer_to(self, tensor: torch.Tensor, ranks: Sequence[int], signature: int) -> dict[int, Sent]:
        """Offer one contiguous tensor to several ranks, for a collective."""
        place = self._place(tensor, None)
        return {to: self._post(0, tensor, to, 0, signature, None, place) for to in ranks}

    def open_exchange(self, call: CallState) -> SharedMemoryExchange:
        """Open an exchange of a collective."""
        return SharedMemoryExchange(self, call)

    def exchange_notices(self) -> None:
        """Send notices of this rank's moved tensors that are gone, and read those of the other ranks."""
        self._regions.announce_gone()
        for regions in self._their_regions.values():
            regions.refresh()

    def move_what_comes_again(self, tensor: torch.Tensor) -> None:
        """Move a large tensor to where peers can read it, if the user asked for that and it was all-reduced before."""
        self._regions.move_what_comes_again(tensor)

    def borrow(self, source: int, timeout: float | None = None) -> Borrowed:
        """Wait for the next tensor that a rank offers, and return it where it lies; the caller gives it back."""
        channel = self._in[0][source]
        number = channel.count
        self._wait_for_post(channel, number, source, timeout)
        channel.count = number + 1
        return Borrowed(self, channel, source, number % SLOTS)

    def content(self, source: int, region: int, offset: int, size: int) -> torch.Tensor:
        """A rank's tensor, where it lies, as bytes."""
        if region == SEGMENT:
            return self._segments[source].view(offset, size)
        return self._their_regions[source].bytes_of(region)[offset : offset + size]

    # ── messages between two ranks, by tag ──────────────────────────────────────────────────────────────────────

    def isend(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Sent:
        """Start sending a contiguous tensor."""
        copy = self._copy_to_offer(tensor, lane=1)
        sent = self._post(1, tensor, to, tag, 0, copy)
        self.order.marks().hand_over()
        if copy is not None:
            copy.let_go()
        return sent

    def irecv(self, tensor: torch.Tensor, source: int, tag: int = 0, *, allow_less: bool = False) -> Received:
        """Start receiving into a contiguous tensor, which may be larger than the message if `allow_less`."""
        pending = self._pending[source, tag]
        received = Received(self, tensor, source, tag, pending, allow_less)
        pending.receives.append(received)
        return received

    def irecv_from_any(self, tensor: torch.Tensor, tag: int = 0) -> ReceivedFromAny:
        """Start receiving into a contiguous tensor the first message that any rank sends."""
        return ReceivedFromAny(self, tensor, tag)

    def take_from_any(self, into: torch.Tensor, tag: int, deadline: float) -> int:
        """Wait for a message with this tag from any rank, and copy it; returns the rank that sent it.

        The tensor may be larger than the message: torch's programs, which alone call this, expect that. A thread cannot
        sleep on several futexes at once, so this one polls the channels of all ranks.
        """
        others = sorted(self.here - {self.rank})
        while True:
            for source in others:
                channel = self._in[1][source]
                with channel.lock:
                    number = channel.find(tag, channel.posted())
                    if number is not None:
                        self._copy_message(channel, number, into, source, allow_less=True)
                        return source
            self.peers.require_any_alive()
            if time.monotonic() > deadline:
                raise TransportTimeout("timed out waiting for a message from any rank")
            time.sleep(_POLL_INTERVAL)

    def take_message(self, into: torch.Tensor, source: int, tag: int, deadline: float, allow_less: bool) -> float:
        """Wait for the next message with this tag, and copy it; returns the time at which it had arrived."""
        channel = self._in[1][source]
        while True:
            with channel.lock:
                seen = channel.posted()
                number = channel.find(tag, seen)
                if number is not None:
                    arrived = time.perf_counter()
                    self._copy_message(channel, number, into, source, allow_less)
                    return arrived
            self._sleep_until_changed(channel.posted_address(), channel.posted, seen, source, deadline)

    def _copy_message(self, channel: Channel, number: int, into: torch.Tensor, source: int, allow_less: bool) -> None:
        slot = number % SLOTS
        place, offset, size, _ = channel.read(slot)
        room = into.numel() * into.element_size()
        fits = size == room or (allow_less and size < room)
        marks, mark = self.order.marks(), channel.number(slot)
        if mark:
            marks.after(channel.ready_at(slot), mark)
            marks.hand_over()
        if fits:
            _as_bytes(into)[:size].copy_(self.content(source, place % COPIED, offset, size))
        if mark:
            marks.write(channel.read_at(slot), mark)
            marks.hand_over()
        channel.take_number(number)
        if not fits:
            raise CommsError(
                f"rank {source} sent {size} bytes, and {room} were expected; send and receive tensors of the same size"
            )

    # ── sending and waiting ─────────────────────────────────────────────────────────────────────────────────────

    def copy(self, tensor: torch.Tensor, adds_to_sent: bool = True) -> Copy | None:  # noqa: ARG002
        """Copy a tensor into the segment for a collective; None if peers can read it where it lies, or it is empty."""
        return None if self._regions.find(tensor) else self._copy_to_offer(tensor, lane=0)

    def _copy_to_offer(self, tensor: torch.Tensor, lane: int) -> Copy | None:
        """A copy of a tensor for the others to read, unless they can read the tensor itself."""
        size = tensor.numel() * tensor.element_size()
        if not size or self._segment.offset_of(tensor) is not None:
            return None
        self._reclaim(lane)
        copy = Copy(self._arena, size)
        self._segment.view(copy.start, size).view(tensor.dtype).copy_(tensor.view(-1))
        return copy

    def let_others_catch_up(self) -> None:
        """Wait while the peers have much to read of earlier rounds: a rank that only broadcasts would fill the memory.

        Peers that are behind need nothing of the round that begins here, so this may be called between two rounds of
        collectives. It must not be called within a round, nor between messages: there, two ranks may both send before
        they receive, and would wait for each other.
        """
        staged = self._staged[0]
        while staged and sum(sent.size for sent in staged) > _MOST_STAGED:
            self.order.marks().hand_over()
            staged[0].wait_until_taken()
            self._reclaim(0)

    def _post(
        self,
        lane: int,
        tensor: torch.Tensor,
        to: int,
        tag: int,
        signature: int,
        copy: Copy | None,
        where: tuple[int, int] | None = None,
    ) -> Sent:
        channel = self._out[lane][to]
        size = tensor.numel() * tensor.element_size()
        place, offset = where or self._place(tensor, copy)
        if copy is not None:
            copy.hold()
        with channel.lock:
            slot = channel.count % SLOTS
            mark = channel.next_number() if self.order.is_kept_for(tensor) else 0
            sent = Sent(self, channel, slot, to, channel.count, mark, tensor, copy)
            if channel.state(slot) == POSTED:  # all slots are in use
                self.wait_until_taken(channel, slot, to, None)
            if mark:
                marks, before = self.order.marks(), channel.number(slot)
                if before and not channel.is_read(slot, before):
                    marks.after(channel.read_at(slot), before)  # else an earlier `ready` might come after this one
                marks.write(channel.ready_at(slot), mark)
            channel.post(tag, place, offset, size, signature, mark)
        if copy is not None:
            self._staged[lane].append(sent)
        return sent

    def _place(self, tensor: torch.Tensor, copy: Copy | None) -> tuple[int, int]:
        """Where the peers find a tensor: in which memory, and at which offset."""
        if copy is not None:
            return copy.place
        offset = self._segment.offset_of(tensor)
        if offset is not None:
            return SEGMENT, offset
        region = self._regions.find(tensor)
        return (SEGMENT, 0) if region is None else region

    def _reclaim(self, lane: int) -> None:
        """Free the copies that the peers have read."""
        staged = self._staged[lane]
        with self._reclaiming:
            while staged and staged[0].settled():
                staged.popleft().let_go()

    def _wait_for_post(self, channel: Channel, number: int, source: int, timeout: float | None) -> None:
        wanted = number % 2**32
        for _ in range(self._spin_count()):
            if channel.posted() != wanted:
                return
        if channel.posted() == wanted:
            deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
            self._sleep_until_changed(channel.posted_address(), channel.posted, wanted, source, deadline)

    def _spin_count(self) -> int:
        """How often to read before sleeping; 0 in a background thread, since the main thread computes meanwhile."""
        return self._spins if threading.current_thread() is threading.main_thread() else 0

    def _sleep_until_changed(
        self, address: int, look: Callable[[], int], seen: int, peer: int, deadline: float
    ) -> None:
        """Sleep until a number is no longer `seen`; raise if the peer is gone, or at the deadline."""
        for _ in range(self._spin_count()):
            if look() != seen:
                return
        while look() == seen:
            futex.wait(address, seen, _LIVENESS_INTERVAL)
            if look() == seen:
                self.peers.require_alive(peer)
                if time.monotonic() > deadline:
                    raise TransportTimeout(f"timed out waiting for rank {peer}")

    def wait_until_taken(self, channel: Channel, slot: int, to: int, timeout: float | None) -> None:
        """Sleep until the receiver has read a message."""
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        self._sleep_until_changed(channel.state_address(slot), lambda: channel.state(slot), POSTED, to, deadline)

    def close(self) -> None:
        """Leave the group. Memory that other ranks still map stays until they unmap it."""
        self.peers.close()
        for staged in self._staged:
            staged.clear()
        self._pending.clear()
        for regions in self._their_regions.values():
            regions.close()


def _channel(segment: Segment, peer: int, lane: int) -> Channel:
    return Channel(segment, STATUS_BYTES + (peer * LANES + lane) * CHANNEL_BYTES)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
