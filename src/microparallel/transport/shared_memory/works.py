"""Transfers over shared memory that were started: tensors offered to a peer, borrowed from one, or to be received.

`Sent` and `Received` are messages between two ranks. A collective program sends and receives through a
`SharedMemoryExchange`, which reads peers' tensors where they lie (`Lent`) or copies them (`Fetched`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from microparallel.transport.base import COMPLETE, Loan, Work
from microparallel.transport.shared_memory.channel import COPY, POSTED, SLOTS, Channel
from microparallel.transport.shared_memory.order import Order
from microparallel.transport.shared_memory.segment import Arena

if TYPE_CHECKING:
    from microparallel.transport.shared_memory.transport import SharedMemoryTransport


class Copy:
    """A tensor's copy in the segment, with a count of its holders: its maker, and each rank that it was offered to."""

    def __init__(self, arena: Arena, size: int) -> None:
        self.start = arena.take(size)
        self._arena = arena
        self._begin(size)

    def _begin(self, size: int) -> None:
        self.size = size
        self._holders = 1
        self._lock = threading.Lock()

    @property
    def place(self) -> tuple[int, int]:
        """Where the peers find it: in which memory, and at which offset."""
        return COPY, self.start

    def hold(self) -> None:
        """Count one more holder."""
        with self._lock:
            self._holders += 1

    def let_go(self) -> None:
        """Count one holder fewer; without holders the copy's memory is free."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                self._free()

    def _free(self) -> None:
        self._arena.give_back(self.start, self.size)


class Sent:
    """A tensor that was offered to a rank, and that rank may not have read yet."""

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
        """Whether the caller may change the tensor."""
        return self.copied or self.settled()

    def taken(self) -> bool:
        """Whether the receiver has read it: its slot says so, or holds a later message."""
        return self._channel.count - self._number > SLOTS or self._channel.state(self._slot) != POSTED

    def settled(self) -> bool:
        """Whether the receiver, and its device, have read it."""
        if not self.taken():
            return False
        event = self._event_of_taking()
        if event and not self._transport.order.has_read(self._to, event):
            return False
        self._settle()
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Return when the caller may change the tensor: at once if it was copied, else when it has been read."""
        if not self.copied:
            self.wait_until_taken(timeout)
            self._transport.order.before_writing(self._to, self._event_of_taking())
            self._settle()
        self._tensor = None

    def _event_of_taking(self) -> int:
        """The receiver's event; 0 if it has none, or this rank has waited for it."""
        return 0 if self._channel.count - self._number > SLOTS else self._channel.event_of_taking(self._slot)

    def _settle(self) -> None:
        if self._channel.count - self._number <= SLOTS:
            self._channel.settle(self._slot)

    def wait_until_taken(self, timeout: float | None = None) -> None:
        """Return when the receiver has read it."""
        if not self.taken():
            self._transport.wait_until_taken(self._channel, self._slot, self._to, timeout)

    @property
    def size(self) -> int:
        """How many bytes of the segment its copy takes."""
        return 0 if self._copy is None else self._copy.size

    def let_go(self) -> None:
        """The receiver has read the copy: give it up."""
        if self._copy is not None:
            self._copy.let_go()


class Borrowed:
    """A peer's tensor, where it lies in the peer's memory."""

    __slots__ = ("_channel", "_order", "_slot", "bytes", "copied", "signature")

    def __init__(
        self, content: torch.Tensor, copied: bool, signature: int, channel: Channel, slot: int, order: Order
    ) -> None:
        self.bytes = content
        self.copied = copied  # the peer had to copy it there
        self.signature = signature
        self._channel = channel
        self._slot = slot
        self._order = order

    def give_back(self) -> None:
        """Tell the peer that it may change its tensor."""
        slot, channel = self._slot, self._channel
        event = self._order.has_been_read(channel.event(slot))
        channel.take(slot, event)
        if event:
            self._order.free_when(event, lambda: channel.event_of_taking(slot) != event)


class PendingReceives:
    """The receives from one rank with one tag that were started and are not complete, in order."""

    def __init__(self) -> None:
        self.receives: deque[Received] = deque()
        self.lock = threading.Lock()  # held by the thread that completes receives


class Received:
    """A receive that was started. Messages come in order, so waiting for a later one completes the earlier."""

    def __init__(
        self,
        transport: SharedMemoryTransport,
        into: torch.Tensor,
        source: int,
        tag: int,
        pending: PendingReceives,
        allow_less: bool,
    ) -> None:
        self._transport = transport
        self._into = into
        self._allow_less = allow_less  # the message may be smaller than the tensor
        self._source = source
        self._tag = tag
        self._pending = pending
        self._complete = False
        self._called = transport.order.now()
        self._copied: Any = None
        self.arrived = 0.0  # when the message could be copied, by time.perf_counter

    def wait(self, timeout: float | None = None) -> None:
        """Return when the message is in the tensor."""
        deadline = time.monotonic() + (self._transport.timeout if timeout is None else timeout)
        with self._pending.lock:
            while not self._complete:
                first = self._pending.receives.popleft()
                first._take(deadline)
        self._transport.order.join(self._copied)

    def _take(self, deadline: float) -> None:
        self._transport.order.join(self._called)
        self.arrived = self._transport.take_message(self._into, self._source, self._tag, deadline, self._allow_less)
        self._copied = self._transport.order.now()
        self._complete = True


class ReceivedFromAny:
    """A receive that was started, of the first message that any rank sends."""

    def __init__(self, transport: SharedMemoryTransport, into: torch.Tensor, tag: int) -> None:
        self.source = -1  # the rank that sent it, once it is complete
        self._transport = transport
        self._into = into
        self._tag = tag
        self._called = transport.order.now()
        self._copied: Any = None

    def wait(self, timeout: float | None = None) -> None:
        """Return when the message is in the tensor."""
        if self.source < 0:
            deadline = time.monotonic() + (self._transport.timeout if timeout is None else timeout)
            self._transport.order.join(self._called)
            self.source = self._transport.take_from_any(self._into, self._tag, deadline)
            self._copied = self._transport.order.now()
        self._transport.order.join(self._copied)


# ── exchanges, for collective programs ──────────────────────────────────────────────────────────────────────────────


class CallState:
    """What all messages of one collective call share.

    Attributes:
        text: the call in words.
        number: of the call, among those of this rank in its group.
        signature: a number for both, which each message carries.
        copied: whether this rank, or one that it has received from, had to copy its tensor.
    """

    def __init__(self, text: str, number: int, signature: int) -> None:
        self.text = text
        self.number = number
        self.signature = signature
        self.copied = False


class SharedMemoryExchange:
    """Messages of one call; each carries the call's signature, so that ranks which make different calls notice."""

    def __init__(self, transport: SharedMemoryTransport, call: CallState) -> None:
        self._transport = transport
        self._call = call
        self._copies: dict[tuple[int, int], Copy | None] = {}
        transport.let_others_catch_up()

    def isend(self, tensor: torch.Tensor, to: int) -> Work:
        """Offer a tensor; one that must be copied is copied once, for all ranks that it is offered to."""
        place = (tensor.data_ptr(), tensor.numel())
        if place not in self._copies:
            self._copies[place] = self._transport.copy(tensor)
        copy = self._copies[place]
        if copy is not None:
            self._call.copied = True
        sent = self._transport.offer(tensor, to, self._call.signature, copy)
        return COMPLETE if sent.copied else sent

    def irecv(self, tensor: torch.Tensor, source: int) -> Work:
        """Copy the tensor that a rank offers, once `Fetched.wait` is called."""
        return Fetched(self._transport, tensor, source, self._call)

    def borrow(self, like: torch.Tensor, source: int) -> Loan:
        """Read the tensor that a rank offers where it lies."""
        return Lent(self._transport, like, source, self._call)

    def close(self) -> None:
        """All tensors are offered: from now on only the receivers hold the copies."""
        for copy in self._copies.values():
            if copy is not None:
                copy.let_go()
        self._copies.clear()


class Lent:
    """A peer's tensor in the peer's memory; `tensor` is the peer's once `wait` has returned."""

    def __init__(self, transport: SharedMemoryTransport, like: torch.Tensor, source: int, call: CallState) -> None:
        self.tensor = like
        self._transport = transport
        self._source = source
        self._call = call
        self._borrowed: Borrowed | None = None

    @property
    def work(self) -> Lent:
        """The transfer to wait for: this object."""
        return self

    def wait(self, timeout: float | None = None) -> None:
        """Return when the peer has offered its tensor."""
        like = self.tensor
        borrowed = self._transport.borrow(self._source, timeout)
        if borrowed.signature != self._call.signature:
            self._transport.peers.disagree(self._call.number)
        sent, expected = borrowed.bytes.numel(), like.numel() * like.element_size()
        if sent != expected:
            self._transport.peers.disagree(
                self._call.number,
                f"  {self._call.text}: rank {self._source} has {sent} bytes for rank {self._transport.rank}, "
                f"which expects {expected}",
            )
        if borrowed.copied:
            self._call.copied = True
        self.tensor = borrowed.bytes.view(like.dtype) if sent else like
        self._borrowed = borrowed

    def keep(self) -> None:
        """Copy the tensor, and tell the peer that it may change its own."""
        self.tensor = self.tensor.clone()
        self.give_back()

    def give_back(self) -> None:
        """Tell the peer that it may change its tensor."""
        if self._borrowed is not None:
            self._borrowed.give_back()
            self._borrowed = None


class Fetched(Lent):
    """A peer's tensor that `wait` copies into a tensor of this rank."""

    def wait(self, timeout: float | None = None) -> None:
        """Return when the peer's tensor has been copied."""
        mine = self.tensor
        super().wait(timeout)
        mine.copy_(self.tensor)
        self.give_back()
