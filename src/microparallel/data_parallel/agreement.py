"""Make sure that all ranks have the same model before its numbers are copied."""

from __future__ import annotations

import hashlib
from itertools import zip_longest

import torch
from torch import nn

from microparallel.comms import Comms
from microparallel.comms.notes import gather_json
from microparallel.errors import UsageError


def require_same_model(model: nn.Module, comms: Comms) -> None:
    """Raise, on every rank alike, if parameters or buffers differ between ranks in name, shape or dtype."""
    mine = describe(model)
    digest = hashlib.sha256("\n".join(mine).encode()).digest()
    digests = comms.all_gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8))
    if all(torch.equal(digests[0], other) for other in digests):
        return
    descriptions: list[list[str]] = gather_json(mine, comms)
    for rank, theirs in enumerate(descriptions):
        for first, other in zip_longest(descriptions[0], theirs, fillvalue="nothing"):
            if first != other:
                raise UsageError(
                    f"the ranks have different models: where rank 0 has {first}, rank {rank} has {other}; "
                    "build the model from the same configuration on every rank"
                )


def describe(model: nn.Module) -> list[str]:
    """A line for every parameter and buffer."""
    return [
        *(
            f"parameter {name} {_content(tensor)}{'' if tensor.requires_grad else ', frozen'}"
            for name, tensor in model.named_parameters()
        ),
        *(f"buffer {name} {_content(tensor)}" for name, tensor in model.named_buffers()),
    ]


def _content(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
