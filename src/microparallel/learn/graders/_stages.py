"""A pipeline's stage that counts what a learner's code does with it, and types for what goes wrong in a backward.

torch raises a bare RuntimeError for every backward that it refuses. Two mistakes can be read off the graph before torch
begins: a backward begins at a tensor that is no loss and is given no gradient, or it meets nodes that an earlier
backward has gone through and emptied.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from microparallel.learn.graders._common import WIDTH
from microparallel.learn.log import Log
from microparallel.learn.verdict import Wrong
from microparallel.observe import Activity
from microparallel.program import Backward, Forward

_MARK = "microparallel: a backward went through"  # a key of Node.metadata, which lives as long as the node


class CountedStage(nn.Module):
    """A rank's layers, which tell the rank's log of every forward and backward.

    Attributes:
        most_kept: the most micro-batches at once whose outputs the learner's code held after their backward.
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
        """Compute, and tell the log."""
        self._require_proper(inputs)
        work = _Work(self._forwards)
        self._forwards += 1
        self._count_kept()
        self._alive.add(work)
        self._log.begins(Activity(Forward(self.rank, work.microbatch)))
        outputs: torch.Tensor = _Meter.apply(self.layers(inputs), self, work)  # type: ignore[no-untyped-call]
        return outputs

    def backward_begins(self, work: _Work) -> None:
        """Tell the log that the gradient of a micro-batch's outputs has come."""
        self._count_kept()
        work.done = True
        self._log.begins(Activity(Backward(self.rank, work.microbatch)))

    def _count_kept(self) -> None:
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
    """Passes numbers and gradients on as they are, and tells the stage when a gradient comes."""

    @staticmethod
    def forward(context: Any, outputs: torch.Tensor, stage: CountedStage, work: _Work) -> torch.Tensor:
        """Keep the work alive as long as the graph of the outputs."""
        context.stage, context.work = stage, work
        return outputs.view_as(outputs)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        """Tell the stage that the backward has begun."""
        context.stage.backward_begins(context.work)
        return gradients[0], None, None


# ── backwards that torch refuses ──────────────────────────────────────────────────────────────────────────────────────


class NoFirstGradient(RuntimeError):
    """A backward was started, without a gradient, from a tensor that is not one number."""


class SecondBackward(RuntimeError):
    """A backward came to a part of a graph that an earlier backward had gone through."""


class TypedBackwards(TorchFunctionMode):
    """While a rank's thread has entered it, a backward of that thread that torch refuses raises one of the types above.

    Only a backward that torch refuses is given a type: what torch accepts (a graph that is kept with retain_graph, a
    node that needs nothing of what was freed) goes on as it would without this.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch for every function that the thread calls; those that start a backward are looked at."""
        named = kwargs or {}
        if func not in _GRADIENT:
            return func(*args, **named)
        marks: list[Any] = [node.metadata for node in _graph(_each(args[0]))]  # dicts, though torch's types deny it
        emptied = any(_MARK in mark for mark in marks)
        if not (named.get("retain_graph") or named.get("create_graph")):
            for mark in marks:
                mark[_MARK] = True
        try:
            return func(*args, **named)
        except RuntimeError as error:
            if _lacks_gradient(_each(args[0]), _each(named.get(_GRADIENT[func]))):
                raise NoFirstGradient(*error.args) from error
            if emptied:
                raise SecondBackward(*error.args) from error
            raise


# What starts a backward; torch hands over the gradients to begin with under these names.
_GRADIENT: dict[Callable[..., Any], str] = {
    torch.Tensor.backward: "gradient",
    torch.autograd.backward: "grad_tensors",
    torch.autograd.grad: "grad_outputs",
}


def _each(tensors: Any) -> list[torch.Tensor | None]:
    """The tensors of an argument that may be one, several or none."""
    return [tensors] if tensors is None or isinstance(tensors, torch.Tensor) else list(tensors)


def _lacks_gradient(roots: Iterable[torch.Tensor | None], given: Iterable[torch.Tensor | None]) -> bool:
    """Whether a backward begins at a tensor of several numbers, and was not given the gradient of them."""
    return any(
        isinstance(root, torch.Tensor) and root.requires_grad and root.numel() != 1 and gradient is None
        for root, gradient in itertools.zip_longest(roots, given)
    )


def _graph(roots: Iterable[torch.Tensor | None]) -> Iterator[Node]:
    """Every node that a backward from these tensors comes to, but not the leaves: all graphs of a weight share its."""
    found: set[Node] = set()
    ahead = [root.grad_fn for root in roots if isinstance(root, torch.Tensor)]
    while ahead:
        node = ahead.pop()
        if node is None or node in found or not node.next_functions:
            continue
        found.add(node)
        yield node
        ahead += [following for following, _ in node.next_functions]
