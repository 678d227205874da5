"""What an optimizer must be like to update parts of parameters: look at each before its first step."""

from __future__ import annotations

import functools
import warnings
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from microparallel.data_parallel.sharded_optimizer import finest_cut, is_of_torch
from microparallel.errors import UsageError


class OptimizersOfParts:
    """Looks at each optimizer of this process before it makes a step: does it do the right thing with parts?"""

    def __init__(self) -> None:
        self._fine: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        register_optimizer_step_pre_hook(self._look_at)

    def _look_at(self, optimizer: torch.optim.Optimizer, _arguments: Any, _named: Any) -> None:
        if optimizer in self._fine:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(getattr(parameter, "is_in_parts", False) for parameter in parameters):
            raise UsageError(
                "step: this optimizer was made before the model was wrapped, and has parameters that are in parts "
                "since; make it of the wrapped model's parameters()"
            )
        if any(hasattr(parameter, "part_of") for parameter in parameters) and finest_cut(type(optimizer)) != "element":
            name = type(optimizer).__name__
            if is_of_torch(type(optimizer)):
                raise UsageError(
                    f"step: {name} does not update each element by itself, and each rank has a part of each parameter; "
                    "use AdamW or another that does, or mp.DataParallel with mp.ShardedOptimizer(by='parameter')"
                )
            warnings.warn(
                f"{name} is not known to update each element by itself; if it looks at a parameter as a whole (its "
                "norm, its rows), its result is wrong where each rank has a part",
                stacklevel=2,
            )
        self._fine.add(optimizer)


@functools.cache
def optimizers_of_parts() -> OptimizersOfParts:
    """The process's only one, made when the first model is wrapped: torch calls it from then on."""
    return OptimizersOfParts()
