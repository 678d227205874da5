"""Give all replicas the buffers of one, such as BatchNorm's running statistics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from microparallel.comms import Comms
from microparallel.observe import Activity, Told
from microparallel.program import Broadcast


def filled(buffers: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The buffers that have something in them."""
    return [buffer for buffer in buffers if buffer.numel()]


def broadcast_buffers(buffers: Iterable[torch.Tensor], comms: Comms, source: int, operation: Broadcast) -> None:
    """Copy the buffers of one rank to all others, those of a device in one message; every rank calls this.

    Args:
        buffers: the same on every rank, but for their contents.
        comms: the ranks.
        source: whose buffers all get.
        operation: what this is in the program that the ranks follow, however many messages there are.
    """
    with_contents = filled(buffers)
    if not with_contents:
        return
    with Told(comms.observers, Activity(operation)):
        for device in dict.fromkeys(buffer.device for buffer in with_contents):
            here = [buffer for buffer in with_contents if buffer.device == device]
            _broadcast_together(here, comms, source, operation)


def _broadcast_together(buffers: Sequence[torch.Tensor], comms: Comms, source: int, operation: Broadcast) -> None:
    """In one message, as bytes: buffers are many, small and of several dtypes."""
    parts = [buffer.detach().contiguous().reshape(-1).view(torch.uint8) for buffer in buffers]
    together = torch.cat(parts)
    comms.broadcast(together, src=source, operation=operation)
    if source != comms.rank:
        arrived = torch.split(together, [len(part) for part in parts])
        for buffer, part in zip(buffers, arrived, strict=True):
            buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))
