"""What a transport promises: start moving a tensor, and let the caller wait until it has arrived."""

from __future__ import annotations

from typing import Protocol

import torch


class Work(Protocol):
    """A transfer under way."""

    def wait(self, timeout: float | None = None) -> None:
        """Return when the transfer is complete.

        Raises:
            TransportTimeout: when `timeout` seconds have passed (None: the transport's own patience).
            PeerGone: when a rank that it needs is gone.
        """


class Complete:
    """Work that was done at once: a message that was copied, say."""

    def poll(self) -> bool:
        """Say so."""
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Return at once."""


COMPLETE = Complete()


class Loan(Protocol):
    """A tensor of another rank to look at: a copy that was received, or the peer's own memory."""

    @property
    def work(self) -> Work:
        """What to wait for before the tensor is there."""

    @property
    def tensor(self) -> torch.Tensor:
        """The other rank's tensor."""

    def keep(self) -> None:
        """Make sure that the tensor stays as it is even if the other rank goes on."""

    def give_back(self) -> None:
        """It is no longer needed: the other rank may change it."""


class Exchange(Protocol):
    """Messages that move together: none of them waits for another one to end.

    On some transports a rank's messages run one after another, and a send ends only when it is received. Two ranks that
    send to each other and then receive would wait for ever, each inside its send. Handed over as one exchange, the send
    and the receive run side by side.
    """

    def isend(self, tensor: torch.Tensor, to: int) -> Work:
        """Add a contiguous tensor to be sent; it starts now, or when the exchange is closed."""

    def irecv(self, tensor: torch.Tensor, source: int) -> Work:
        """Add a contiguous tensor to receive into."""

    def borrow(self, like: torch.Tensor, source: int) -> Loan:
        """Add a tensor to receive that is only looked at, such as one that is added to another."""

    def close(self) -> None:
        """Nothing more comes: whatever has not started yet starts now. Before that, wait for none of it."""


class Transport(Protocol):
    """A way to move tensors between the ranks of one group.

    Messages between two ranks with the same tag arrive in the order they were sent. The tensor belongs to the
    transport until its `Work` has been waited for.
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
    """A tensor on loan, where peers' memory is out of reach: a copy."""

    def __init__(self, exchange: Exchange, like: torch.Tensor, source: int) -> None:
        self.tensor = torch.empty_like(like)
        self.work = exchange.irecv(self.tensor, source)

    def keep(self) -> None:
        """It is a copy."""

    def give_back(self) -> None:
        """The other rank knows already: its message has left."""


class SeparateMessages:
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

    def borrow(self, like: torch.Tensor, source: int) -> Loan:
        """Start receiving a copy."""
        return ReceivedCopy(self, like, source)

    def close(self) -> None:
        """Everything has started already."""
