"""How many bytes of weights and gradients a rank has, at most, in a training step: those of the tensors themselves.

Tensors come and go in a step. So they are counted whenever something changes: a gradient has just been computed, a
module has ended, our ranks begin to gather or to sum. What is counted:

    weights      what the model has; of a model in parts, the rank's own part, and what is gathered at the moment
    gradients    what is kept, what lies in buckets, and the gradient that has just come

What torch's own collectives copy to and from is not counted: torch does not tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel

from microparallel.comms import Comms
from microparallel.data_parallel import DataParallel, FullyShardedDataParallel
from microparallel.data_parallel.sharding import GradientInParts
from microparallel.observe import Activity

Span = tuple[int, int]  # where a tensor begins in memory, and where it ends


def span(tensor: torch.Tensor) -> Span:
    """The addresses of a dense tensor."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def covered(spans: Iterable[Span]) -> float:
    """How many bytes lie in at least one of these spans: views of the same memory count once."""
    total, reached = 0, 0
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return float(total)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor that torch keeps in parts; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Watch:
    """Counts in a `with` block, in which steps are done; it is also an observer of the Comms.

    Args:
        wrapped: the model, as a step calls it.
        comms: the ranks.

    Attributes:
        weights: the most bytes of weights that were there at any time.
        gradients: the most bytes of gradients.
    """

    def __init__(self, wrapped: nn.Module, comms: Comms) -> None:
        self.weights = self.gradients = 0.0
        self._wrapped = wrapped
        self._comms = comms
        self._watched: set[nn.Parameter] = set()
        self._until = ExitStack()  # what is undone when the block ends
        self._kept: list[Span] = []  # that torch's own has in its buckets, whether there is a gradient or not
        sharded = wrapped.parameters() if isinstance(wrapped, FSDPModule) else ()
        self._parts = [own_part(parameter.detach()) for parameter in sharded]

    def __enter__(self) -> Watch:
        """Begin to count."""
        if isinstance(self._wrapped, DistributedDataParallel):
            self._kept = list(self._gradients_now())  # views of its buckets, if a step has been done
        self._await_gradients()
        self._comms.observers.append(self)
        self._until.callback(self._comms.observers.remove, self)
        if isinstance(self._wrapped, FSDPModule):  # its parameters are whole when a forward of theirs has just ended
            hook = register_module_forward_hook(lambda *_: self._await_gradients())
            self._until.callback(hook.remove)
        return self

    def __exit__(self, *_: object) -> None:
        """Count once more, and no longer."""
        self._count()
        self._until.close()

    # ── what an observer is told ────────────────────────────────────────────────────────────────────────────────

    def begins(self, activity: Activity) -> None:  # noqa: ARG002
        """An operation begins: the memory for its result has been taken."""
        self._count()

    def waits(self, activity: Activity) -> None:
        """Nothing changes."""

    def ends(self, activity: Activity) -> None:
        """Nothing has come."""

    # ── counting ────────────────────────────────────────────────────────────────────────────────────────────────

    def _await_gradients(self) -> None:
        for parameter in self._computed_with():
            if parameter.requires_grad and parameter not in self._watched:
                self._watched.add(parameter)
                hook: Any = parameter.register_hook(partial(self._count))  # type: ignore[no-untyped-call]
                self._until.callback(hook.remove)
        self._count()

    def _computed_with(self) -> Iterator[nn.Parameter]:
        """The parameters that autograd computes gradients for, as far as they are there now."""
        if isinstance(self._wrapped, FullyShardedDataParallel):
            yield from (parameter for unit in self._wrapped.units for parameter in unit.parameters)
        else:
            yield from (one for one in self._wrapped.parameters() if not isinstance(one, DTensor))

    def _count(self, gradient: torch.Tensor | None = None) -> None:
        self.weights = max(self.weights, covered(self._weights_now()))
        arrived = [] if gradient is None else [span(gradient)]
        self.gradients = max(self.gradients, covered([*self._kept, *self._gradients_now(), *arrived]))

    def _weights_now(self) -> Iterator[Span]:
        if isinstance(self._wrapped, FullyShardedDataParallel):
            for unit in self._wrapped.units:
                for part in unit.parts:
                    yield from (span(one) for one in (part.flat, part.gathered) if one is not None)
        else:
            yield from map(span, (*self._parts, *self._computed_with()))

    def _gradients_now(self) -> Iterator[Span]:
        if isinstance(self._wrapped, DataParallel):
            yield from map(span, self._wrapped.gradient_memory())
        for parameter in (*self._wrapped.parameters(), *self._computed_with()):
            if parameter.grad is not None and not isinstance(parameter.grad, GradientInParts):
                yield span(own_part(parameter.grad))
