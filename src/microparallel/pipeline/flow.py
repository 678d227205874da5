"""What flows through a model between the places where it is cut, found by running it once without contents.

The model's own `forward` runs on the example, and every module that holds something of the model's state is a `Skipped`
stand-in, so nothing is computed but the code around them. At each cut, those arguments of the module there that come
from such modules must be sent; all others (masks, positions) every stage can make itself, from the batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from microparallel.pipeline.stand_ins import CPU, Now, Skipped, tensors_of
from microparallel.torch_private import pytree

# Functions that make Python values out of the contents of a tensor.
_READS = {"item", "tolist", "numpy", "equal", "allclose", "__bool__", "__int__", "__float__", "__index__"}
_READS |= {"__contains__"}

Call = Callable[[nn.Module, Any], Any]


@dataclass
class Flow:
    """What was found of a model that is cut before some of its modules.

    Attributes:
        cuts: the names of those modules, in the order in which they are called. The first begins segment 1.
        sent: for each cut, the places in the call of its module of the tensors that are sent there.
        segments: for each module with a state, by name, the segments in which it is called.
        calls: how often each module with a state is called.
        beside: for each cut that a tensor passes beside it (not in the call of its module), an operation that uses it.
        reads: for each segment that makes Python values out of what modules computed, the function with which it does.
        stale: the places in the model's output of tensors that were computed before the last cut.
    """

    cuts: list[str] = field(default_factory=list)
    sent: list[list[str]] = field(default_factory=list)
    segments: dict[str, set[int]] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    beside: dict[str, str] = field(default_factory=dict)
    reads: dict[int, str] = field(default_factory=dict)
    stale: list[str] = field(default_factory=list)


def flow(
    model: nn.Module, units: Mapping[str, tuple[nn.Module, nn.Module]], cuts: Sequence[str], example: Any, call: Call
) -> Flow:
    """Run a model once on the example, and note what flows.

    Args:
        model: the model, whose contents are not touched.
        units: its modules with a state, by name; and each one on the meta device.
        cuts: the names of those before which it is cut.
        example: a batch.
        call: calls a model on a batch.
    """
    found = Flow()
    watch = _Watch(found, set(cuts))
    memo: dict[int, Any] = {
        id(module): Skipped(meta, Now(), name, called=watch.called) for name, (module, meta) in units.items()
    }
    batch = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to(CPU), example)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        outputs = _called(copy.deepcopy(model, memo).to(CPU), batch, watch, call)
    found.stale = [path for path, tensor in tensors_of(outputs) if watch.segment_of(tensor, watch.now) < watch.now]
    return found


def _called(skeleton: nn.Module, batch: Any, watch: _Watch, call: Call) -> Any:
    with watch:
        return call(skeleton, batch)


class _Watch(TorchFunctionMode):
    """Sees every torch function that the model calls, and knows which tensors come from a module with a state.

    For each such tensor it notes the segment in which it was computed. A tensor of an earlier segment may only be used
    in a later one if it was an argument of every module in between at which the model is cut.
    """

    def __init__(self, found: Flow, cuts: set[str]) -> None:
        super().__init__()
        self.now = 0  # the segment
        self._found = found
        self._cuts = cuts
        self._segments: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []  # so that no two tensors have one id
        self._inside = 0

    def segment_of(self, tensor: torch.Tensor, otherwise: int) -> int:
        """In which segment a tensor was computed or last arrived."""
        return self._segments.get(id(tensor), otherwise)

    def called(self, name: str, arguments: Any, outputs: Any) -> None:
        """A module with a state is called with these arguments (then they are not None), or has returned."""
        if arguments is None:
            self._inside -= 1
            self._note(tensor for _, tensor in tensors_of(outputs))
            return
        if name in self._cuts:
            self._cut(name, arguments)
        self._check(name, (tensor for _, tensor in tensors_of(arguments)))
        self._inside += 1
        self._found.calls[name] = self._found.calls.get(name, 0) + 1
        self._found.segments.setdefault(name, set()).add(self.now)

    def _cut(self, name: str, arguments: Any) -> None:
        self.now += 1
        self._found.cuts.append(name)
        sent = [(path, tensor) for path, tensor in tensors_of(arguments) if id(tensor) in self._segments]
        # What is only as old as a cut before the last one did not arrive here, and cannot be sent on.
        for _, tensor in sent:
            self._passed(name, self._segments[id(tensor)], self.now - 1)
        self._found.sent.append([path for path, _ in sent])
        self._note(tensor for _, tensor in sent)

    def _note(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            self._segments[id(tensor)] = self.now
            self._alive.append(tensor)

    def _check(self, operation: str, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            self._passed(operation, self.segment_of(tensor, self.now), self.now)

    def _passed(self, operation: str, made: int, now: int) -> None:
        """A tensor of one segment is used in another: note the cuts between them."""
        for cut in self._found.cuts[made:now]:
            self._found.beside.setdefault(cut, operation)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch's, and note what it returns if that comes from a module with a state."""
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if self._inside or name.endswith("_like") or name.startswith("new_"):  # these read only a shape
            return result
        if name in _READS and id(args[0]) in self._segments:
            self._found.reads.setdefault(self.now, name)
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if func is torch.Tensor.__setitem__:
            made = [args[0]]
        used = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if id(leaf) in self._segments]
        if made and used:
            self._check(name, used)
            self._note(made)
        return result
