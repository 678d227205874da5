"""Stand-ins: modules that take the place of others in a copy of a model, so that one rank can run its own part alone.

```
the model      embed ──→ block 0 ──→ block 1 ──→ block 2 ──→ head
stage 1 has    Skipped   Skipped     Entry       Exit
                 zeros →   zeros →     ↑ filled    ↓ what block 2 is called with goes to the next stage
                                       with what stage 0 sent
```

A stand-in has the attributes of the module whose place it takes, and is called instead of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from microparallel.errors import PartitionError, StageError
from microparallel.torch_private import present, pytree

CPU = torch.device("cpu")


def on_meta(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy of a module on torch's meta device: its structure, without its contents."""
    for parameter in module.parameters():
        if id(parameter) not in memo:
            empty = torch.empty_like(parameter, device="meta")
            memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo.setdefault(id(buffer), torch.empty_like(buffer, device="meta"))
    return copy.deepcopy(module, memo)


@dataclass
class Now:
    """What the stand-ins of one part know of the forward that is running.

    Attributes:
        arrived: the tensors that the part before sent.
        device: where tensors without contents are made.
        dry: no module has contents; what the part's own modules return is only described.
    """

    arrived: Sequence[torch.Tensor] = field(default_factory=list)
    device: torch.device = CPU
    dry: bool = False


class Reached(BaseException):
    """The forward has come to the module at which the next part begins; no `except Exception` of a model stops it."""

    def __init__(self, now: Now, tensors: list[Any]) -> None:
        super().__init__("the next part of the model begins here")
        self.now = now
        self.tensors = tensors


class StandIn(nn.Module):
    """Takes the place of a module, and has its attributes."""

    def __init__(self, original: nn.Module, now: Now) -> None:
        super().__init__()
        self.__dict__["original"] = original  # not as a child: its parameters are not this one's
        self.now = now

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "original" not in self.__dict__:
                raise
            return getattr(self.__dict__["original"], name)


class Entry(StandIn):
    """Where a part begins: what the part before sent takes the place of what was not computed here."""

    def __init__(self, original: nn.Module, now: Now, paths: Sequence[str]) -> None:
        super().__init__(original, now)
        present(self, original)
        self.paths = tuple(paths)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Fill the arguments and call the module.

        They are filled in place, so that they also arrive where the model uses them beside this module, as in
        `x = x + block(x)`.
        """
        for argument, tensor in zip(arguments(args, kwargs, self.paths), self.now.arrived, strict=True):
            if argument.dtype != tensor.dtype:
                raise StageError(
                    f"{tensor.dtype} arrived where {argument.dtype} was expected: the model's dtype was changed after "
                    "the pipeline was made; use pipe.to(dtype)"
                )
            argument.copy_(tensor)
        original = self.__dict__["original"]
        original.training = self.training
        return original(*args, **kwargs)


class Exit(StandIn):
    """Where the next part begins: the forward ends here, and what this module is called with is sent on."""

    def __init__(self, original: nn.Module, now: Now, paths: Sequence[str]) -> None:
        super().__init__(original, now)
        self.paths = tuple(paths)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """End the forward."""
        raise Reached(self.now, arguments(args, kwargs, self.paths))


def arguments(args: Any, kwargs: Any, paths: Sequence[str]) -> list[torch.Tensor]:
    """The tensors of a call at these paths."""
    found = dict(tensors_of((args, kwargs)))
    missing = [path for path in paths if path not in found]
    if missing:
        raise StageError(
            f"a module where the model is cut was called without the tensor {missing[0]} (0: arguments, 1: by name), "
            "which it had when the model was first looked at: pass a batch of the usual form as example="
        )
    return [found[path] for path in paths]


def tensors_of(value: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors in a value, each with its place as Python would write it: `[1]['attention_mask']`."""
    leaves, _ = pytree.tree_flatten_with_path(value)
    return [(pytree.keystr(path), leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor)]


class Form(NamedTuple):
    """A tensor that a skipped module would return: everything but its contents."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class _Known(dict[Hashable, tuple[list[Any], pytree.TreeSpec]]):
    """What a module returns for each form of its arguments; a copy of the module finds it out again."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Known:
        return _Known()


class Skipped(StandIn):
    """Stands for a module of another part: returns zeros in the form of what that module would return.

    The form is found on torch's meta device, once for each form of the arguments.

    Args:
        original: the module on the meta device.
        now: of the part.
        name: of the module in the whole model.
        own: the module is one of the part's own, in a dry run: what it returns needs gradients as its own would.
        called: is told of each call, and of what is returned.
    """

    def __init__(
        self,
        original: nn.Module,
        now: Now,
        name: str,
        own: bool = False,
        called: Callable[[str, Any, Any], None] | None = None,
    ) -> None:
        super().__init__(original, now)
        self._name = name
        self._own = own
        self._called = called
        self._known = _Known()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return zeros."""
        if self._called is not None:
            self._called(self._name, (args, kwargs), None)
        leaves, tree = pytree.tree_flatten((args, kwargs))
        with torch.set_grad_enabled(self._own and torch.is_grad_enabled()):
            key = (torch.is_grad_enabled(), self.training, tree, *map(_form, leaves))
            try:
                if key not in self._known:
                    self._known[key] = self._returned(leaves, tree)
                forms, form_of_all = self._known[key]
            except TypeError:  # an argument cannot be hashed
                forms, form_of_all = self._returned(leaves, tree)
        outputs = form_of_all.unflatten([self._zeros(form) for form in forms])
        if self._called is not None:
            self._called(self._name, None, outputs)
        return outputs

    def change_dtype(self, dtype: torch.dtype) -> None:
        """Stand for the module in another dtype."""
        self.__dict__["original"].to(dtype)
        self._known.clear()

    def _returned(self, leaves: list[Any], tree: pytree.TreeSpec) -> tuple[list[Any], pytree.TreeSpec]:
        original = self.__dict__["original"].train(self.training)
        args, kwargs = tree.unflatten([_without_contents(leaf) for leaf in leaves])
        try:
            with torch.random.fork_rng(devices=[]), torch.device("meta"):
                outputs = original(*args, **kwargs)
        except Exception as error:
            raise PartitionError(
                f"{self._name} ({type(original).__name__}) cannot be run without contents: "
                f"{type(error).__name__}: {error}\n  what other stages compute is run on torch's meta device, to learn "
                "what it returns; a module that reads the contents of tensors in Python cannot be"
            ) from error
        found, form = pytree.tree_flatten(outputs)
        return [_form(leaf) for leaf in found], form

    def _zeros(self, form: Any) -> Any:
        if not isinstance(form, Form):
            return form
        zeros = torch.zeros(form.shape, dtype=form.dtype, device=self.now.device)
        if not form.requires_grad:
            return zeros
        return zeros.requires_grad_().view_as(zeros)  # no leaf: a layer may change it in place


def _form(leaf: Any) -> Any:
    return Form(tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


def _without_contents(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    empty = torch.empty_like(leaf, device="meta", requires_grad=False)
    return empty.requires_grad_().view_as(empty) if leaf.requires_grad and torch.is_grad_enabled() else empty
