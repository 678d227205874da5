"""Did the schedules that were timed compute what they should? A benchmark of wrong results is worth nothing.

Every rank computes the loss and all gradients of the whole batch by itself, without stages and micro-batches. What each
method's last step left must be the same but for rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from microparallel.comms import Comms
from microparallel.models.loss import cross_entropy
from microparallel.performance.pipeline_bench_methods import Batch
from microparallel.performance.rounds import largest

# Micro-batches are added up in another order than a whole batch: some millionths. What is left out, or counted twice,
# is a large part.
_TOLERANCE = 1e-3


class Computed(Protocol):
    """What a method's last step has left on this rank."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Those of this rank, by their names in the whole model."""

    @property
    def loss(self) -> float | None:
        """The mean over the batch, where this rank knows it."""


@dataclass(frozen=True)
class Apart:
    """How far loss and gradients are from those of a single process, each as a part of its size there."""

    loss: float
    gradient: float  # of the parameter that is furthest away
    parameter: str

    @property
    def problem(self) -> str | None:
        """What is wrong, if anything is."""
        if not self.loss <= _TOLERANCE:
            return f"its loss is {self.loss:.2g} of its size from that of a single process"
        if not self.gradient <= _TOLERANCE:
            return f"the gradient of {self.parameter} is {self.gradient:.2g} of its size from that of a single process"
        return None


class SingleProcess:
    """The loss and the gradients of the whole batch, computed without a pipeline."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        inputs, targets = batch
        model.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self._loss = float(loss.detach())
        self._gradients = {name: _gradient(parameter) for name, parameter in model.named_parameters()}
        model.zero_grad()

    def compare(self, computed: Computed, comms: Comms) -> Apart:
        """How far a method is from this; all ranks call it, and get the same."""
        nobody_s = -1.0
        found = [nobody_s] * len(self._gradients)
        for place, (name, expected) in enumerate(self._gradients.items()):
            if name in computed.parameters:
                found[place] = _part(_gradient(computed.parameters[name]) - expected, expected)
        loss = nobody_s if computed.loss is None else abs(computed.loss - self._loss) / abs(self._loss or 1.0)
        apart, *parts = (math.inf if part == nobody_s else part for part in largest(comms, [_finite(loss), *found]))
        furthest = max(range(len(parts)), key=lambda place: parts[place])
        return Apart(apart, parts[furthest], list(self._gradients)[furthest])


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return found.detach().clone()


def _part(difference: torch.Tensor, whole: torch.Tensor) -> float:
    apart, size = float(difference.double().norm()), float(whole.double().norm())
    return _finite(apart / size if size else apart)


def _finite(number: float) -> float:
    return number if math.isfinite(number) else math.inf
