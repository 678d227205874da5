"""What is under way over shared memory: a tensor that was offered, one that is looked at, a message to come."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import torch

from microparallel.transport.shared_memory.arena import Arena
from microparallel.transport.shared_memory.mailbox import POSTED, SLOTS, Channel

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
