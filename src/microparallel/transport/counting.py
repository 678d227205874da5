"""Count what a rank puts on the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from microparallel.transport.base import Exchange, Loan, Transport, Work


@dataclass
class Counts:
    """What a rank has sent."""

    messages_sent: int = 0
    bytes_sent: int = 0

    def add(self, tensor: torch.Tensor) -> None:
        """Note that a tensor is being sent."""
        self.messages_sent += 1
        self.bytes_sent += tensor.nbytes


class CountingTransport:
    """Another transport, with a count of the messages and the bytes that this rank sends through it.

    Args:
        transport: what moves the tensors.
        counts: what to add to; several transports may have one.

    Example:
        ```python
        transports = [CountingTransport(transport) for transport in in_process_transports(4)]
        mp.run_in_process(mp.collectives.build("ring", 4), tensors, transports)
        print([transport.bytes_sent for transport in transports])
        ```
    """

    def __init__(self, transport: Transport, counts: Counts | None = None) -> None:
        self.rank = transport.rank
        self.world_size = transport.world_size
        self.counts = Counts() if counts is None else counts
        self._transport = transport

    @property
    def messages_sent(self) -> int:
        """How many messages this rank has sent."""
        return self.counts.messages_sent

    @property
    def bytes_sent(self) -> int:
        """How many bytes it has sent."""
        return self.counts.bytes_sent

    def isend(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:
        """Count a message, and start sending it."""
        self.counts.add(tensor)
        return self._transport.isend(tensor, to, tag)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Work:
        """Start receiving; its sender counts the message."""
        return self._transport.irecv(tensor, source, tag)

    def exchange(self, tag: int = 0) -> CountingExchange:
        """Open an exchange whose sends are counted."""
        return CountingExchange(self._transport.exchange(tag), self.counts)

    def __getattr__(self, name: str) -> Any:
        # Whatever else a transport can do, such as collectives of its own, passes uncounted.
        return getattr(self._transport, name)


class CountingExchange:
    """An exchange of another transport, whose sends are counted."""

    def __init__(self, exchange: Exchange, counts: Counts) -> None:
        self._exchange = exchange
        self._counts = counts

    def isend(self, tensor: torch.Tensor, to: int) -> Work:
        """Count a message, and add it."""
        self._counts.add(tensor)
        return self._exchange.isend(tensor, to)

    def irecv(self, tensor: torch.Tensor, source: int) -> Work:
        """Add a receive."""
        return self._exchange.irecv(tensor, source)

    def borrow(self, like: torch.Tensor, source: int) -> Loan:
        """Add a receive of something to look at."""
        return self._exchange.borrow(like, source)

    def close(self) -> None:
        """Nothing more comes."""
        self._exchange.close()
