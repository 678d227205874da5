"""Move tensors between ranks of one machine by reading each other's memory.

A send tells the receiver where the tensor lies; the receiver copies it, or adds it to its own, straight from there. A
tensor that does not live in its rank's segment, nor in memory that was moved (`regions.py`), is copied there first.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import torch

from microparallel.errors import CommsError, TransportTimeout
from microparallel.topology import available_cores, total_memory
from microparallel.transport.shared_memory import futex
from microparallel.transport.shared_memory.mailbox import CHANNEL_BYTES, COPY, LANES, POSTED, SEGMENT, SLOTS, Channel
from microparallel.transport.shared_memory.meeting import Store, exchange_descriptors
from microparallel.transport.shared_memory.peers import Peers
from microparallel.transport.shared_memory.regions import OwnRegions, TheirRegions
from microparallel.transport.shared_memory.segment import STATUS_BYTES, Arena, Segment, Status, create
from microparallel.transport.shared_memory.works import Borrowed, Copy, Inbox, Received, ReceivedFromAnybody, Sent

_SPINS = 300  # looks before going to sleep, some microseconds; only where every rank has a core
_MOST = 2**38  # bytes of addresses where the machine does not say how much memory it has
_MOST_STAGED = 64 * 2**20  # bytes of copies for collectives that others have not read
_GLANCE = 0.0002  # seconds between two looks at several ranks
_NAP = 0.05  # seconds of sleep before looking whether the peer is still there


class SharedMemoryTransport:
    """One rank's mailboxes in its own segment, and its view of those of all others."""

    carries = frozenset({"cpu"})

    def __init__(self, store: Store, rank: int, world_ranks: Sequence[int], timeout: float) -> None:
        self.rank = rank
        self.world_ranks = tuple(world_ranks)
        self.world_size = ranks = len(world_ranks)
        self.timeout = timeout
        control = -(-(STATUS_BYTES + ranks * LANES * CHANNEL_BYTES) // 4096) * 4096
        size = control + (total_memory() or _MOST)  # of addresses: memory is taken as it is touched
        descriptor, self._segment = create(size)
        try:
            met = exchange_descriptors(store, rank, ranks, descriptor, timeout)
        finally:
            os.close(descriptor)
        self._arena = Arena(self._segment.map, control, size)
        self._segments = {rank: self._segment}
        for peer, (_, theirs) in met.items():
            self._segments[peer] = Segment(theirs, size)
            os.close(theirs)
        connections = {peer: connection for peer, (connection, _) in met.items()}
        self.peers = Peers(rank, self.world_ranks, self._segments, connections)
        statuses = {member: Status(segment) for member, segment in self._segments.items()}
        self._regions = OwnRegions(connections, statuses[rank])
        self._their_regions = {peer: TheirRegions(peer, connections[peer], statuses[peer]) for peer in connections}
        self._out = [[_channel(self._segment, peer, lane) for peer in range(ranks)] for lane in range(LANES)]
        self._in = [[_channel(self._segments[peer], rank, lane) for peer in range(ranks)] for lane in range(LANES)]
        self._staged: list[deque[Sent]] = [deque() for _ in range(LANES)]  # copies that may not have been read yet
        self._reclaiming = threading.Lock()
        self._inboxes: dict[tuple[int, int], Inbox] = defaultdict(Inbox)
        self._spins = _SPINS if futex.SPINNING_IS_SAFE and ranks <= available_cores() else 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in this rank's segment; its memory is free again when the tensor is gone."""
        size = math.prod(shape) * dtype.itemsize
        start = self._arena.take(size)
        # torch holds on to the buffer as long as the tensor, or a view of it, lives.
        buffer = memoryview(self._segment.map)[start : start + max(1, size)]
        weakref.finalize(buffer, self._arena.leave, start, size)
        return torch.frombuffer(buffer, dtype=torch.uint8)[:size].view(dtype).view(tuple(shape))

    # ── collectives: messages in order ──────────────────────────────────────────────────────────────────────────

    def offer(self, tensor: torch.Tensor, to: int, signature: int = 0, copy: Copy | None = None) -> Sent:
        """Offer a contiguous tensor for a collective, or its copy; it must stay as it is until it was waited for."""
        return self._post(0, tensor, to, 0, signature, copy)

    def exchange_news(self) -> None:
        """Learn which moved tensors of the others are gone, and tell which of this rank's are."""
        self._regions.tell_what_is_gone()
        for regions in self._their_regions.values():
            regions.refresh()

    def move_what_comes_again(self, tensor: torch.Tensor) -> None:
        """Move a large tensor to where peers can read it, if the user wants that and collectives have met it before."""
        self._regions.move_what_comes_again(tensor)

    def borrow(self, source: int, timeout: float | None = None) -> Borrowed:
        """Look at the next tensor that a rank offers, where it lies; give it back soon."""
        channel = self._in[0][source]
        number = channel.count
        self._wait_for_post(channel, number, source, timeout)
        slot = number % SLOTS
        place, offset, size, signature = channel.read(slot)
        channel.count = number + 1
        memory = self._segments[source].bytes
        if place > SEGMENT:
            memory = self._their_regions[source].bytes_of(place - SEGMENT)
        return Borrowed(memory[offset : offset + size], place == COPY, signature, channel, slot)

    # ── messages between two ranks, by tag ──────────────────────────────────────────────────────────────────────

    def isend(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Sent:
        """Start sending a contiguous tensor."""
        copy = self._copy_into_segment(tensor, lane=1)
        sent = self._post(1, tensor, to, tag, 0, copy)
        if copy is not None:
            copy.let_go()
        return sent

    def irecv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Received:
        """Start receiving into a contiguous tensor."""
        inbox = self._inboxes[source, tag]
        received = Received(self, tensor, source, tag, inbox)
        inbox.waiting.append(received)
        return received

    def irecv_from_anybody(self, tensor: torch.Tensor, tag: int = 0) -> ReceivedFromAnybody:
        """Start receiving into a contiguous tensor whatever comes first."""
        return ReceivedFromAnybody(self, tensor, tag)

    def take_from_anybody(self, into: torch.Tensor, tag: int, deadline: float) -> int:
        """Wait for a message with this tag from any rank, and copy it; returns who sent it.

        Nobody can sleep on several numbers at once, so this looks round, and rests for a moment in between.
        """
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        while True:
            for source in others:
                channel = self._in[1][source]
                with channel.lock:
                    number = channel.find(tag, channel.posted())
                    if number is not None:
                        self._copy_message(channel, number, into, source)
                        return source
            self.peers.require_any_alive()
            if time.monotonic() > deadline:
                raise TransportTimeout("timed out waiting for a message of any rank")
            time.sleep(_GLANCE)

    def take_message(self, into: torch.Tensor, source: int, tag: int, deadline: float) -> float:
        """Wait for the next message with this tag, and copy it; returns when the waiting was over."""
        channel = self._in[1][source]
        while True:
            with channel.lock:
                seen = channel.posted()
                number = channel.find(tag, seen)
                if number is not None:
                    arrived = time.perf_counter()
                    self._copy_message(channel, number, into, source)
                    return arrived
            self._sleep_until_changed(channel.posted_address(), channel.posted, seen, source, deadline)

    def _copy_message(self, channel: Channel, number: int, into: torch.Tensor, source: int) -> None:
        _, offset, size, _ = channel.read(number % SLOTS)
        room = into.numel() * into.element_size()
        if size == room:
            _as_bytes(into).copy_(self._segments[source].bytes[offset : offset + size])
        channel.take_number(number)
        if size != room:
            raise CommsError(f"rank {source} sent {size} bytes, and {room} were expected; both ends must mean the same")

    # ── sending and waiting ─────────────────────────────────────────────────────────────────────────────────────

    def copy(self, tensor: torch.Tensor) -> Copy | None:
        """Copy a tensor for a collective; None if peers can read it where it lies, or there is nothing in it."""
        return None if self._regions.find(tensor) else self._copy_into_segment(tensor, lane=0)

    def _copy_into_segment(self, tensor: torch.Tensor, lane: int) -> Copy | None:
        size = tensor.numel() * tensor.element_size()
        if not size or self._segment.offset_of(tensor) is not None:
            return None
        self._reclaim(lane)
        copy = Copy(self._arena, size)
        _view(self._segment.bytes, copy.start, tensor).copy_(tensor.view(-1))
        return copy

    def let_others_catch_up(self) -> None:
        """Wait while much of earlier rounds has not been read: a rank that only broadcasts would fill the memory.

        Whoever is behind needs nothing of the round that begins here. So this may be called between rounds of
        collectives, and not within one, nor between messages: there, both may be sending before they receive.
        """
        staged = self._staged[0]
        while staged and sum(sent.size for sent in staged) > _MOST_STAGED:
            staged[0].wait_until_taken()
            self._reclaim(0)

    def _post(self, lane: int, tensor: torch.Tensor, to: int, tag: int, signature: int, copy: Copy | None) -> Sent:
        channel = self._out[lane][to]
        size = tensor.numel() * tensor.element_size()
        place, offset = self._place(tensor, copy)
        if copy is not None:
            copy.hold()
        with channel.lock:
            slot = channel.count % SLOTS
            sent = Sent(self, channel, slot, to, channel.count, tensor, copy)
            if channel.state(slot) == POSTED:  # all slots are in use
                self.wait_until_taken(channel, slot, to, None)
            channel.post(tag, place, offset, size, signature)
        if copy is not None:
            self._staged[lane].append(sent)
        return sent

    def _place(self, tensor: torch.Tensor, copy: Copy | None) -> tuple[int, int]:
        """Where the peers find a tensor: in which memory, and how far from its beginning."""
        if copy is not None:
            return COPY, copy.start
        offset = self._segment.offset_of(tensor)
        if offset is not None:
            return SEGMENT, offset
        region = self._regions.find(tensor)
        return (SEGMENT, 0) if region is None else (SEGMENT + region[0], region[1])

    def _reclaim(self, lane: int) -> None:
        """Take back the copies of tensors that have been read."""
        staged = self._staged[lane]
        with self._reclaiming:
            while staged and staged[0].taken():
                staged.popleft().let_go()

    def _wait_for_post(self, channel: Channel, number: int, source: int, timeout: float | None) -> None:
        wanted = number % 2**32
        for _ in range(self._patience()):
            if channel.posted() != wanted:
                return
        if channel.posted() == wanted:
            deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
            self._sleep_until_changed(channel.posted_address(), channel.posted, wanted, source, deadline)

    def _patience(self) -> int:
        """How often to look before going to sleep: in the background not at all, since somebody computes meanwhile."""
        return self._spins if threading.current_thread() is threading.main_thread() else 0

    def _sleep_until_changed(
        self, address: int, look: Callable[[], int], seen: int, peer: int, deadline: float
    ) -> None:
        """Sleep until a number is no longer what was seen; now and then look whether the peer is still there."""
        for _ in range(self._patience()):
            if look() != seen:
                return
        while look() == seen:
            futex.wait(address, seen, _NAP)
            if look() == seen:
                self.peers.require_alive(peer)
                if time.monotonic() > deadline:
                    raise TransportTimeout(f"timed out waiting for rank {peer}")

    def wait_until_taken(self, channel: Channel, slot: int, to: int, timeout: float | None) -> None:
        """Sleep until a message has been read."""
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        self._sleep_until_changed(channel.state_address(slot), lambda: channel.state(slot), POSTED, to, deadline)

    def close(self) -> None:
        """Leave the group. What the others still read stays where it is until they let go of it."""
        self.peers.close()
        for staged in self._staged:
            staged.clear()
        self._inboxes.clear()
        for regions in self._their_regions.values():
            regions.close()


def _channel(segment: Segment, peer: int, lane: int) -> Channel:
    return Channel(segment, STATUS_BYTES + (peer * LANES + lane) * CHANNEL_BYTES)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _view(memory: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    return memory[offset : offset + like.numel() * like.element_size()].view(like.dtype)
