"""Count the messages and bytes that a rank sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from microparallel.transport.base import Exchange, Loan, Transport, Work


@dataclass
class Counts:
    """How many messages a rank has sent, and how many bytes."""

    messages_sent: int = 0
    bytes_sent: int = 0

    def add(self, tensor: torch.Tensor) -> None:
        """Count one message with this tensor."""
        self.messages_sent += 1
        self.bytes_sent += tensor.nbytes


class CountingTransport:
    """Wraps another transport, and counts the messages and bytes that this rank sends through it.

    Args:
        transport: what moves the tensors.
        counts: where to add them up; several transports may share one.

    Example:
        ```python
        transports = [CountingTransport(transport) for transport in in_process_transports(4)]
        run_in_process(mp.collectives.build("ring", 4), tensors, transports)
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
        """How many bytes this rank has sent."""
        return self.counts.bytes_sent

    def isend(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:
        """Count a message, and start sending it."""
        self.counts.add(tensor)
        return self._transport.isend(tensor, to, tag)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Work:
        """Start receiving; the rank that sends the message counts it."""
        return self._transport.irecv(tensor, source, tag)

    def exchange(self, tag: int = 0) -> CountingExchange:
        """Open an exchange whose sends are counted."""
        return CountingExchange(self._transport.exchange(tag), self.counts)

    def __getattr__(self, name: str) -> Any:
        # Everything else that the wrapped transport can do, such as its own collectives, is not counted.
        return getattr(self._transport, name)


class CountingExchange:
    """Wraps an exchange of another transport, and counts its sends."""

    def __init__(self, exchange: Exchange, counts: Counts) -> None:
        self._exchange = exchange
        self._counts = counts
        self.at_once = exchange.at_once
        self.lends = exchange.lends

    def isend(self, tensor: torch.Tensor, to: int) -> Work:
        """Count a message, and add it to the exchange."""
        self._counts.add(tensor)
        return self._exchange.isend(tensor, to)

    def irecv(self, tensor: torch.Tensor, source: int) -> Work:
        """Add a receive."""
        return self._exchange.irecv(tensor, source)

    def borrow(self, like: torch.Tensor, source: int) -> Loan:
        """Add a receive of a tensor that is only read."""
        return self._exchange.borrow(like, source)

    def close(self) -> None:
        """Start all messages that have not started yet."""
        self._exchange.close()
