"""Make every rank's model the same."""

from __future__ import annotations

import hashlib
from itertools import chain

import torch
from torch import nn

from microparallel.comms import Comms


def replicate(model: nn.Module, comms: Comms) -> None:
    """Copy rank 0's parameters and buffers over everybody else's."""
    for tensor in chain(model.parameters(), model.buffers()):
        comms.broadcast(tensor.data)


def replicas_are_identical(model: nn.Module, comms: Comms) -> bool:
    """Whether every rank holds the same parameters, bit for bit."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    digests = comms.all_gather(torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8))
    return all(torch.equal(digests[0], other) for other in digests)
