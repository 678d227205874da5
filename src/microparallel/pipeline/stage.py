"""What crosses a boundary between stages: a tensor, or a tuple or dict of them, described before anything is computed.

A receiver must know what arrives before it arrives. So for each new shape of the batch, a stage is run on torch's meta
device, where tensors have shapes and no contents, and tells the next stage what it returns.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from microparallel.comms.calls import describe_content
from microparallel.errors import PartitionError, UsageError
from microparallel.pipeline.layers import NamedLayer
from microparallel.pipeline.split_backward import PutOff, PuttingOff, SplitBackward
from microparallel.torch_private import pytree, version_of

Plain = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Content:
    """A tensor that crosses a boundary; if it needs one, its gradient comes back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool

    def __str__(self) -> str:
        return describe_content(self.dtype, self.shape)


@dataclass(frozen=True)
class Boundary:
    """All that crosses a boundary for one micro-batch: a tree whose leaves are tensors, or plain values such as None.

    Plain values do not travel: both sides know them.
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
        """The tensors that travel."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Content)]

    @property
    def gradients(self) -> list[Content]:
        """The tensors whose gradients come back."""
        return [content for content in self.contents if content.needs_gradient]

    def without_gradients(self) -> Boundary:
        """The same, where nobody wants gradients: a batch."""
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
        """A text for the other ranks."""
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
        """Read it back."""
        tree, leaves = json.loads(text)
        return cls(
            pytree.treespec_loads(tree),
            tuple(
                Content(tuple(leaf[1]), getattr(torch, leaf[0]), leaf[2]) if isinstance(leaf, list) else leaf["plain"]
                for leaf in leaves
            ),
        )


class _Name(str):
    """Shows itself without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _leaf(leaf: Any, what: str) -> Content | Plain:
    if isinstance(leaf, torch.Tensor):
        if leaf.layout != torch.strided:
            raise UsageError(f"{what} holds a {leaf.layout} tensor, which cannot travel; use tensor.to_dense()")
        return Content(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    if leaf is None or isinstance(leaf, str | int | float | bool):
        return leaf
    raise UsageError(
        f"{what} holds a {type(leaf).__name__}, and only tensors, plain values and tuples, lists and dicts of them "
        "cross a boundary"
    )


class DryRun:
    """A stage without contents: what it returns for an input, found without computing it."""

    def __init__(self, index: int, layers: Sequence[nn.Module]) -> None:
        hollow: dict[int, Any] = {}  # shared, so that what is tied stays tied
        self._index = index
        self._real = layers
        self._layers = [_hollow(layer, hollow) for layer in layers]
        self.changes_input = False  # it changes its input in place, and must be given a copy

    def outputs(self, inputs: Boundary, training: bool) -> Boundary:
        """Describe what the stage returns, in the mode that its modules are in; in training, with gradients."""
        for layer, real in zip(self._layers, self._real, strict=True):
            for module, original in zip(layer.modules(), real.modules(), strict=True):
                module.training = original.training
        with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(training), torch.device("meta"):
            return Boundary.of(self._run(inputs), f"what stage {self._index} returns")

    def _run(self, inputs: Boundary) -> Any:
        try:
            try:
                return self._apply(inputs)
            except RuntimeError:
                # autograd refuses to change in place what a gradient is needed for; of a copy, it does not
                if self.changes_input:
                    raise
                self.changes_input = True
                return self._apply(inputs)
        except UsageError:
            raise
        except Exception as error:
            raise PartitionError(
                f"the dry run of stage {self._index} on {inputs} failed: {type(error).__name__}: {error}\n"
                "  stages are run on torch's meta device first, to learn what they return; a layer that reads the "
                "contents of tensors in Python, or makes tensors on a device of its own choice, cannot be"
            ) from error

    def _apply(self, inputs: Boundary) -> Any:
        """Run the layers on tensors without contents, as a stage gets them: cut off from the stage before."""
        tensors = [torch.empty(content.shape, dtype=content.dtype, device="meta") for content in inputs.contents]
        value, _ = as_inputs(inputs, tensors, self.changes_input)
        for layer in self._layers:
            value = layer(value)
        # A tensor counts how often it was changed. Micro-batches are views of one batch, and count together.
        self.changes_input |= any(version_of(tensor) for tensor in tensors)
        return value


def as_inputs(boundary: Boundary, tensors: Sequence[torch.Tensor], copy_first: bool) -> tuple[Any, list[torch.Tensor]]:
    """What a stage is given, and those leaves of it that will have gradients.

    A stage that changes its input in place gets a copy: torch does not let anybody change a leaf, or what others saved
    for their backward.
    """
    leaves = [tensor.detach() for tensor in tensors]
    wanted = []
    for leaf, content in zip(leaves, boundary.contents, strict=True):
        if content.needs_gradient and torch.is_grad_enabled():
            wanted.append(leaf.requires_grad_())
    given = [leaf.clone() for leaf in leaves] if copy_first else leaves
    return boundary.put_together(given), wanted


def _hollow(layer: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy of a module on the meta device: its structure, without its contents."""
    for parameter in layer.parameters():
        if id(parameter) not in memo:
            empty = torch.empty_like(parameter, device="meta")
            memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in layer.buffers():
        memo.setdefault(id(buffer), torch.empty_like(buffer, device="meta"))
    return copy.deepcopy(layer, memo)


# One stage of a model on the rank that holds it: forward, and backward whole or in halves.


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
