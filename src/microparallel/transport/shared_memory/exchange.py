"""An exchange over shared memory: what a collective program sends, receives and borrows."""

from __future__ import annotations

import functools
import hashlib

import torch

from microparallel.transport.base import COMPLETE, Work
from microparallel.transport.shared_memory.transport import SharedMemoryTransport
from microparallel.transport.shared_memory.works import Borrowed, Copy


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
