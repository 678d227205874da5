"""Give every rank the same model: copy rank 0's parameters and buffers, and check that the ranks agree."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest

import torch
from torch import nn

from microparallel.comms import Comms
from microparallel.comms.wire import gather_json
from microparallel.errors import UsageError
from microparallel.observe import Activity, Observation
from microparallel.program import Broadcast


def replicate(model: nn.Module, comms: Comms) -> None:
    """Copy rank 0's parameters and buffers to all other ranks."""
    for tensor in chain(model.parameters(), model.buffers()):
        comms.broadcast(tensor.data)


def replicas_are_identical(model: nn.Module, comms: Comms) -> bool:
    """Whether every rank holds the same parameters, bit for bit."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    digests = comms.all_gather(torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8))
    return all(torch.equal(digests[0], other) for other in digests)


def require_same_model(model: nn.Module, comms: Comms, *settings: str) -> None:
    """Raise `UsageError`, on every rank, if parameters or buffers differ between ranks in name, shape or dtype.

    Settings that all ranks must have alike are compared, too: "compress=None".
    """
    mine = [*settings, *describe(model)]
    digest = hashlib.sha256("\n".join(mine).encode()).digest()
    digests = comms.all_gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8))
    if all(torch.equal(digests[0], other) for other in digests):
        return
    descriptions: list[list[str]] = gather_json(mine, comms)
    for rank, theirs in enumerate(descriptions):
        for first, other in zip_longest(descriptions[0], theirs, fillvalue="nothing"):
            if first != other and first in descriptions[0][: len(settings)]:
                raise UsageError(f"the ranks have different settings: rank 0 has {first}, and rank {rank} has {other}")
            if first != other:
                raise UsageError(
                    f"the ranks have different models: where rank 0 has {first}, rank {rank} has {other}; "
                    "build the model from the same configuration on every rank"
                )


def describe(model: nn.Module) -> list[str]:
    """A line of text for every parameter and buffer."""
    return [
        *(
            f"parameter {name} {_content(tensor)}{'' if tensor.requires_grad else ', frozen'}"
            for name, tensor in model.named_parameters()
        ),
        *(f"buffer {name} {_content(tensor)}" for name, tensor in model.named_buffers()),
    ]


def _content(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


# ── buffers, such as BatchNorm's running statistics ─────────────────────────────────────────────────────────────────


def filled(buffers: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The buffers that have at least one element."""
    return [buffer for buffer in buffers if buffer.numel()]


def broadcast_buffers(buffers: Iterable[torch.Tensor], comms: Comms, source: int, operation: Broadcast) -> None:
    """Copy the buffers of one rank to all others, in one message for each device; every rank calls this.

    Args:
        buffers: the same on every rank, but for their contents.
        comms: the ranks.
        source: the rank whose buffers all others get.
        operation: the operation of the program that this is; observers are told it once, for all messages.
    """
    with_contents = filled(buffers)
    if not with_contents:
        return
    with Observation(comms.observers, Activity(operation)):
        for device in dict.fromkeys(buffer.device for buffer in with_contents):
            here = [buffer for buffer in with_contents if buffer.device == device]
            _broadcast_together(here, comms, source, operation)


def _broadcast_together(buffers: Sequence[torch.Tensor], comms: Comms, source: int, operation: Broadcast) -> None:
    """Broadcast buffers of one device as bytes in one message: there are many, small and of several dtypes."""
    parts = [buffer.detach().contiguous().reshape(-1).view(torch.uint8) for buffer in buffers]
    together = torch.cat(parts)
    comms.broadcast(together, src=source, operation=operation)
    if source != comms.rank:
        arrived = torch.split(together, [len(part) for part in parts])
        for buffer, part in zip(buffers, arrived, strict=True):
            buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))
