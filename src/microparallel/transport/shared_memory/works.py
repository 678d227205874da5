"""What is under way over shared memory: a tensor that was offered, one that is looked at, a message to come."""

from __future__ import annotations

import functools
import hashlib
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import torch

from microparallel.transport.base import COMPLETE, Work
from microparallel.transport.shared_memory.mailbox import POSTED, SLOTS, Channel
from microparallel.transport.shared_memory.segment import Arena

if TYPE_CHECKING:
    from microparallel.transport.shared_memory.transport import SharedMemoryTransport


class Copy:
    """A tensor's copy in the segment: free again when nobody holds it, its maker or whoever was offered it."""

    def __init__(self, arena: Arena, size: int) -> None:
        self.start = arena.take(size)
        self.size = size
        self._arena = arena
        self._holders = 1
        self._lock = threading.Lock()

    def hold(self) -> None:
        """One more needs it."""
        with self._lock:
            self._holders += 1

    def let_go(self) -> None:
        """One fewer needs it."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                self._arena.give_back(self.start, self.size)


class Sent:
    """A tensor that was offered to a rank."""

    def __init__(
        self,
        transport: SharedMemoryTransport,
        channel: Channel,
        slot: int,
        to: int,
        number: int,
        tensor: torch.Tensor,
        copy: Copy | None,
    ) -> None:
        self._transport = transport
        self._channel = channel
        self._slot = slot
        self._to = to
        self._number = number
        self.copied = copy is not None or not tensor.numel()
        self._tensor = None if self.copied else tensor
        self._copy = copy

    def poll(self) -> bool:
        """Whether the tensor may be changed."""
        return self.copied or self.taken()

    def taken(self) -> bool:
        """Whether it has been read: its slot says so, or serves a later message."""
        return self._channel.count - self._number > SLOTS or self._channel.state(self._slot) != POSTED

    def wait(self, timeout: float | None = None) -> None:
        """Return when the tensor may be changed: when it was copied, at once, else when it has been read."""
        if not self.copied:
            self.wait_until_taken(timeout)
        self._tensor = None

    def wait_until_taken(self, timeout: float | None = None) -> None:
        """Return when it has been read."""
        if not self.taken():
            self._transport.wait_until_taken(self._channel, self._slot, self._to, timeout)

    @property
    def size(self) -> int:
        """How many bytes of the segment it takes."""
        return 0 if self._copy is None else self._copy.size

    def let_go(self) -> None:
        """The copy has been read."""
        if self._copy is not None:
            self._copy.let_go()


class Borrowed:
    """A peer's tensor, where it lies in the peer's memory."""

    __slots__ = ("_channel", "_slot", "bytes", "copied", "signature")

    def __init__(self, content: torch.Tensor, copied: bool, signature: int, channel: Channel, slot: int) -> None:
        self.bytes = content
        self.copied = copied  # the peer had to copy it there
        self.signature = signature
        self._channel = channel
        self._slot = slot

    def give_back(self) -> None:
        """Tell the peer that it may change its tensor."""
        self._channel.take(self._slot)


class Inbox:
    """The receives from one rank with one tag that have been called for and not completed, in order."""

    def __init__(self) -> None:
        self.waiting: deque[Received] = deque()
        self.lock = threading.Lock()


class Received:
    """A message to come. Messages of one sender arrive in order, so waiting for a later one takes the earlier first."""

    def __init__(
        self, transport: SharedMemoryTransport, into: torch.Tensor, source: int, tag: int, inbox: Inbox
    ) -> None:
        self._transport = transport
        self._into = into
        self._source = source
        self._tag = tag
        self._inbox = inbox
        self._complete = False
        self.arrived = 0.0  # when it was there to be copied, by time.perf_counter

    def wait(self, timeout: float | None = None) -> None:
        """Return when the message is in the tensor."""
        deadline = time.monotonic() + (self._transport.timeout if timeout is None else timeout)
        with self._inbox.lock:
            while not self._complete:
                first = self._inbox.waiting.popleft()
                first.arrived = self._transport.take_message(first._into, first._source, first._tag, deadline)
                first._complete = True


class ReceivedFromAnybody:
    """A message to come, from whoever sends first."""

    def __init__(self, transport: SharedMemoryTransport, into: torch.Tensor, tag: int) -> None:
        self.source = -1  # who it was, once it is here
        self._transport = transport
        self._into = into
        self._tag = tag

    def wait(self, timeout: float | None = None) -> None:
        """Return when the message is in the tensor."""
        if self.source < 0:
            deadline = time.monotonic() + (self._transport.timeout if timeout is None else timeout)
            self.source = self._transport.take_from_anybody(self._into, self._tag, deadline)


# An exchange over shared memory: what a collective program sends, receives and borrows.


@functools.lru_cache(maxsize=4096)
def signature_of(call: str) -> int:
    """A number that stands for a call, the same in every process."""
    return int.from_bytes(hashlib.blake2b(call.encode(), digest_size=8).digest(), "little")


class Conduct:
    """What a call's messages have in common, and what was seen of them."""

    def __init__(self, call: str) -> None:
        self.signature = signature_of(call)
        self.copied = False  # whether this rank, or one that it heard from, had to copy its tensor


class SharedMemoryExchange:
    """Messages of one call; each carries the call's signature, so that ranks which mean different ones notice."""

    def __init__(self, transport: SharedMemoryTransport, conduct: Conduct) -> None:
        self._transport = transport
        self._conduct = conduct
        self._copies: dict[tuple[int, int], Copy | None] = {}
        transport.let_others_catch_up()

    def isend(self, tensor: torch.Tensor, to: int) -> Work:
        """Offer a tensor; one that must be copied is copied once, for all who are offered it."""
        place = (tensor.data_ptr(), tensor.numel())
        if place not in self._copies:
            self._copies[place] = self._transport.copy(tensor)
        copy = self._copies[place]
        if copy is not None:
            self._conduct.copied = True
        sent = self._transport.offer(tensor, to, self._conduct.signature, copy)
        return COMPLETE if sent.copied else sent

    def irecv(self, tensor: torch.Tensor, source: int) -> Fetched:
        """Copy what a rank offers, when that is waited for."""
        return Fetched(self._transport, tensor, source, self._conduct)

    def borrow(self, like: torch.Tensor, source: int) -> Lent:
        """Look at what a rank offers, where it lies."""
        return Lent(self._transport, like, source, self._conduct)

    def close(self) -> None:
        """Offers are out already; copies are theirs now."""
        for copy in self._copies.values():
            if copy is not None:
                copy.let_go()
        self._copies.clear()


class Lent:
    """A peer's tensor, in the peer's memory, from the moment that it was waited for."""

    def __init__(self, transport: SharedMemoryTransport, like: torch.Tensor, source: int, conduct: Conduct) -> None:
        self.tensor = like
        self._transport = transport
        self._source = source
        self._conduct = conduct
        self._borrowed: Borrowed | None = None

    @property
    def work(self) -> Lent:
        """Itself is what to wait for."""
        return self

    def wait(self, timeout: float | None = None) -> None:
        """Return when the peer has offered its tensor."""
        like = self.tensor
        borrowed = self._transport.borrow(self._source, timeout)
        same_size = borrowed.bytes.numel() == like.numel() * like.element_size()
        if borrowed.signature != self._conduct.signature or not same_size:
            self._transport.peers.disagree(borrowed.signature, self._source)
        if borrowed.copied:
            self._conduct.copied = True
        self.tensor = borrowed.bytes.view(like.dtype)
        self._borrowed = borrowed

    def keep(self) -> None:
        """Copy it, and let the peer go on."""
        self.tensor = self.tensor.clone()
        self.give_back()

    def give_back(self) -> None:
        """The peer may change its tensor."""
        if self._borrowed is not None:
            self._borrowed.give_back()
            self._borrowed = None


class Fetched(Lent):
    """A peer's tensor that is copied when it is waited for."""

    def wait(self, timeout: float | None = None) -> None:
        """Return when the copy is there."""
        mine = self.tensor
        super().wait(timeout)
        mine.copy_(self.tensor)
        self.give_back()
