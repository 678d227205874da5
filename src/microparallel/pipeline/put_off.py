"""Linear layers whose weights' gradients are put off: backward passes only their input's gradient on.

```
            full backward                    input half                 weight half, later
gradient ─→ gradient @ weight ─→ …           gradient @ weight ─→ …
        └─→ gradientᵀ @ inputs → weight.grad keep gradient and inputs   weight.grad += gradientᵀ @ inputs
```

Any graph can be split (`split_backward.py`), for the price of looking at all of its nodes, and of a run of torch's
engine for each layer. For linear layers, which is where nearly all of a model's weights are, this is cheaper: nothing
needs to be found afterwards, and one multiplication adds to the gradient that is there instead of making another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from microparallel.torch_private import has_hooks


class PutOff:
    """What the linear layers of one micro-batch's forward still have to do for their weights."""

    def __init__(self) -> None:
        self._waiting: list[tuple[_Linear, torch.Tensor, torch.Tensor]] = []

    def keep(self, layer: _Linear, inputs: torch.Tensor, gradient: torch.Tensor) -> None:
        """Remember what a layer's weights need."""
        self._waiting.append((layer, inputs, gradient))

    def add_up(self) -> None:
        """Do it now."""
        with torch.no_grad():
            while self._waiting:
                layer, inputs, gradient = self._waiting.pop()
                layer.add_gradients(inputs.reshape(-1, inputs.shape[-1]), gradient.reshape(-1, gradient.shape[-1]))


class PuttingOff(TorchFunctionMode):
    """Within this mode, linear layers put their weights' gradients off where that is possible."""

    def __init__(self, put_off: PutOff) -> None:
        super().__init__()
        self._put_off = put_off

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """torch calls this instead of every function."""
        if func is functional.linear and not kwargs and _possible(*args):
            inputs, layer = args[0], _Linear(args[1], args[2] if len(args) > 2 else None, self._put_off)
            return _LinearFunction.apply(inputs, layer)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


def _possible(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Whether nobody but the optimizer will look at these gradients, and the input's is wanted anyway."""
    return (
        torch.is_grad_enabled()
        and inputs.requires_grad
        and inputs.dim() > 1
        and _plain(weight)
        and (bias is None or _plain(bias))
        and inputs.dtype == weight.dtype
        and not torch.is_autocast_enabled(inputs.device.type)
        and not torch.compiler.is_compiling()
    )


def _plain(parameter: torch.Tensor) -> bool:
    """Whether a tensor is a parameter that is trained, without hooks that wait for its gradient."""
    return isinstance(parameter, nn.Parameter) and parameter.requires_grad and not has_hooks(parameter)


class _Linear:
    """The parameters of one call; torch does not see them, so its graph does not lead to them."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, put_off: PutOff) -> None:
        self.weight = weight
        self.bias = bias
        self.put_off = put_off

    def add_gradients(self, inputs: torch.Tensor, gradient: torch.Tensor) -> None:
        if self.weight.grad is None:
            self.weight.grad = gradient.t() @ inputs
        else:
            self.weight.grad.addmm_(gradient.t(), inputs)
        if self.bias is not None:
            total = gradient.sum(0)
            self.bias.grad = total if self.bias.grad is None else self.bias.grad.add_(total)


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, inputs: torch.Tensor, layer: _Linear) -> torch.Tensor:
        context.save_for_backward(inputs)
        context.layer = layer
        # Not functional.linear: what it returns may be a view, and then nobody could work on it in place.
        outputs = inputs.new_empty((*inputs.shape[:-1], len(layer.weight)))
        flat, rows = outputs.view(-1, len(layer.weight)), inputs.reshape(-1, inputs.shape[-1])
        if layer.bias is None:
            torch.mm(rows, layer.weight.t(), out=flat)
        else:
            torch.addmm(layer.bias, rows, layer.weight.t(), out=flat)
        return outputs

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        layer: _Linear = context.layer
        layer.put_off.keep(layer, context.saved_tensors[0], gradient)
        return gradient @ layer.weight, None
