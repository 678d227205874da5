"""Transfers over shared memory that were started: tensors offered to a peer, borrowed from one, or to be received.

`Sent` and `Received` are messages between two ranks. A collective program sends and receives through a
`SharedMemoryExchange`, which reads peers' tensors where they lie (`Lent`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from microparallel.transport.base import COMPLETE, Loan, Work
from microparallel.transport.shared_memory.channel import COPIED, POSTED, SEGMENT, SLOTS, Channel
from microparallel.transport.shared_memory.order import Marks
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
        return COPIED + SEGMENT, self.start

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
        mark: int,
        tensor: torch.Tensor,
        copy: Copy | None,
    ) -> None:
        self._transport = transport
        self._channel = channel
        self._slot = slot
        self._to = to
        self._number = number  # how many messages the channel had before
        self._mark = mark  # the number that GPUs write; 0: none
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
        """Whether the receiver, and its GPU, have read it."""
        return self.taken() and (not self._mark or self._channel.is_read(self._slot, self._mark))

    def wait(self, timeout: float | None = None) -> None:
        """Return when the caller may change the tensor: at once if it was copied, else when it has been read.

        A GPU may change it after what the calling thread's marks say from now on.
        """
        if not self.copied:
            self.wait_until_taken(timeout)
            if self._mark:
                self._transport.order.marks().after(self._channel.read_at(self._slot), self._mark)
        self._tensor = None

    def is_ready(self, marks: Marks, step: int) -> None:
        """When this rank's GPU comes to this place, the receiver's may go a step further."""
        marks.write(self._channel.ready_at(self._slot), self._mark + step)

    def after_reading(self, marks: Marks, step: int) -> None:
        """Let this rank's GPU wait here until the receiver's has done a step."""
        marks.after(self._channel.read_at(self._slot), self._mark + step)

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
    """A peer's tensor, where it lies in the peer's memory.

    Attributes:
        place: in which of the peer's memories it lies, and at which offset.
        size: in bytes.
        copied: whether the peer had to copy it there.
        signature: of the call that it is for.
    """

    __slots__ = ("_channel", "_number", "_slot", "_source", "_transport", "copied", "place", "signature", "size")

    def __init__(self, transport: SharedMemoryTransport, channel: Channel, source: int, slot: int) -> None:
        place, offset, self.size, self.signature = channel.read(slot)
        self.copied = place >= COPIED
        self.place = place % COPIED, offset
        self._transport = transport
        self._channel = channel
        self._source = source
        self._slot = slot
        self._number = channel.number(slot)
        if self._number:
            self.after_ready(transport.order.marks(), 0)
            channel.take(slot)  # the sender's GPU waits for `read`

    def bytes(self) -> torch.Tensor:
        """What lies there."""
        return self._transport.content(self._source, *self.place, self.size)

    def after_ready(self, marks: Marks, step: int) -> None:
        """Let this rank's GPU wait here until the sender's lets it do a step."""
        marks.after(self._channel.ready_at(self._slot), self._number + step)

    def is_read(self, marks: Marks, step: int) -> None:
        """When this rank's GPU comes to this place, it has done a step."""
        marks.write(self._channel.read_at(self._slot), self._number + step)

    def give_back(self) -> None:
        """Tell the peer that it may change its tensor."""
        if self._number:
            self.is_read(self._transport.order.marks(), 0)
        else:
            self._channel.take(self._slot)


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
        self._called = transport.order.here()
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
        self._copied = self._transport.order.here()
        self._complete = True


class ReceivedFromAny:
    """A receive that was started, of the first message that any rank sends."""

    def __init__(self, transport: SharedMemoryTransport, into: torch.Tensor, tag: int) -> None:
        self.source = -1  # the rank that sent it, once it is complete
        self._transport = transport
        self._into = into
        self._tag = tag
        self._called = transport.order.here()
        self._copied: Any = None

    def wait(self, timeout: float | None = None) -> None:
        """Return when the message is in the tensor."""
        if self.source < 0:
            deadline = time.monotonic() + (self._transport.timeout if timeout is None else timeout)
            self._transport.order.join(self._called)
            self.source = self._transport.take_from_any(self._into, self._tag, deadline)
            self._copied = self._transport.order.here()
        self._transport.order.join(self._copied)


# ── exchanges, for collective programs ──────────────────────────────────────────────────────────────────────────────


class CallState:
    """What all messages of one collective call share.

    Attributes:
        text: the call in words.
        number: of the call, among those of this rank in its group.
        signature: a number for both, which each message carries.
        adds_to_sent: whether its program adds to what other ranks may still read.
        at_once: whether its receives may be waited for together: its program is known never to stand still then.
        copied: whether this rank, or one that it has received from, had to copy its tensor.
    """

    def __init__(self, text: str, number: int, signature: int, *, adds_to_sent: bool, at_once: bool) -> None:
        self.text = text
        self.number = number
        self.signature = signature
        self.adds_to_sent = adds_to_sent
        self.at_once = at_once
        self.copied = False


class SharedMemoryExchange:
    """Messages of one call; each carries the call's signature, so that ranks which make different calls notice."""

    def __init__(self, transport: SharedMemoryTransport, call: CallState) -> None:
        self.at_once = transport.at_once and call.at_once
        self._transport = transport
        self._call = call
        self._copies: dict[tuple[int, int], Copy | None] = {}
        transport.let_others_catch_up()

    def isend(self, tensor: torch.Tensor, to: int) -> Work:
        """Offer a tensor; one that must be copied is copied once, for all ranks that it is offered to."""
        place = (tensor.data_ptr(), tensor.numel())
        if place not in self._copies:
            self._copies[place] = self._transport.copy(tensor, self._call.adds_to_sent)
        copy = self._copies[place]
        if copy is not None:
            self._call.copied = True
        sent = self._transport.offer(tensor, to, self._call.signature, copy)
        return COMPLETE if sent.copied else sent

    def lends(self, source: int) -> bool:  # noqa: ARG002
        """It does: a rank reads what it receives where it lies."""
        return True

    def irecv(self, tensor: torch.Tensor, source: int) -> Work:
        """Not for this exchange: whoever wants a copy makes it of what was borrowed."""
        raise NotImplementedError

    def borrow(self, like: torch.Tensor, source: int) -> Loan:
        """Read the tensor that a rank offers where it lies."""
        return Lent(self._transport, like, source, self._call)

    def close(self) -> None:
        """All tensors are offered: from now on only the receivers hold the copies."""
        for copy in self._copies.values():
            if copy is not None:
                copy.let_go()
        self._copies.clear()
        self._transport.order.marks().hand_over()


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

    @property
    def copied(self) -> bool:
        """Whether it is a copy that the peer has made, and does not wait for."""
        return self._borrowed is not None and self._borrowed.copied

    def wait(self, timeout: float | None = None) -> None:
        """Return when the peer has offered its tensor."""
        borrowed = self.come(timeout)
        if borrowed.size:
            self.tensor = borrowed.bytes().view(self.tensor.dtype)

    def come(self, timeout: float | None = None) -> Borrowed:
        """What the peer offers, when it has; `tensor` stays as it is."""
        like = self.tensor
        borrowed = self._transport.borrow(self._source, timeout)
        if borrowed.signature != self._call.signature:
            self._transport.peers.disagree(self._call.number)
        expected = like.numel() * like.element_size()
        if borrowed.size != expected:
            self._transport.peers.disagree(
                self._call.number,
                f"  {self._call.text}: rank {self._source} has {borrowed.size} bytes for rank {self._transport.rank}, "
                f"which expects {expected}",
            )
        if borrowed.copied:
            self._call.copied = True
        self._borrowed = borrowed
        return borrowed

    def keep(self) -> None:
        """Copy the tensor, and tell the peer that it may change its own."""
        self.tensor = self.tensor.clone()
        self.give_back()

    def give_back(self) -> None:
        """Tell the peer that it may change its tensor."""
        if self._borrowed is not None:
            self._borrowed.give_back()
            self._borrowed = None
