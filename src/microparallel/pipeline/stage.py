"""One stage of a model: forward, backward whole or in halves, and what crosses the boundary to the next stage.

A rank must know the shapes of what it receives before it arrives. So for each new shape of the batch, a stage is run on
torch's meta device first (`DryRun`), and its rank describes to the next what it returns (`Boundary`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from microparallel.comms.calls import describe_content
from microparallel.errors import PartitionError, UsageError
from microparallel.pipeline.layers import NamedLayer, buffers_left_as_found, left_as_found, may_draw
from microparallel.pipeline.parts import Part
from microparallel.pipeline.precision import StagePrecision
from microparallel.pipeline.split_backward import DeferredGradients, DeferringLinear, SplitBackward
from microparallel.pipeline.stand_ins import on_meta
from microparallel.torch_private import pytree, version_of

LossFunction = Callable[[Any, Any], torch.Tensor]
Plain = str | int | float | bool | None


class Stage:
    """Some neighbouring layers of the model, on the rank that has them.

    Args:
        index: the number of the stage.
        layers: its layers, by their names in the whole model.
        loss_fn: in the last stage, computes the loss from the outputs and the targets; without one, its last layer is
            called with the targets, and returns the loss.
        recompute: keep only the input of a micro-batch, and compute its activations again when its backward comes.
        precision: in which dtypes it computes; None: in those of its input and its parameters.
        first_layer: the number that its first layer has in the whole model.

    Attributes:
        copies_input: the stage changes its input in place, so it is given a copy.
        splits: the schedule does its backward in two halves.
        is_last: no stage comes after it.
        precision: in which dtypes it computes.
    """

    def __init__(
        self,
        index: int,
        layers: Sequence[NamedLayer],
        loss_fn: LossFunction | None,
        recompute: bool = False,
        precision: StagePrecision | None = None,
        first_layer: int = 0,
    ) -> None:
        self.index = index
        self.layers = layers
        self._first_layer = first_layer
        self.loss_fn = loss_fn
        self.copies_input = False
        self.splits = False
        self.is_last = False
        self.precision = StagePrecision() if precision is None else precision
        self._recompute = recompute

    @functools.cached_property
    def modules(self) -> list[nn.Module]:
        """Its layers, without their names."""
        return [layer.module for layer in self.layers]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Its parameters by their names in the whole model; a parameter that has two names is yielded twice."""
        for layer in self.layers:
            yield from layer.named_parameters()

    # ── forward ─────────────────────────────────────────────────────────────────────────────────────────────────

    def forward(
        self,
        boundary: Boundary,
        inputs: Sequence[torch.Tensor],
        targets: Any = None,
        before_layer: Callable[[int], None] | None = None,
        *,
        moves_buffers: bool = True,
    ) -> tuple[Any, list[torch.Tensor], DeferredGradients]:
        """Apply the layers to the input.

        Args:
            boundary: describes the input.
            inputs: its tensors.
            targets: for the last stage, to compute the loss.
            before_layer: is called with the number that a layer has in the whole model before that layer computes, also
                when it computes again, if it may draw random numbers; and before the loss, which has the next number.
            moves_buffers: whether buffers, such as BatchNorm's running statistics, stay as the layers leave them.

        Returns:
            The outputs, or with targets the loss; those leaves of the input that will get gradients; and the weight
            gradients that backward will defer.
        """
        value, leaves = as_inputs(boundary, inputs, self.copies_input)
        deferred = DeferredGradients()
        with nullcontext() if moves_buffers else buffers_left_as_found(self.modules):
            if self._recompute and torch.is_grad_enabled():
                again = functools.partial(checkpoint, use_reentrant=False, context_fn=self._computing_again)
                return again(self._apply, value, targets, before_layer), leaves, deferred
            if not self.splits or not torch.is_grad_enabled():
                return self._apply(value, targets, before_layer), leaves, deferred
            with DeferringLinear(deferred):
                return self._apply(value, targets, before_layer), leaves, deferred

    def _computing_again(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Around a forward and its repetition: the second must not count in running statistics once more."""
        return nullcontext(), buffers_left_as_found(self.modules)

    def _apply(self, value: Any, targets: Any, before_layer: Callable[[int], None] | None) -> Any:
        *layers, last = self.modules
        tell = before_layer or (lambda _: None)
        for place, layer in enumerate(layers):
            if place in self._drawing:
                tell(self._first_layer + place)
            value = layer(value)
        if len(layers) in self._drawing:
            tell(self._first_layer + len(layers))
        if targets is None:
            return self.precision.outside(last(value)) if self.is_last else self.precision.inside(last(value))
        if self.loss_fn is None:
            return self.precision.outside(last(value, targets))
        outputs = self.precision.outside(last(value))
        tell(self._first_layer + len(self.layers))
        return self.loss_fn(outputs, targets)

    @functools.cached_property
    def _drawing(self) -> set[int]:
        """The places of its layers that may draw random numbers."""
        return {place for place, layer in enumerate(self.modules) if may_draw(layer)}

    # ── backward ────────────────────────────────────────────────────────────────────────────────────────────────

    def backward(self, saved: SavedForward, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Add to the weights' gradients, and return the input's."""
        if saved.outputs:
            torch.autograd.backward(saved.outputs, list(gradients))
        saved.deferred.add_up()
        return [_or_zeros(leaf.grad, leaf) for leaf in saved.leaves]

    def backward_input(self, saved: SavedForward, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the input's gradients; `saved` keeps what the weights' gradients need."""
        saved.split = SplitBackward(saved.outputs, saved.leaves, whole=self._recompute)
        found = saved.split.input_half(list(gradients))
        return [_or_zeros(gradient, leaf) for gradient, leaf in zip(found, saved.leaves, strict=True)]

    def backward_weight(self, saved: SavedForward) -> None:
        """Add to the weights' gradients, after `backward_input`."""
        if saved.split is not None:
            saved.split.weight_half()
        saved.deferred.add_up()

    @functools.cached_property
    def parameters(self) -> list[nn.Parameter]:
        """Its parameters, each once."""
        return list(dict.fromkeys(parameter for _, parameter in self.named_parameters()))


def _or_zeros(gradient: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """A part of the input that the outputs do not depend on has a gradient of zero."""
    return torch.zeros_like(like) if gradient is None else gradient


@dataclass
class SavedForward:
    """What a stage keeps of one micro-batch, from its forward until the backward of its weights.

    Attributes:
        leaves: those tensors of its input that get gradients.
        outputs: those tensors of its output that have gradients.
        deferred: the weight gradients that its linear layers defer.
        split: its backward, between the input half and the weight half.
    """

    leaves: list[torch.Tensor]
    outputs: list[torch.Tensor]
    deferred: DeferredGradients = field(default_factory=DeferredGradients)
    split: SplitBackward | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that is kept outside of torch's graph."""
        return [*self.leaves, *self.outputs, *self.deferred.tensors]


# ── what crosses a boundary ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Content:
    """The shape and dtype of a tensor that crosses a boundary, and whether its gradient comes back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool

    def __str__(self) -> str:
        return describe_content(self.dtype, self.shape)


@dataclass(frozen=True)
class Boundary:
    """What crosses a boundary for one micro-batch: a tree whose leaves are tensors, or plain values such as None.

    Plain values are not sent in a step: both ranks know them from this description.
    """

    tree: pytree.TreeSpec
    leaves: tuple[Content | Plain, ...]

    @classmethod
    def of(cls, value: Any, what: str) -> Boundary:
        """Describe a value."""
        leaves, tree = pytree.tree_flatten(value)
        return cls(tree, tuple(_leaf(leaf, what) for leaf in leaves))

    @property
    def contents(self) -> list[Content]:
        """The tensors that are sent."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Content)]

    @property
    def gradients(self) -> list[Content]:
        """The tensors whose gradients are sent back."""
        return [content for content in self.contents if content.needs_gradient]

    def without_gradients(self) -> Boundary:
        """The same without gradients: the batch itself needs none."""
        leaves = (replace(leaf, needs_gradient=False) if isinstance(leaf, Content) else leaf for leaf in self.leaves)
        return replace(self, leaves=tuple(leaves))

    def put_together(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The value itself, from its tensors."""
        rest = iter(tensors)
        return self.tree.unflatten([next(rest) if isinstance(leaf, Content) else leaf for leaf in self.leaves])

    def __str__(self) -> str:
        """The tensors' dtypes and shapes, in the tree that holds them."""
        names = [_Name(str(leaf)) for leaf in self.leaves]
        return str(self.tree.unflatten(names))

    def to_json(self) -> str:
        """The description as a text for the other ranks."""
        leaves = [
            [str(leaf.dtype).removeprefix("torch."), leaf.shape, leaf.needs_gradient]
            if isinstance(leaf, Content)
            else {"plain": leaf}
            for leaf in self.leaves
        ]
        try:
            return json.dumps([pytree.treespec_dumps(self.tree), leaves])
        except NotImplementedError:
            raise UsageError(
                f"{self} cannot be described to another rank: return tuples, lists and dicts from a stage, and no "
                "classes of your own"
            ) from None

    @classmethod
    def from_json(cls, text: str) -> Boundary:
        """The description that `to_json` wrote."""
        tree, leaves = json.loads(text)
        return cls(
            pytree.treespec_loads(tree),
            tuple(
                Content(tuple(leaf[1]), getattr(torch, leaf[0]), leaf[2]) if isinstance(leaf, list) else leaf["plain"]
                for leaf in leaves
            ),
        )


class _Name(str):
    """A string whose `repr` has no quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _leaf(leaf: Any, what: str) -> Content | Plain:
    if isinstance(leaf, torch.Tensor):
        if leaf.layout != torch.strided:
            raise UsageError(f"{what} holds a {leaf.layout} tensor, which cannot be sent; use tensor.to_dense()")
        return Content(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    if leaf is None or isinstance(leaf, str | int | float | bool):
        return leaf
    raise UsageError(
        f"{what} holds a {type(leaf).__name__}, and only tensors, plain values and tuples, lists and dicts of them "
        "cross a boundary"
    )


def as_inputs(boundary: Boundary, tensors: Sequence[torch.Tensor], copy_first: bool) -> tuple[Any, list[torch.Tensor]]:
    """The input of a stage, and those leaves of it that will get gradients.

    A stage that changes its input in place gets a copy: a leaf must not be changed, nor a tensor that another stage has
    saved for its backward.
    """
    leaves = [tensor.detach() for tensor in tensors]
    wanted = []
    for leaf, content in zip(leaves, boundary.contents, strict=True):
        if content.needs_gradient and torch.is_grad_enabled():
            wanted.append(leaf.requires_grad_())
    given = [leaf.clone() for leaf in leaves] if copy_first else leaves
    return boundary.put_together(given), wanted


# ── what a stage returns, without computing it ──────────────────────────────────────────────────────────────────────


class DryRun:
    """A copy of a stage on torch's meta device, where tensors have shapes and no contents; finds what a stage returns.

    Inside of `torch.autocast`, which does nothing on that device, the stage itself is run, on zeros.

    Args:
        index: the number of the stage.
        layers: its layers.
        precision: in which dtypes it computes.
        device: on which the stage itself is.

    Attributes:
        changes_input: the stage changes its input in place, and must be given a copy.
    """

    def __init__(
        self,
        index: int,
        layers: Sequence[nn.Module],
        precision: StagePrecision | None = None,
        device: torch.device | None = None,
    ) -> None:
        copies: dict[int, Any] = {}  # one for all layers, so that tied parameters stay tied
        self._index = index
        self._real = layers
        self._layers = [layer.dry() if isinstance(layer, Part) else on_meta(layer, copies) for layer in layers]
        self._real_precision = StagePrecision() if precision is None else precision
        self._precision = self._real_precision.without_contents(self._layers)
        self._device = torch.device("cpu") if device is None else device
        self.changes_input = False

    def outputs(self, inputs: Boundary, training: bool) -> Boundary:
        """Describe what the stage returns, in the mode that its modules are in; in training, with gradients."""
        if torch.is_autocast_enabled(self._device.type):
            return self._real_outputs(inputs, training)
        for layer, real in zip(self._layers, self._real, strict=True):
            # The modules of a part that are not its own are skipped, in either mode.
            for module, original in zip(layer.modules(), real.modules(), strict=not isinstance(layer, Part)):
                module.training = original.training
        with (
            torch.random.fork_rng(devices=[]),
            torch.set_grad_enabled(training),
            torch.device("meta"),
            self._precision.computing(),
        ):
            outputs = self._run(inputs, self._layers, torch.device("meta"))
            return Boundary.of(outputs, f"what stage {self._index} returns")

    def _real_outputs(self, inputs: Boundary, training: bool) -> Boundary:
        devices = [self._device] if self._device.type == "cuda" else []
        with (
            torch.random.fork_rng(devices),
            torch.set_grad_enabled(training),
            left_as_found(self._real),
            self._real_precision.computing(),
        ):
            outputs = self._run(inputs, self._real, self._device)
            return Boundary.of(outputs, f"what stage {self._index} returns")

    def _run(self, inputs: Boundary, layers: Sequence[nn.Module], device: torch.device) -> Any:
        try:
            try:
                return self._apply(inputs, layers, device)
            except RuntimeError:
                # autograd refuses to change a leaf in place, and lets a layer change a copy of it
                if self.changes_input:
                    raise
                self.changes_input = True
                return self._apply(inputs, layers, device)
        except UsageError:
            raise
        except Exception as error:
            raise PartitionError(
                f"the dry run of stage {self._index} on {inputs} failed: {type(error).__name__}: {error}\n"
                "  stages are run on torch's meta device first, to learn what they return; a layer that reads the "
                "contents of tensors in Python, or makes tensors on a device of its own choice, cannot be"
            ) from error

    def _apply(self, inputs: Boundary, layers: Sequence[nn.Module], device: torch.device) -> Any:
        """Run the layers on zeros, or without contents, as a stage gets its input: cut off from the stage before."""
        tensors = [torch.zeros(content.shape, dtype=content.dtype, device=device) for content in inputs.contents]
        value, _ = as_inputs(inputs, tensors, self.changes_input)
        for layer in layers:
            value = layer(value)
        # torch counts how often a tensor was changed in place. Views count together, as micro-batches of a batch do.
        self.changes_input |= any(version_of(tensor) for tensor in tensors)
        return self._precision.inside(value)
