"""Mixed precision in a pipeline: what layers read, and in which dtype values cross the boundaries of stages.

```
            stage 0                                  stage 1, the last
batch ──► bf16 ──► layers ──► bf16 ──── sent ────► layers ──► float32 ──► loss
                     ▲        bf16 ◄─── sent ──────  ▲           ◄── fp16: the gradient × the loss scale
                     │                               │ copies, made once a step; fp16: the gradient / the loss scale
            float32 parameters              float32 parameters
```
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from microparallel.data_parallel.compute_copies import ComputeCopies
from microparallel.data_parallel.precision import LossScale, MixedPrecision, convert_parameters, converted
from microparallel.pipeline.parts import Part
from microparallel.pipeline.stand_ins import StandIn
from microparallel.torch_private import own_parameters_of


class StagePrecision:
    """In which dtypes the stages of one rank compute.

    Args:
        precision: the dtypes; None: everything stays as it is.
        loss_scale: by which the gradient of the last stage's outputs is multiplied; None: by nothing.

    Attributes:
        precision: the same.
        loss_scale: the same.
        copies: what the layers compute with now, in place of their parameters.
    """

    def __init__(self, precision: MixedPrecision | None = None, loss_scale: LossScale | None = None) -> None:
        self.precision = precision
        self.loss_scale = loss_scale
        self.copies: list[torch.Tensor] = []
        self._reading: list[dict[str, nn.Parameter | None]] = []
        self._copies: ComputeCopies | None = None
        self._computes = False

    def take(self, layers: Sequence[nn.Module]) -> None:
        """Convert the parameters of these layers to the master dtype; the layers compute with copies from now on."""
        if self.precision is None:
            return
        for layer in layers:
            convert_parameters(layer, self.precision.master)
            if isinstance(layer, Part):
                layer.follow_dtype(self.precision.master)
        if not self.precision.is_mixed:
            return
        modules = nn.ModuleList(_with_what_stands_behind(layers))
        self._copies = ComputeCopies(modules, self.precision, self.loss_scale)
        self._reading = [own_parameters_of(module) for module in modules.modules()]

    def without_contents(self, layers: Sequence[nn.Module]) -> StagePrecision:
        """The same for copies of these layers on the meta device."""
        other = StagePrecision(self.precision)
        other.take(layers)
        return other

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Within this block layers compute with copies, which are made at once; blocks inside of it change nothing."""
        if self._copies is None or self._computes:
            yield
            return
        self._computes = True
        try:
            with self._copies.whole_passes():
                read = [parameters[name] for parameters in self._reading for name in parameters]
                self.copies = [copy for copy in read if copy is not None]
                yield
        finally:
            self._computes = False
            self.copies = []

    def inside(self, value: Any) -> Any:
        """The batch, or what a stage sends to the next, in the dtype of the computation."""
        return value if self.precision is None else converted(value, self.precision.compute)

    def outside(self, outputs: Any) -> Any:
        """What the last stage returns, in the master dtype; the gradient that comes back is scaled."""
        if self.precision is None:
            return outputs
        factor = 1.0 if self.loss_scale is None else self.loss_scale.value
        return converted(outputs, self.precision.master, factor)


def _with_what_stands_behind(layers: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """The layers; and of parts of a model the modules that are called, and are no children of theirs."""
    for layer in layers:
        yield layer
        for module in layer.modules():
            if isinstance(module, StandIn):
                yield module.__dict__["original"]
            elif isinstance(module, Part):
                yield module.__dict__["skeleton"]
