"""One stage of a model on the rank that holds it: forward, and backward whole or in halves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from microparallel.pipeline.boundary import Boundary, as_inputs
from microparallel.pipeline.layers import NamedLayer
from microparallel.pipeline.put_off import PutOff, PuttingOff
from microparallel.pipeline.split_backward import SplitBackward

LossFunction = Callable[[Any, Any], torch.Tensor]


@dataclass
class Pass:
    """What a stage keeps of one micro-batch, from its forward until the backward of its weights."""

    leaves: list[torch.Tensor]  # of its input: those that have gradients
    outputs: list[torch.Tensor]  # those that have gradients
    put_off: PutOff = field(default_factory=PutOff)
    split: SplitBackward | None = None


class Stage:
    """Some neighbouring layers of the model.

    Args:
        index: which stage it is.
        layers: its layers, by their names in the whole model.
        loss_fn: what makes the loss out of the outputs and the targets, in the last stage; without one, its last layer
            is called with the targets, too.
        recompute: keep a micro-batch's input only, and compute the stage again when its backward comes.
    """

    def __init__(
        self, index: int, layers: Sequence[NamedLayer], loss_fn: LossFunction | None, recompute: bool = False
    ) -> None:
        self.index = index
        self.layers = layers
        self.loss_fn = loss_fn
        self.copies_input = False  # it changes its input in place
        self.splits = False  # the schedule does its backward in halves
        self._recompute = recompute

    @functools.cached_property
    def modules(self) -> list[nn.Module]:
        """Its layers."""
        return [layer.module for layer in self.layers]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Its parameters, by their names in the whole model; a parameter that has two names comes twice."""
        for layer in self.layers:
            yield from layer.named_parameters()

    # ── forward ─────────────────────────────────────────────────────────────────────────────────────────────────

    def forward(
        self, boundary: Boundary, inputs: Sequence[torch.Tensor], targets: Any = None
    ) -> tuple[Any, list[torch.Tensor], PutOff]:
        """Apply the layers to what arrived; with targets, the result is the loss.

        Returns it, those leaves of the input that will have gradients, and what backward will put off.
        """
        value, leaves = as_inputs(boundary, inputs, self.copies_input)
        put_off = PutOff()
        if self._recompute and torch.is_grad_enabled():
            return checkpoint(self._apply, value, targets, use_reentrant=False), leaves, put_off
        if not self.splits or not torch.is_grad_enabled():
            return self._apply(value, targets), leaves, put_off
        with PuttingOff(put_off):
            return self._apply(value, targets), leaves, put_off

    def _apply(self, value: Any, targets: Any) -> Any:
        *layers, last = self.modules
        for layer in layers:
            value = layer(value)
        if targets is None:
            return last(value)
        return last(value, targets) if self.loss_fn is None else self.loss_fn(last(value), targets)

    # ── backward ────────────────────────────────────────────────────────────────────────────────────────────────

    def backward(self, kept: Pass, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Add up the weights' gradients, and return those of the input."""
        if kept.outputs:
            torch.autograd.backward(kept.outputs, list(gradients))
        kept.put_off.add_up()
        return [_or_zeros(leaf.grad, leaf) for leaf in kept.leaves]

    def backward_input(self, kept: Pass, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the input's gradients; what the weights' need is kept."""
        kept.split = SplitBackward(kept.outputs, kept.leaves, whole=self._recompute)
        found = kept.split.input_half(list(gradients))
        return [_or_zeros(gradient, leaf) for gradient, leaf in zip(found, kept.leaves, strict=True)]

    def backward_weight(self, kept: Pass) -> None:
        """Add up the weights' gradients."""
        if kept.split is not None:
            kept.split.weight_half()
        kept.put_off.add_up()

    @functools.cached_property
    def parameters(self) -> list[nn.Parameter]:
        """Its parameters, each once."""
        return list(dict.fromkeys(parameter for _, parameter in self.named_parameters()))


def _or_zeros(gradient: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """A part of the input that the outputs do not depend on has a gradient of zero."""
    return torch.zeros_like(like) if gradient is None else gradient
