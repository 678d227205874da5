"""Micro-batches: split one batch into several, and join their outputs into one.

```
                     ┌ {"x": x[0:2], "y": y[0:2]} ─→ … ─→ out 0 ┐
{"x": x, "y": y}  ─→ ├ {"x": x[2:4], "y": y[2:4]} ─→ … ─→ out 1 ├ ─→ out
(5 samples)          └ {"x": x[4:5], "y": y[4:5]} ─→ … ─→ out 2 ┘    (5 samples)
                split_batch(batch, 3)                       join_batch(outs)
```

A batch is a tensor with the samples in dimension 0, or tuples, lists, dicts and named tuples of such tensors. Where
micro-batches differ in size (see `sizes`), the loss of each counts by its number of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from microparallel.errors import UsageError
from microparallel.torch_private import pytree


@dataclass(frozen=True)
class Share:
    """A part of a batch that is cut into micro-batches by itself, whichever pipeline computes it.

    Attributes:
        inputs: its own; they may have other shapes than those of another share.
        targets: what its outputs are compared with.
        before_layer: is called with the number of a micro-batch in this share, and the number of a layer in the whole
            model, before that layer computes that micro-batch, and when it computes it again (`recompute`), if it may
            draw random numbers; and before the loss, whose number is the next. If it seeds the random generators, the
            random numbers do not depend on the number of pipelines, nor on where the model is cut, nor on the schedule.
    """

    inputs: Any = None
    targets: Any = None
    before_layer: Callable[[int, int], None] | None = None


def split_batch(batch: Any, count: int, what: str = "batch") -> list[Any]:
    """Cut a batch into `count` micro-batches; each has the batch's own form, and its tensors are views.

    Values that are no tensors (None, a flag, a string) go into each. Errors call the batch `what`.
    """
    lengths = sizes(batch_size(batch, what), count)
    return [
        pytree.tree_map_only(torch.Tensor, partial(_cut, end=end, length=length), batch)
        for end, length in zip(accumulate(lengths), lengths, strict=True)
    ]


def _cut(tensor: torch.Tensor, end: int, length: int) -> torch.Tensor:
    # Not tensor.split(): autograd lets no layer change its parts in place.
    return tensor.narrow(0, end - length, length)


def sizes(samples: int, count: int) -> list[int]:
    """Say how many samples each micro-batch has: they differ by at most one, and the larger come first.

    >>> sizes(5, 3)
    [2, 2, 1]
    """
    if count < 1:
        raise UsageError(f"microbatches={count}: a batch is cut into at least 1")
    if count > samples:
        fewer = f"microbatches={samples} or fewer" if samples > 1 else "microbatches=1"
        raise UsageError(
            f"{count} micro-batches of a batch of {_samples(samples)}: use {fewer}, a larger batch, "
            "or step(…, allow_fewer=True)"
        )
    size, longer = divmod(samples, count)
    return [size + (index < longer) for index in range(count)]


def batch_size(batch: Any, what: str = "batch") -> int:
    """Count the samples of a batch: the length that all its tensors have in dimension 0."""
    lengths = {place: _length(tensor, place) for place, tensor in _tensors(batch, what)}
    if not lengths:
        raise UsageError(
            f"{what} is a {type(batch).__name__} with no tensor in it: pass a tensor, or tuples, lists or dicts of them"
        )
    (first, samples), *others = lengths.items()
    for place, length in others:
        if length != samples:
            raise UsageError(
                f"{place} has {_samples(length)} and {first} has {_samples(samples)}: "
                "all tensors of a batch need the same length in dimension 0"
            )
    if samples == 0:
        raise UsageError(f"{first} has 0 samples: an empty batch cannot be split")
    return samples


def join_batch(parts: Sequence[Any]) -> Any:
    """Join the outputs of all micro-batches into the output of the batch, the inverse of `split_batch`.

    Tensors are put one after the other along dimension 0, and single numbers (0-d tensors) become one vector.
    """
    if not parts:
        raise UsageError("no micro-batches to join: pass the output of at least 1")
    forms = [pytree.tree_structure(part) for part in parts]
    for index, form in enumerate(forms):
        if form != forms[0]:
            raise UsageError(
                f"micro-batch {index} gave {form}, and micro-batch 0 gave {forms[0]}: "
                "only outputs of one and the same form can be joined"
            )
    leaves = zip(*(pytree.tree_leaves(part) for part in parts), strict=True)
    return pytree.tree_unflatten([_join_leaf(values) for values in leaves], forms[0])


def _join_leaf(values: tuple[Any, ...]) -> Any:
    first = values[0]
    if all(isinstance(value, torch.Tensor) for value in values):
        return torch.cat(values) if first.dim() else torch.stack(values)
    for index, value in enumerate(values):
        if not _same(value, first):
            raise UsageError(
                f"micro-batch {index} gave {_shown(value)} where micro-batch 0 gave {_shown(first)}: "
                "only tensors can be joined, so return it as one from each"
            )
    return first


def _same(value: Any, other: Any) -> bool:
    # == compares tensors entry by entry, so a tensor is the same as another value only if it is that object.
    return value is other or (not isinstance(value, torch.Tensor) and type(value) is type(other) and value == other)


def _shown(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _tensors(batch: Any, what: str) -> list[tuple[str, torch.Tensor]]:
    """List the tensors of a batch, each with its place as Python would write it: `batch['x'][0]`."""
    leaves, _ = pytree.tree_flatten_with_path(batch)
    return [(what + pytree.keystr(path), leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor)]


def _length(tensor: torch.Tensor, place: str) -> int:
    if tensor.dim() == 0:
        raise UsageError(
            f"{place} is a single number, without a dimension of samples: pass it as a Python number to give it to "
            "each micro-batch, or as a tensor with one entry per sample"
        )
    return len(tensor)


def _samples(count: int) -> str:
    return f"{count} sample" if count == 1 else f"{count} samples"
