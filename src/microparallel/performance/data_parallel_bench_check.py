"""Did the methods that were timed train the model? A benchmark that measures a wrong result is worth nothing.

All methods do the same steps from the same weights on the same samples. So those that synchronise must end at the same
weights, but for rounding, and each must have the same ones on all ranks, bit for bit.

    start ─────────────────────────────── torch's DDP     how far it has come
                                          ╲ a method      how far from there: a tiny part of that
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from microparallel.comms import Comms
from microparallel.data_parallel import replicas_are_identical
from microparallel.performance.data_parallel_bench_methods import TORCH_DDP, Contender, Method
from microparallel.performance.rounds import largest

# Two orders of adding the same float32 numbers differ by some millionths of the way; a gradient that was left out, or
# averaged twice, by a large part of it.
_TOLERANCE = 1e-2


@dataclass(frozen=True)
class WrongWeights:
    """A method that did not train the model as torch's DistributedDataParallel does."""

    subject: str
    method: str
    problem: str


def differences(contenders: Sequence[Contender], start: nn.Module, comms: Comms) -> dict[Method, float]:
    """How far each method has ended from torch's DDP, as a part of the way that one has come; on the worst rank."""
    begun = _flat(start)
    end = next(_flat(one.model) for one in contenders if one.method.name == TORCH_DDP)
    way = float((end - begun).norm())
    found = []
    for contender in contenders:
        apart = float((_flat(contender.model) - end).norm())
        part = apart / way if way else math.nan
        found.append(part if math.isfinite(part) else math.inf)
    worst = largest(comms, found)
    return {one.method: part for one, part in zip(contenders, worst, strict=True)}


def find_wrong(
    subject: str, contenders: Sequence[Contender], apart: dict[Method, float], comms: Comms
) -> WrongWeights | None:
    """The first method with wrong weights; the same on every rank."""
    for contender in contenders:
        method = contender.method
        if not method.synchronises:
            continue
        if not replicas_are_identical(contender.model, comms):
            return WrongWeights(subject, method.label, "its ranks ended with different weights")
        if not apart[method] <= _TOLERANCE:
            problem = "its weights, or those of torch-ddp, are not finite"
            if math.isfinite(apart[method]):
                problem = f"it ended {apart[method]:.2g} of the way from where torch-ddp did"
            return WrongWeights(subject, method.label, problem)
    return None


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])
