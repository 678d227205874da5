"""Steps that are not taken: if gradients are not finite anywhere, no rank has gradients, and all lower the loss scale.

```
rank 0   backward  finite    ┐ averaged: not finite,        grad = None, on every rank     optimizer.step()
rank 1   backward  inf       ┘ and every rank sees that     for the rest of this step      does nothing; scale / 2
```

An optimizer of torch's leaves a parameter alone whose `grad` is None: so a user's script needs no line for this.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from microparallel.data_parallel.precision import LossScale


class StepGuard:
    """Knows whether the step that is under way had gradients that are not finite, and tells the loss scale at its end.

    Args:
        loss_scale: of the model; the same on every rank.

    Attributes:
        overflow: whether a pass of this step had such gradients. It stays so until the step ends.
    """

    def __init__(self, loss_scale: LossScale) -> None:
        self.overflow = False
        self._passes = False  # whether there was one since the last step
        self._loss_scale = loss_scale

    @property
    def scale(self) -> float:
        """By what gradients are multiplied on their way through the model, and on the wire."""
        return self._loss_scale.value

    @property
    def begins(self) -> bool:
        """Whether there was no pass yet since the last step."""
        return not self._passes

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """A step ends when an optimizer updates one of these parameters."""
        optimizer_steps().enter(parameters, self)

    def pass_ended(self, *, overflow: bool) -> None:
        """Note whether a pass had gradients that are not finite; every rank gives the same answer."""
        self._passes = True
        self.overflow |= overflow

    def step_ended(self) -> None:
        """An optimizer has updated the parameters, or would have; if there are several, the first one counts."""
        if self._passes:
            self._loss_scale.step_ends(overflow=self.overflow)
        self.forget()

    def forget(self) -> None:
        """Begin a new step."""
        self._passes = self.overflow = False


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is infinite or not a number; this reads the tensor once, and makes no other of its size."""
    return not tensor.numel() or math.isfinite(float(torch.linalg.vector_norm(tensor, math.inf)))


class OptimizerSteps:
    """Is told by torch after each step of any optimizer of this process, and tells the guards of its parameters."""

    def __init__(self) -> None:
        self._guard_of: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._entries = 0
        self._found: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Found] = weakref.WeakKeyDictionary()
        register_optimizer_step_post_hook(self._stepped)

    def enter(self, parameters: Iterable[nn.Parameter], guard: StepGuard) -> None:
        """Note who must know when these parameters are updated."""
        self._guard_of.update(dict.fromkeys(parameters, weakref.ref(guard)))
        self._entries += 1

    def _stepped(self, optimizer: torch.optim.Optimizer, _arguments: Any, _named: Any) -> None:
        for reference in self._guards(optimizer):
            guard = reference()
            if guard is not None:
                guard.step_ended()

    def _guards(self, optimizer: torch.optim.Optimizer) -> list[weakref.ref[StepGuard]]:
        """The guards of an optimizer's parameters; looking all of these up takes longer than a small model's update."""
        state = self._entries, sum(len(group["params"]) for group in optimizer.param_groups)
        found = self._found.get(optimizer)
        if found is None or found[0] != state:
            parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
            guards = (self._guard_of.get(parameter) for parameter in parameters)  # type: ignore[no-untyped-call]
            found = self._found[optimizer] = state, list(dict.fromkeys(one for one in guards if one is not None))
        return found[1]


_Found = tuple[tuple[int, int], list[weakref.ref[StepGuard]]]


@functools.cache
def optimizer_steps() -> OptimizerSteps:
    """The process's only one, made when the first model with a loss scale is wrapped: torch calls it from then on."""
    return OptimizerSteps()
