"""Move tensors between ranks that live in one process: for learning, for tests, and for several GPUs in one program."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Protocol

import torch

from microparallel.errors import TransportTimeout
from microparallel.transport.base import COMPLETE, Complete, SeparateMessages, Work


class Pollable(Work, Protocol):
    """Work that can be asked whether it is complete: a rank that shares its thread with others never waits."""

    def poll(self) -> bool:
        """Complete the transfer if that is possible now, and say whether it is complete."""


@dataclass
class Channels:
    """The messages that were sent and not yet received, for each (sender, receiver, tag)."""

    messages: dict[tuple[int, int, int], deque[torch.Tensor]] = field(default_factory=lambda: defaultdict(deque))


class PendingReceive:
    """A receive that is complete when its message has been sent."""

    def __init__(self, tensor: torch.Tensor, messages: deque[torch.Tensor], description: str) -> None:
        self._tensor = tensor
        self._messages = messages
        self._description = description
        self._done = False

    def poll(self) -> bool:
        """Take the message if it has been sent, and say whether this receive is complete."""
        if not self._done and self._messages:
            self._tensor.copy_(self._messages.popleft())
            self._done = True
        return self._done

    def wait(self, timeout: float | None = None) -> None:  # noqa: ARG002
        """Take the message. No other rank runs while this one waits, so the message must have been sent before."""
        if not self.poll():
            raise TransportTimeout(f"{self}, and it has not been sent")

    def __str__(self) -> str:
        return self._description


class InProcessTransport:
    """One rank's end of channels that all ranks of the process share."""

    def __init__(self, rank: int, world_size: int, channels: Channels) -> None:
        self.rank = rank
        self.world_size = world_size
        self._channels = channels

    def isend(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Complete:
        """Send a copy of the tensor."""
        self._channels.messages[self.rank, to, tag].append(tensor.clone())
        return COMPLETE

    def irecv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> PendingReceive:
        """Start receiving into a tensor, which may be on any device."""
        description = f"rank {self.rank} waits for a message from rank {source}"
        return PendingReceive(tensor, self._channels.messages[source, self.rank, tag], description)

    def exchange(self, tag: int = 0) -> SeparateMessages:
        """Open an exchange; each send is a copy that waits for no receiver, so its messages start one by one."""
        return SeparateMessages(self, tag)


def in_process_transports(ranks: int) -> list[InProcessTransport]:
    """One transport for each rank of this process."""
    channels = Channels()
    return [InProcessTransport(rank, ranks, channels) for rank in range(ranks)]
