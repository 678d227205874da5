"""What a transport promises: start moving a tensor, and let the caller wait until it has arrived."""

from __future__ import annotations

from typing import Protocol

import torch


class Work(Protocol):
    """A transfer under way."""

    def wait(self, timeout: float | None = None) -> None:
        """Return when the transfer is complete; raise when it failed or `timeout` seconds have passed."""


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
