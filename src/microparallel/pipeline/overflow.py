"""Overflow: with float16 gradients may be infinite on one stage; then no stage and no replica takes the step.

```
stage 0   backward  inf      ┐                     no gradients, scale / 2    optimizer.step() does nothing
stage 1   backward  finite   ┘ *:overflow0@world   no gradients, scale / 2    optimizer.step() does nothing
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from microparallel.comms import Comms
from microparallel.data_parallel.skipped_steps import StepGuard, is_finite
from microparallel.pipeline.interpreter import Sum


class PipelineGuard(StepGuard):
    """Knows whether the optimizer's next step must do nothing, and tells the loss scale of every step of the pipeline.

    The loss scale counts steps of the pipeline, not of the optimizer: a rank whose layers are all frozen has no
    optimizer, and must have the same scale as all others. With one optimizer's step for each, that is the same. Where
    gradients of several steps add up, an overflow in one leaves no gradients until the optimizer has made its step.
    """

    def pass_ended(self, *, overflow: bool) -> None:
        """A step of the pipeline has ended; every rank gives the same answer."""
        self._loss_scale.step_ends(overflow=overflow)
        super().pass_ended(overflow=overflow)

    def step_ended(self) -> None:
        """An optimizer has made its step."""
        self.forget()


class OverflowSum:
    """Finds out whether any rank of the world has gradients that are not finite, after all sums of a step.

    Args:
        guard: is told the answer.
        comms: all ranks.
        gradients: lists those of this rank.
    """

    def __init__(self, guard: PipelineGuard, comms: Comms, gradients: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._guard = guard
        self._comms = comms
        self._gradients = gradients

    def start(self, operation: Sum) -> None:
        """Look at the gradients of this rank, and ask all others."""
        mine = not all(map(is_finite, self._gradients()))
        ranks = self._comms.all_reduce(
            torch.tensor([float(mine)], dtype=torch.float64, device="cpu"), operation=operation
        )
        self._guard.pass_ended(overflow=bool(ranks))

    def finish(self) -> None:
        """Do nothing: `start` has waited for the sum."""
