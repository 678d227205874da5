"""What goes wrong in a learner's backward, as types: torch raises a bare RuntimeError for all of it.

The two mistakes can be read off the graph, before torch begins and whatever torch says about them: a backward begins at
a tensor that is no loss and is given no gradient, or it meets nodes that an earlier backward has gone through and
emptied.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

_MARK = "microparallel: a backward went through"  # a key of Node.metadata, which lives as long as the node


class NoFirstGradient(RuntimeError):
    """A backward was started, without a gradient, from a tensor that is not one number."""


class SecondBackward(RuntimeError):
    """A backward came to a part of a graph that an earlier backward had gone through."""


class TypedBackwards(TorchFunctionMode):
    """While a rank's thread has entered it, backwards of that thread that torch refuses raise the types above.

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
        notes: list[Any] = [node.metadata for node in _graph(_each(args[0]))]  # dicts, though torch's types deny it
        emptied = any(_MARK in note for note in notes)
        if not (named.get("retain_graph") or named.get("create_graph")):
            for note in notes:
                note[_MARK] = True
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
