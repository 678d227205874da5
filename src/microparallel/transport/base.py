"""What every transport can do: start moving a tensor, and let the caller wait until it has arrived.

`Transport` is one rank's connection to the other ranks of a group, `Work` a transfer that was started, and `Exchange`
several messages that are started together.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch


class Work(Protocol):
    """A transfer that was started."""

    def wait(self, timeout: float | None = None) -> None:
        """Return when the transfer is complete.

        Raises:
            TransportTimeout: when `timeout` seconds have passed (None: the transport's own timeout).
            PeerGone: when a rank that the transfer needs is gone.
        """


class Complete:
    """Work that was complete when it was returned, such as a send that copied its message."""

    def poll(self) -> bool:
        """Whether the transfer is complete: always."""
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Return at once."""


COMPLETE = Complete()


class Together:
    """Several transfers as one work."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def poll(self) -> bool:
        """Whether all are complete; each of them must be work that can be polled."""
        return all(work.poll() for work in self._works)  # type: ignore[attr-defined]

    def wait(self, timeout: float | None = None) -> None:
        """Return when all are complete."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for work in self._works:
            work.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def __str__(self) -> str:
        return " and ".join(map(str, self._works))


def together(works: Sequence[Work]) -> Iterator[Work]:
    """Several transfers as one work to wait for; nothing if there are none."""
    if works:
        yield works[0] if len(works) == 1 else Together(works)


class Loan(Protocol):
    """A tensor of another rank that this rank only reads: a copy that was received, or the peer's own memory."""

    @property
    def work(self) -> Work:
        """The transfer to wait for before `tensor` is read."""

    @property
    def tensor(self) -> torch.Tensor:
        """The other rank's tensor."""

    @property
    def copied(self) -> bool:
        """Whether the other rank goes on without waiting for this loan; known when `work` is complete."""

    def keep(self) -> None:
        """Copy the tensor, unless it is a copy, so that it stays as it is when the other rank goes on."""

    def give_back(self) -> None:
        """Tell the other rank that it may change its tensor."""


class Exchange(Protocol):
    """Messages that move together: none of them waits for another one to end.

    On some transports a rank's messages run one after another, and a send ends only when it is received. Two ranks that
    send to each other and then receive would wait for ever, each inside its send. Handed over as one exchange, the send
    and the receive run side by side.

    Attributes:
        at_once: whether its receives are to be waited for together, before anything is done with one of them.
    """

    @property
    def at_once(self) -> bool:
        """As above."""

    def lends(self, source: int) -> bool:
        """Whether what is borrowed from this rank lies in its memory; else it is received, and costs room."""

    def isend(self, tensor: torch.Tensor, to: int) -> Work:
        """Add a contiguous tensor to be sent; it starts now, or when the exchange is closed."""

    def irecv(self, tensor: torch.Tensor, source: int) -> Work:
        """Add a contiguous tensor to receive into."""

    def borrow(self, like: torch.Tensor, source: int) -> Loan:
        """Add a receive of a tensor that is only read, such as one that is added to another."""

    def close(self) -> None:
        """Start all messages that have not started yet. No message may be waited for before this call."""


class Transport(Protocol):
    """One rank's connection to the other ranks of a group.

    Messages between two ranks with the same tag arrive in the order they were sent. The caller must not change a tensor
    that it has handed over before it has waited for the tensor's `Work`.
    """

    @property
    def rank(self) -> int:
        """The number of this rank in the group."""

    @property
    def world_size(self) -> int:
        """How many ranks the group has."""

    def isend(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:
        """Start sending a contiguous tensor."""

    def irecv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Work:
        """Start receiving into a contiguous tensor."""

    def exchange(self, tag: int = 0) -> Exchange:
        """Open an exchange, to which messages are added."""


class ReceivedCopy:
    """The loan of a transport that cannot read its peers' memory: a copy that was received."""

    copied = True

    def __init__(self, exchange: Exchange, like: torch.Tensor, source: int) -> None:
        self.tensor = torch.empty_like(like)
        self.work = exchange.irecv(self.tensor, source)

    def keep(self) -> None:
        """Nothing to do: the tensor is a copy already."""

    def give_back(self) -> None:
        """Nothing to do: the other rank sent the copy, and does not wait for it."""


class Receiving(Exchange):
    """An exchange of a transport that cannot read its peers' memory: what is borrowed is received."""

    at_once = False

    def lends(self, source: int) -> bool:  # noqa: ARG002
        """It does not."""
        return False

    def borrow(self, like: torch.Tensor, source: int) -> Loan:
        """Add a receive of a copy."""
        return ReceivedCopy(self, like, source)


class SeparateMessages(Receiving):
    """The exchange of a transport whose messages never wait for each other: each starts at once, by itself."""

    def __init__(self, transport: Transport, tag: int) -> None:
        self._transport = transport
        self._tag = tag

    def isend(self, tensor: torch.Tensor, to: int) -> Work:
        """Start sending."""
        return self._transport.isend(tensor, to, self._tag)

    def irecv(self, tensor: torch.Tensor, source: int) -> Work:
        """Start receiving."""
        return self._transport.irecv(tensor, source, self._tag)

    def close(self) -> None:
        """Nothing to do: every message has started already."""
