"""SyncBatchNorm: batch normalisation over the samples of all ranks, as one process does with the whole batch.

```
forward     count, mean, variance of this rank's samples ─▶ all-reduce ─▶ those of all samples ─▶ normalise
backward    gradients of mean and variance, from these   ─▶ all-reduce ─▶ from all samples     ─▶ gradient of the input
```

Each layer does an all-reduce in forward and one in backward. Inside of `DataParallel` both are operations of its
program, `*:moments0@dp` and `*:moments0.gradient@dp` for the first layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import nn
from torch.nn import functional

from microparallel.comms import Comms
from microparallel.errors import UsageError
from microparallel.program import AllReduce, Named, moments, moments_gradient
from microparallel.torch_private import AnyBatchNorm, BatchNorm, not_compiled

Model = TypeVar("Model", bound=nn.Module)
_DIMENSIONS = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)}


class Follower(Protocol):
    """Who wants to know of a layer's sums, and says how much this rank's gradients count: the reducer of a model."""

    @property
    def weight(self) -> float:
        """How much this rank's gradients count, beside those of the other ranks."""

    def layer_sums(self, layer: int, of_gradient: bool) -> None:
        """The layer of this number is about to sum over the ranks, in forward or in backward."""


class SyncBatchNorm(AnyBatchNorm):
    """A BatchNorm of any dimensions whose mean and variance in training are those of all ranks' samples together.

    Ranks may have different numbers of samples, also none: every sample counts alike. Outputs, gradients and running
    statistics are those of one process with the whole batch. Every rank must call the layer equally often in training;
    in evaluation (`eval()`) nothing is sent. It works on the CPU, on GPUs and where ranks have both, in
    `mp.DataParallel`, in torch's DistributedDataParallel, and in a script of your own that sums gradients.

    Args:
        features: how many channels the inputs have, in their dimension 1.
        comms: the ranks. Every rank makes the layer, at the same time.
        options: those of torch's BatchNorm: eps, momentum, affine, track_running_stats, device, dtype.

    Attributes:
        number: among the layers of its model; its operations have it in their names.
    """

    def __init__(self, features: int, comms: Comms, **options: Any) -> None:
        super().__init__(features, **options)
        self._talk_over(_own_group(comms), 0)

    @classmethod
    def convert(cls, model: Model, comms: Comms) -> Model:
        """Let every BatchNorm of a model normalise over all ranks, and return the model; every rank calls this.

        Layers are converted in place: they keep their parameters, statistics, hooks and names. So an optimizer that was
        made before stays right, and state dicts fit before and after. Convert first, then wrap the model.

        Args:
            model: a model with BatchNorm1d, 2d or 3d in it, or torch's own SyncBatchNorm, at any depth.
            comms: the ranks.

        Example:
            ```python
            model = mp.DataParallel(mp.SyncBatchNorm.convert(build_model(), comms), comms)
            ```
        """
        layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, BatchNorm)]
        for name, layer in layers:
            _require_convertible(name, layer)
        group = _own_group(comms) if layers else comms
        for number, (_, layer) in enumerate(layers):
            dimensions = _DIMENSIONS.get(type(layer), ())
            layer.__class__ = cls
            cast(SyncBatchNorm, layer)._talk_over(group, number, dimensions)
        return model

    def _talk_over(self, comms: Comms, number: int, dimensions: tuple[int, ...] = ()) -> None:
        self.number = number
        self._comms = comms
        self._dimensions = dimensions  # that inputs may have; with none given, 2 or more
        self._follower: weakref.ref[Follower] | None = None

    def follow(self, follower: Follower, number: int) -> None:
        """Let a model's reducer know of this layer's sums, by this number."""
        self.number = number
        self._follower = weakref.ref(follower)

    def check_dimensions(self, inputs: torch.Tensor) -> None:
        """Raise `ValueError`, as torch's layers do, for inputs with other dimensions than theirs."""
        fits = inputs.dim() in self._dimensions if self._dimensions else inputs.dim() >= 2
        if not fits:
            wanted = " or ".join(f"{count}D" for count in self._dimensions) or "at least 2D"
            raise ValueError(f"expected {wanted} input (got {inputs.dim()}D input)")

    @not_compiled
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Normalise; in training with the mean and variance over all ranks."""
        if not self.training or self._comms.world_size == 1:
            return super().forward(inputs)
        self.check_dimensions(inputs)
        found = self._over_all_ranks(inputs.detach())
        self._update_running(found)
        outputs: torch.Tensor = _Normalise.apply(inputs, self.weight, self.bias, found, self)  # type: ignore[no-untyped-call]
        return outputs

    def _over_all_ranks(self, inputs: torch.Tensor) -> Moments:
        """The count, mean and variance of all ranks' samples: each rank fills a row, and their sum has all rows."""
        values = inputs.to(_precise(inputs.dtype))
        features, count = inputs.shape[1], inputs.numel() // max(1, inputs.shape[1])
        rows = values.new_zeros(self._comms.world_size, 1 + 2 * features)
        if count:
            variance, mean = torch.var_mean(values, _all_but_channels(inputs), correction=0)
            rows[self._comms.rank] = torch.cat([mean.new_tensor([count]), mean, variance])
        self.sum_over_ranks(rows, of_gradient=False)
        counts, means, variances = torch.split(rows, [1, features, features], dim=1)
        total = int(counts.sum())
        if total < 2:
            raise ValueError(f"expected more than 1 value per channel in training; all ranks together have {total}")
        mean = (counts * means).sum(0) / total
        variance = (counts * (variances + (means - mean).square())).sum(0) / total
        return Moments(total, mean, variance)

    def sum_over_ranks(self, tensor: torch.Tensor, *, of_gradient: bool) -> None:
        """All-reduce a tensor: what this layer sums in forward, or in backward."""
        follower = self._follower() if self._follower is not None else None
        if follower is not None:
            follower.layer_sums(self.number, of_gradient)
        value = moments_gradient(self.number) if of_gradient else moments(self.number)
        self._comms.all_reduce(tensor, operation=AllReduce(value, "dp"))

    @property
    def weight_of_gradients(self) -> float:
        """How much this rank's gradients will count, beside those of the other ranks."""
        follower = self._follower() if self._follower is not None else None
        return 1.0 if follower is None else follower.weight

    @torch.no_grad()
    def _update_running(self, found: Moments) -> None:
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.running_mean is None or self.running_var is None:
            return
        part = self.momentum
        if part is None:  # the mean of all batches so far
            part = 1.0 / float(self.num_batches_tracked or 1)
        unbiased = found.variance * (found.total / (found.total - 1))
        self.running_mean.lerp_(found.mean.to(self.running_mean.dtype), part)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), part)

    def __getstate__(self) -> dict[str, Any]:
        """What is copied or pickled: not which model's reducer it tells of its sums; a Comms refuses to be pickled."""
        return vars(self) | {"_follower": None}


class Moments(NamedTuple):
    """Of all ranks' samples: how many values each channel has, their mean, and their variance (divided by how many)."""

    total: int
    mean: torch.Tensor
    variance: torch.Tensor


class _Normalise(torch.autograd.Function):
    """Normalise with given moments; backward knows that they came from the samples of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        found: Moments,
        layer: SyncBatchNorm,
    ) -> torch.Tensor:
        precise = found.mean.dtype
        scale, shift = (None if one is None else one.to(precise) for one in (weight, bias))
        ctx.save_for_backward(inputs, weight, found.mean, (found.variance + layer.eps).rsqrt())
        ctx.total, ctx.layer = found.total, layer
        if not inputs.numel():
            return inputs.clone()
        outputs = functional.batch_norm(
            inputs.to(precise), found.mean, found.variance, scale, shift, training=False, eps=layer.eps
        )
        return outputs.to(inputs.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight, mean, inverse = ctx.saved_tensors
        others = _all_but_channels(inputs)
        shape = [1, -1] + [1] * (inputs.dim() - 2)
        gradient = gradient.to(mean.dtype)
        normal = (inputs.to(mean.dtype) - mean.view(shape)) * inverse.view(shape)
        of_bias, of_weight = gradient.sum(others), (gradient * normal).sum(others)
        of_inputs = None
        if ctx.needs_input_grad[0]:
            of_mean, of_deviation = _sum_gradients(ctx.layer, of_bias, of_weight, len(inputs)) / ctx.total
            scale = inverse if weight is None else inverse * weight.to(mean.dtype)
            of_inputs = normal.mul_(-of_deviation.view(shape)).add_(gradient).sub_(of_mean.view(shape))
            of_inputs = of_inputs.mul_(scale.view(shape)).to(inputs.dtype)
        affine = weight is not None
        return (
            of_inputs,
            of_weight.to(weight.dtype) if affine and ctx.needs_input_grad[1] else None,
            of_bias.to(weight.dtype) if affine and ctx.needs_input_grad[2] else None,
            None,
            None,
        )


def _sum_gradients(layer: SyncBatchNorm, of_bias: torch.Tensor, of_weight: torch.Tensor, samples: int) -> torch.Tensor:
    """Sum what the losses of all ranks say about this layer's mean and deviation, in units of this rank's loss.

    `DataParallel.weighted` multiplies a rank's gradients by its weight, but only when they are complete. What comes
    from the losses of other ranks must count by their weights, so it comes with these, divided by this rank's.
    """
    weight = layer.weight_of_gradients
    together = torch.stack([of_bias, of_weight]).mul_(weight)
    layer.sum_over_ranks(together, of_gradient=True)
    if not weight and samples:
        raise UsageError(
            f"SyncBatchNorm: weighted(0) on a rank that has {samples} samples: they are in the mean and variance "
            "of all ranks, so their gradients cannot count nothing; pass an empty batch, or a weight above 0"
        )
    return together.div_(weight or 1.0)


def _precise(dtype: torch.dtype) -> torch.dtype:
    """What moments are computed in: as torch's BatchNorm, at least in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _all_but_channels(inputs: torch.Tensor) -> list[int]:
    return [dimension for dimension in range(inputs.dim()) if dimension != 1]


def _own_group(comms: Comms) -> Comms:
    """The same ranks, with an order of calls of their own: a layer's sums do not wait for buckets on their way."""
    group = comms.group(range(comms.world_size))
    assert group is not None
    return group


def _require_convertible(name: str, layer: nn.Module) -> None:
    if isinstance(layer, SyncBatchNorm):
        raise UsageError(f"SyncBatchNorm.convert: {name or 'this layer'} has been converted before")
    kind = type(layer)
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
        raise UsageError(
            f"SyncBatchNorm.convert: {name or kind.__name__} does not know its channels yet; "
            "call the model on a batch first, then convert it"
        )
    if kind is not nn.SyncBatchNorm and kind.forward is not nn.BatchNorm1d.forward:
        raise UsageError(
            f"SyncBatchNorm.convert: {name or 'this layer'} is a {kind.__name__}, whose own forward would be lost; "
            "use BatchNorm1d, 2d or 3d there, or mp.SyncBatchNorm itself"
        )


# ── the sums that layers do inside of a pass, for the program ───────────────────────────────────────────────────────


class LayerSum(NamedTuple):
    """One sum of a layer, and when it is done.

    Attributes:
        arrived: how many gradients there are before it in this backward; -1 for a sum in forward.
        layer: the number of the layer.
        of_gradient: whether it is the one of backward.
    """

    arrived: int
    layer: int
    of_gradient: bool

    @property
    def value(self) -> Named:
        """What is summed."""
        return moments_gradient(self.layer) if self.of_gradient else moments(self.layer)


class LayerSums:
    """Which sums the layers of one model do in a pass, in which order.

    Before the first backward it assumes that layers are called in the order of registration, once each. After it, it
    expects what was seen in it.

    Attributes:
        layers: the model's, in the order of registration.
        seen: in this pass, so far.
    """

    def __init__(self, module: nn.Module) -> None:
        self.layers = [layer for layer in module.modules() if isinstance(layer, SyncBatchNorm)]
        self.seen: list[LayerSum] = []
        self._expected: list[LayerSum] | None = None
        self._at_first = _in_order_of_registration(module, self.layers) if self.layers else []

    @property
    def synchronise(self) -> bool:
        """Whether some layer talks in the next forward."""
        return any(layer.training for layer in self.layers)

    def expect(self, sums: Iterable[Sequence[int]]) -> None:
        """Expect these sums in each pass from now on: the numbers of each `LayerSum`."""
        self._expected = [LayerSum(arrived, layer, bool(of_gradient)) for arrived, layer, of_gradient in sums]

    def in_slots(self, complete: Sequence[int]) -> tuple[tuple[Named, ...], ...]:
        """The values that are summed in forward; then, for each bucket, those before its sum; then those after all.

        Args:
            complete: for each bucket, how many gradients there are when its all-reduce leaves.
        """
        if not self.synchronise:
            return ()
        slots: list[list[Named]] = [[] for _ in range(len(complete) + 2)]
        known = {one.layer for one in self._expected or ()}
        sums = [*(self._expected or ()), *(one for one in self._at_first if one.layer not in known)]
        for one in sums:
            if self.layers[one.layer].training:
                before = sum(count <= one.arrived for count in complete)
                slots[0 if one.arrived < 0 else 1 + before].append(one.value)
        return tuple(map(tuple, slots))


def _in_order_of_registration(module: nn.Module, layers: Sequence[SyncBatchNorm]) -> list[LayerSum]:
    numbers = {layer: number for number, layer in enumerate(layers)}
    trained = len([parameter for parameter in module.parameters() if parameter.requires_grad])
    seen: set[nn.Parameter] = set()
    arrived = {}  # gradients that come before those of the layer itself, as backward begins at the end
    for part in module.modules():
        seen |= {parameter for parameter in part.parameters(recurse=False) if parameter.requires_grad}
        if part in numbers:
            arrived[numbers[part]] = trained - len(seen)
    forward = [LayerSum(-1, number, False) for number in range(len(layers))]
    return [*forward, *(LayerSum(arrived[number], number, True) for number in reversed(range(len(layers))))]
