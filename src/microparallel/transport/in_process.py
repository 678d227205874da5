"""Move tensors between ranks that live in one process: for learning, for tests, and for several GPUs in one program."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

import torch

from microparallel.errors import CommsError


@dataclass
class Channels:
    """What has been sent and not yet received, for each (sender, receiver, tag)."""

    messages: dict[tuple[int, int, int], deque[torch.Tensor]] = field(default_factory=lambda: defaultdict(deque))


class Sent:
    """A send is complete at once: the message is a copy."""

    done = True

    def wait(self, timeout: float | None = None) -> None:
        """Return at once."""


class Awaited:
    """A receive that is complete when its message has been sent."""

    def __init__(self, tensor: torch.Tensor, messages: deque[torch.Tensor]) -> None:
        self._tensor = tensor
        self._messages = messages
        self.done = False

    def poll(self) -> bool:
        """Take the message if it is there."""
        if not self.done and self._messages:
            self._tensor.copy_(self._messages.popleft())
            self.done = True
        return self.done

    def wait(self, timeout: float | None = None) -> None:  # noqa: ARG002
        """Take the message; nobody else runs while this rank waits, so it must be there."""
        if not self.poll():
            raise CommsError("a rank in one process waited for a message that had not been sent")


class InProcessTransport:
    """One rank's end of channels that all ranks of the process share."""

    def __init__(self, rank: int, world_size: int, channels: Channels) -> None:
        self.rank = rank
        self.world_size = world_size
        self._channels = channels

    def isend(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Sent:
        """Send a copy."""
        self._channels.messages[self.rank, to, tag].append(tensor.clone())
        return Sent()

    def irecv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Awaited:
        """Receive into a tensor, on whatever device it is."""
        return Awaited(tensor, self._channels.messages[source, self.rank, tag])
