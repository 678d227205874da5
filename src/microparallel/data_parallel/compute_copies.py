"""Copies to compute with: a layer that reads its weight inside of a pass gets it in 16 bits.

```
                       outside of a pass              inside
layer.weight           the parameter, float32         its copy, bfloat16, whose gradient comes back in float32
list(parameters())     the parameters, float32        the same
```

A copy is made when it is first read in a forward, and serves that forward: it is there for layers that are called twice
and for tied weights. When a checkpointed layer is computed again in backward, its weights are read and copied again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from microparallel.data_parallel.precision import Converted, LossScale, MixedPrecision, converted
from microparallel.data_parallel.units import ParametersWhenRead, keeps_statistics
from microparallel.errors import UsageError
from microparallel.torch_private import (
    at_end_of_backward,
    leave_uncompiled,
    not_compiled,
    number_of_backward,
    own_parameters_of,
    replace_own_parameters,
)


class Source(NamedTuple):
    """Of what a tensor is the copy, and by what its gradient is multiplied on the way back."""

    parameter: nn.Parameter
    factor: float


def source_of(tensor: torch.Tensor) -> Source | None:
    """The parameter that gets the gradient of a weight: itself, or that of which it is the copy."""
    if isinstance(tensor, nn.Parameter):
        return Source(tensor, 1.0)
    return getattr(tensor, "copied_from", None)


class ComputeCopies:
    """Lets the layers of a model compute in another dtype than that of its parameters.

    A layer with real buffers (batch normalisation) is left to compute with its parameters as they are: its statistics
    add up small numbers. What it returns is converted.

    Args:
        module: the model; its modules read their parameters through this object from now on.
        precision: the dtypes.
        loss_scale: by which the gradients on their way through the model are multiplied; None: they are not.
    """

    def __init__(self, module: nn.Module, precision: MixedPrecision, loss_scale: LossScale | None) -> None:
        self._compute, self._master = precision.compute, precision.master
        self._loss_scale = loss_scale
        self._copies: dict[tuple[int, bool, torch.dtype], torch.Tensor] | None = None  # while a forward is under way
        self._in_backward = False
        for part in module.modules():
            exact = keeps_statistics(part)
            read = functools.partial(self._read, dtype=self._master if exact else self._compute)
            parameters = dict(own_parameters_of(part))
            if parameters:
                replace_own_parameters(part, ParametersWhenRead(parameters, read))
            if exact and part is not module:
                part.register_forward_hook(_OfThisProcess(self._outputs_of_part))

    # ── a pass ──────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _scale(self) -> float:
        return 1.0 if self._loss_scale is None else self._loss_scale.value

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Within this block parameters that are read are copies."""
        self._in_backward = False  # an error may have cut the last one short
        self._copies = {}
        try:
            yield
        finally:
            self._copies = None  # autograd holds those that it needs

    @contextmanager
    def whole_passes(self) -> Iterator[None]:
        """Within this block forwards and backwards follow each other, all with the same copies: a pipeline's step."""
        with self.forward():
            self._in_backward = True
            try:
                yield
            finally:
                self._in_backward = False

    def inputs(self, tree: Any) -> Any:
        """What the model is given, in the dtype that it computes in; gradients of inputs come back unscaled."""
        return converted(tree, self._compute, 1 / self._scale)

    def outputs(self, tree: Any) -> Any:
        """What the model returns, in the dtype of its parameters; gradients that come in are scaled."""
        return converted(tree, self._master, self._scale)

    def backward_begins(self) -> None:
        """Until the backward ends that is under way, parameters that are read are copies: layers may compute again."""
        if not self._in_backward:
            self._in_backward = True
            at_end_of_backward(self._backward_ends)

    def _backward_ends(self) -> None:
        self._in_backward = False

    @property
    def _computes(self) -> bool:
        return self._copies is not None or (self._in_backward and number_of_backward() is not None)

    # ── what layers read ────────────────────────────────────────────────────────────────────────────────────────

    @not_compiled
    def _read(self, parameter: nn.Parameter, dtype: torch.dtype) -> Any:
        """What a layer gets that reads this parameter."""
        if not self._computes or not parameter.is_floating_point():
            return parameter
        if self._copies is None:
            return self._copy(parameter, dtype)
        key = id(parameter), torch.is_grad_enabled(), dtype  # a copy that was made without has no gradient
        if key not in self._copies:
            self._copies[key] = self._copy(parameter, dtype)
        return self._copies[key]

    def _copy(self, parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        if parameter.dtype is dtype and self._loss_scale is None:
            return parameter
        if self._loss_scale is None:
            copy = parameter.to(dtype)  # torch's own conversion: that of `Converted` takes its way through Python
        else:
            copy = Converted.apply(parameter, dtype, 1 / self._scale)  # type: ignore[no-untyped-call]
            if copy.requires_grad:
                copy.register_hook(self._require_scaled)
        copy.copied_from = Source(parameter, 1 / self._scale)  # type: ignore[attr-defined]
        return copy

    @leave_uncompiled
    def _require_scaled(self, _gradient: torch.Tensor) -> None:
        """A gradient has come to a copy: raise unless this backward came through the outputs, where it is scaled."""
        if not self._in_backward:
            raise UsageError(
                "DataParallel in float16: a gradient did not come through the outputs of the wrapped model, and so was "
                "not scaled; let the model return tensors, or tuples, lists and dicts of them"
            )

    def _outputs_of_part(self, _module: nn.Module, _inputs: Any, outputs: Any) -> Any:
        return converted(outputs, self._compute) if self._computes else outputs


class _OfThisProcess:
    """A hook of a wrapped model's part; in a copy of that part, or in a file of it, there is nothing to be done."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    @not_compiled
    def __call__(self, *given: Any) -> Any:
        """Do what the hook does."""
        return self._hook(*given)

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        """Leave something behind that does nothing."""
        return _nothing, ()


def _nothing() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_given: Any) -> None:
    pass
