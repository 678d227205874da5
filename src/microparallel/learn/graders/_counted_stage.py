"""A stage that knows what is done with it: what enters, in which order it computes, and what is still held."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from microparallel.learn.graders._common_pp import WIDTH
from microparallel.learn.log import Log
from microparallel.learn.verdict import Wrong
from microparallel.observe import Activity
from microparallel.program import Backward, Forward


class CountedStage(nn.Module):
    """Some layers, on one rank, which tell a log of every forward and backward.

    Attributes:
        most_kept: the most micro-batches at once whose backward was done and whose outputs somebody still held.
    """

    width = WIDTH

    def __init__(self, layers: Sequence[nn.Module], rank: int, log: Log) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.rank = rank
        self._log = log
        self._alive: weakref.WeakSet[_Work] = weakref.WeakSet()
        self.begin()

    def begin(self) -> None:
        """Begin a new step."""
        self.most_kept = 0
        self._forwards = 0
        self._alive.clear()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute, and tell."""
        self._require_proper(inputs)
        work = _Work(self._forwards)
        self._forwards += 1
        self._look_around()
        self._alive.add(work)
        self._log.begins(Activity(Forward(self.rank, work.microbatch)))
        outputs: torch.Tensor = _Meter.apply(self.layers(inputs), self, work)  # type: ignore[no-untyped-call]
        return outputs

    def backward_begins(self, work: _Work) -> None:
        """Note that the gradient of a micro-batch's outputs has come."""
        self._look_around()
        work.done = True
        self._log.begins(Activity(Backward(self.rank, work.microbatch)))

    def _look_around(self) -> None:
        self.most_kept = max(self.most_kept, sum(one.done for one in self._alive))

    def _require_proper(self, inputs: Any) -> None:
        if not isinstance(inputs, torch.Tensor):
            raise Wrong(f"rank {self.rank} puts {type(inputs).__name__} into its stage, and should put in a tensor")
        if not torch.is_grad_enabled():
            raise Wrong(f"rank {self.rank} computes its forward without a graph (no_grad), so no backward can follow")
        if self.rank > 0 and bool(inputs.isnan().all()):
            raise Wrong(
                f"rank {self.rank} puts the batch's inputs into its stage: only rank 0 does; what enters here is what "
                f"rank {self.rank - 1} returned, and must be received"
            )
        if self.rank > 0 and not inputs.requires_grad:
            raise Wrong(
                f"rank {self.rank} computes with what it received without asking for its gradient: requires_grad_() is "
                f"missing, and so there will be nothing to send back to rank {self.rank - 1}"
            )


class _Work:
    """One micro-batch on one stage; it lives as long as the graph of its outputs."""

    def __init__(self, microbatch: int) -> None:
        self.microbatch = microbatch
        self.done = False


class _Meter(torch.autograd.Function):
    """Passes numbers and gradients on as they are, and says so."""

    @staticmethod
    def forward(context: Any, outputs: torch.Tensor, stage: CountedStage, work: _Work) -> torch.Tensor:
        """In the forward it holds on to the work."""
        context.stage, context.work = stage, work
        return outputs.view_as(outputs)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        """In the backward it tells the stage."""
        context.stage.backward_begins(context.work)
        return gradients[0], None, None
