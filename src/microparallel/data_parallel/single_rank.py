"""A world of one rank: nothing is averaged, so no gradient has a hook, and a step costs what the bare model's costs.

Observers are told of forward and backward, and what was asked for is checked when backward has ended: gradients that
are missing, or not finite.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NoReturn

import torch
from torch import nn

from microparallel.comms import Comms
from microparallel.data_parallel.reducer import ObservedBackward, names_of_rank
from microparallel.data_parallel.skipped_steps import StepGuard
from microparallel.errors import GradientError
from microparallel.torch_private import at_end_of_backward, backward_adds_to, largest_of_each


class GradientChecks:
    """What the only rank looks for in its gradients when a backward has ended.

    Args:
        named: the parameters that are trained, by name.
        guard: is told whether gradients are finite; if not, there are none. None: nobody needs to know.
        finite: raise `GradientError` for gradients that are infinite or not a number.
        unused: raise `GradientError` for parameters that got no gradient.
    """

    def __init__(
        self, named: Mapping[str, nn.Parameter], guard: StepGuard | None, *, finite: bool, unused: bool
    ) -> None:
        self.passes = 0
        self._named = named
        self._guard = guard
        self._finite = finite
        self._unused = unused

    def __bool__(self) -> bool:
        """Whether anything is looked for."""
        return self._finite or self._unused or self._guard is not None

    def backward_adds(self) -> bool:
        """Inside of a backward: whether it makes gradients of parameters; `torch.autograd.grad` makes none."""
        return any(one.requires_grad and backward_adds_to(one) for one in self._named.values())

    def look(self) -> None:
        """Look at the gradients of a backward; raise, or remove all, if they are not as they should be."""
        self.passes += 1
        if self._finite or self._guard is not None:
            self._look_for_not_finite()
        if self._unused:
            missing = [name for name, one in self._named.items() if one.grad is None and one.requires_grad]
            if missing:
                fix = "\n  try: find_unused_parameters=True, which counts them as zero"
                self._refuse("no gradients", missing[::-1], fix)  # those of the last layers first, as they come

    def _look_for_not_finite(self) -> None:
        """Wait for one answer of the device: whether all gradients are finite."""
        there = {name: one.grad for name, one in self._named.items() if one.grad is not None and one.grad.numel()}
        by_device: dict[torch.device, list[str]] = {}
        for name, gradient in there.items():
            by_device.setdefault(gradient.device, []).append(name)
        bad: list[str] = []
        for names in by_device.values():
            finite = largest_of_each([there[name] for name in names]).isfinite().tolist()
            bad += [name for name, fine in zip(names, finite, strict=True) if not fine]
        if bad and self._finite:
            self._refuse("gradients that are not finite", bad[::-1])
        if self._guard is not None:
            self._guard.pass_ended(overflow=bool(bad))
            if self._guard.overflow:
                for one in self._named.values():
                    one.grad = None

    def _refuse(self, what: str, names: list[str], fix: str = "") -> NoReturn:
        raise GradientError(f"step {self.passes}: {what} for parameters of {names_of_rank(0, names)}{fix}")


class SingleRank:
    """What stands in for the reducer where there are no other ranks: observers are told, and nothing is averaged.

    ```
    F0:1.0 B0.0 F0:1.1 B0.1 S      two micro-batches, of which the first is inside of no_sync()
    ```

    Args:
        comms: this rank.
        checks: what is looked for in its gradients.

    Attributes:
        microbatch: the number of the next micro-batch; after a backward that was not local it is 0 again.
    """

    def __init__(self, comms: Comms, checks: GradientChecks) -> None:
        self.microbatch = 0
        self._comms = comms
        self._checks = checks
        self._running = False
        self._observed: ObservedBackward | None = None  # this backward, if there are observers

    @property
    def has_nothing_to_do(self) -> bool:
        """Whether a pass is that of the bare model: nobody is told, and nothing is looked for."""
        return not self._checks and not self._comms.observers

    def prepare(self) -> None:
        """Forget a backward that an error has cut short; `DataParallel` calls this before a forward."""
        self._running = False
        self._end_observed()

    def backward_begins(self, local: bool) -> None:
        """Tell the observers that backward begins; torch may call this for several outputs in one backward.

        Args:
            local: whether it is inside of `no_sync()`.
        """
        if self._running:
            return
        self._running = True
        if self._comms.observers:
            self._observed = ObservedBackward(self._comms.observers, [1], self.microbatch)
        looks = bool(self._checks) and not local and self._checks.backward_adds()
        at_end_of_backward(functools.partial(self._backward_ends, local, looks))

    def _backward_ends(self, local: bool, looks: bool) -> None:
        self._running = False
        self._end_observed()
        self.microbatch = self.microbatch + 1 if local else 0
        if looks:
            self._checks.look()

    def _end_observed(self) -> None:
        observed, self._observed = self._observed, None
        if observed is not None:
            observed.end_all()
