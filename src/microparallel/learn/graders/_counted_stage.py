"""A stage that knows what is done with it: what enters, in which order it computes, and what is still held."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from microparallel.learn.graders._common_pp import WIDTH
from microparallel.learn.verdict import Wrong


class CountedStage(nn.Module):
    """Some layers, on one rank.

    Attributes:
        order: what was computed in this step: `F0.2` is the forward of micro-batch 2 on rank 0, `B0.2` its backward.
        most_held: the most micro-batches at once whose forward was done and whose backward was not.
        most_kept: the most micro-batches at once whose backward was done and whose outputs somebody still held.
    """

    width = WIDTH

    def __init__(self, layers: Sequence[nn.Module], rank: int, diary: Path | None = None) -> None:
        super().__init__()
        self._diary = diary  # where the order is to be found if this rank never comes to its end
        self.layers = nn.Sequential(*layers)
        self.rank = rank
        self._alive: weakref.WeakSet[_Work] = weakref.WeakSet()
        self.begin()

    def begin(self) -> None:
        """Begin a new step."""
        self.order: list[str] = []
        self.most_held = self.most_kept = 0
        self._forwards = 0
        self._alive.clear()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute, and count."""
        self._require_proper(inputs)
        work = _Work(self._forwards)
        self._forwards += 1
        self._look_around()
        self._alive.add(work)
        self._write_down(f"F{self.rank}.{work.microbatch}")
        self.most_held = max(self.most_held, sum(not one.done for one in self._alive))
        outputs: torch.Tensor = _Meter.apply(self.layers(inputs), self, work)  # type: ignore[no-untyped-call]
        return outputs

    def backward_begins(self, work: _Work) -> None:
        """Note that the gradient of a micro-batch's outputs has come."""
        if work.done:
            raise Wrong(f"rank {self.rank} does the backward of micro-batch {work.microbatch} twice")
        self._look_around()
        work.done = True
        self._write_down(f"B{self.rank}.{work.microbatch}")

    def _write_down(self, word: str) -> None:
        self.order.append(word)
        if self._diary is not None:
            self._diary.write_text(" ".join(self.order))

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
