"""Mixed precision: float32 master weights, 16-bit copies to compute with, and a dtype on the wire.

```
parameters (master)  float32 ──copy──► bf16 ──► forward, backward ──► gradients bf16 ──► float32 `grad`
                        ▲                                                  averaged, `reduce` on the wire │
                        └────────────────────────────────── optimizer ◄───────────────────────────────────┘
```

float16 has few exponents: gradients below 6e-8 become 0. So the wrapper multiplies the gradient that comes into its
outputs by a scale, and each parameter's gradient by one over it: what a user sees is never scaled. A scale that is too
large makes gradients infinite somewhere. Then no rank and no stage takes the step, and all of them halve the scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from microparallel.errors import GradientError, UsageError
from microparallel.text import count
from microparallel.torch_private import pytree

_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "float64": torch.float64}
_MASTERS = (torch.float32, torch.float64)
_SMALLEST_SCALE = 2.0**-24  # with a smaller one, gradients of 1 vanish in float16


@dataclass(frozen=True)
class MixedPrecision:
    """In which dtypes a model computes, sends its gradients, and keeps its parameters.

    Attributes:
        compute: of the copies of parameters, of activations, and of what a pipeline's stages send each other.
        reduce: of gradients on the wire; what ranks send is added up in float32, and rounded once. None: `compute`.
        master: of the module's own parameters, which the optimizer updates, and of their gradients.

    Example:
        ```python
        model = mp.DataParallel(net, comms, precision="bf16")
        model = mp.DataParallel(net, comms, precision=mp.MixedPrecision(torch.bfloat16, reduce=torch.float32))
        ```
    """

    compute: torch.dtype = torch.bfloat16
    reduce: torch.dtype | None = None
    master: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.reduce is None:
            object.__setattr__(self, "reduce", self.compute)
        for name in ("compute", "reduce", "master"):
            if getattr(self, name) not in _DTYPES.values():
                raise UsageError(
                    f"MixedPrecision: {name}={getattr(self, name)!r}; choose torch.float32, torch.bfloat16, "
                    "torch.float16 or torch.float64"
                )
        if self.master not in _MASTERS:
            raise UsageError(
                f"MixedPrecision: master={self.master}: small updates of 16-bit weights are rounded away; "
                "choose torch.float32 or torch.float64"
            )

    @property
    def is_mixed(self) -> bool:
        """Whether layers compute with copies; otherwise the parameters themselves are converted, and that is all."""
        return self.compute is not self.master or self.scales_loss

    @property
    def wire(self) -> torch.dtype | None:
        """The dtype of gradients on the wire, if it is another than that of gradients."""
        return self.reduce if self.reduce in (torch.bfloat16, torch.float16) else None

    @property
    def scales_loss(self) -> bool:
        """Whether gradients must be scaled, so that small ones are not lost."""
        return torch.float16 in (self.compute, self.reduce)


Precision = Literal["float32", "bf16", "fp16", "float64"] | MixedPrecision


def as_precision(given: Precision | None, caller: str) -> MixedPrecision | None:
    """Read what a user gave as `precision=`; None: the model stays as it is."""
    if given is None or isinstance(given, MixedPrecision):
        return given
    if given not in _DTYPES:
        raise UsageError(
            f"{caller}: precision={given!r}; choose 'float32', 'bf16', 'fp16', 'float64' or an mp.MixedPrecision"
        )
    dtype = _DTYPES[given]
    return MixedPrecision(dtype, master=dtype if dtype in _MASTERS else torch.float32)


def convert_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert the parameters and real buffers of a module in place: an optimizer that has them still has them."""
    module.double() if dtype is torch.float64 else module.float()


# ── copies to compute with ──────────────────────────────────────────────────────────────────────────────────────────


class Converted(torch.autograd.Function):
    """A tensor in another dtype, whose gradient comes back in the tensor's own, multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dtype: torch.dtype, factor: float) -> torch.Tensor:
        """Convert the tensor."""
        ctx.dtype, ctx.factor = tensor.dtype, factor
        return tensor.to(dtype) if tensor.dtype is not dtype else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Give the gradient back."""
        return given_back(gradient, ctx.dtype, ctx.factor), None, None


def given_back(gradient: torch.Tensor, dtype: torch.dtype, factor: float) -> torch.Tensor:
    """A copy's gradient in the dtype of what was copied, multiplied by a factor.

    It is multiplied in the wider of the two dtypes: a scaled gradient may be too large or small for the other.
    """
    wide = torch.promote_types(gradient.dtype, dtype)
    gradient = gradient.to(wide) if factor == 1.0 else gradient.to(wide) * factor
    return gradient.to(dtype)


def converted(tree: Any, dtype: torch.dtype, factor: float = 1.0) -> Any:
    """Convert all real numbers in a nest of inputs or outputs; gradients that come back are multiplied by a factor."""

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        if leaf.dtype is dtype and (factor == 1.0 or not leaf.requires_grad):
            return leaf
        return Converted.apply(leaf, dtype, factor)  # type: ignore[no-untyped-call]

    return pytree.tree_map(convert, tree)


# ── the scale of the loss ───────────────────────────────────────────────────────────────────────────────────────────


class LossScale:
    """The factor by which gradients are multiplied on their way through a float16 model; the same on every rank.

    It is that of torch's `GradScaler`: halved when a step had gradients that are not finite, and that step is not
    taken; doubled after `interval` steps without. Set its attributes on every rank alike.

    Attributes:
        value: the factor.
        growth: what it is multiplied by after `interval` good steps.
        backoff: what it is multiplied by after a step that was not taken.
        interval: after how many good steps in a row it grows.
        good_steps: how many steps were taken since it last changed.
        skipped: how many steps were not taken.
    """

    def __init__(self, value: float = 2.0**16, *, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000):
        self.value = value
        self.good_steps = 0
        self.skipped = 0
        self.growth, self.backoff, self.interval = growth, backoff, interval

    def step_ends(self, *, overflow: bool) -> None:
        """Every rank calls this once a step, with the same answer: were there gradients that are not finite?"""
        if overflow:
            self.value *= self.backoff
            self.good_steps = 0
            self.skipped += 1
            if self.value < _SMALLEST_SCALE:  # every rank raises: all have the same scale
                raise GradientError(
                    f"float16: the loss scale fell to {self.value:.1e} after {count(self.skipped, 'step')} that no "
                    "rank took: gradients are not finite whatever the scale; look for what is not a number in the data "
                    'or the loss (check_finite=True in float32 names the parameters), or use precision="bf16"'
                )
            return
        self.good_steps += 1
        if self.good_steps >= self.interval:
            self.value *= self.growth
            self.good_steps = 0

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"value": self.value, "good_steps": self.good_steps, "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on with the scale of a checkpoint."""
        self.value = float(state["value"])
        self.good_steps, self.skipped = int(state["good_steps"]), int(state["skipped"])
