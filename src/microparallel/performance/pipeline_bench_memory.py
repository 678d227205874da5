"""How many bytes autograd keeps for backward passes that are still to come: the activations of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn


class SavedBytes:
    """Counts, within its `with` block, what is saved for backward and not freed yet; weights do not count.

    A tensor that several operations save counts once.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.most = 0
        self._now = 0
        self._weights = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._held: Counter[tuple[int, int]] = Counter()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _Saved.unpack)

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.__exit__(*exception)

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        if tensor.untyped_storage().data_ptr() in self._weights:
            return _Saved(tensor, None, self)
        size = min(tensor.nbytes, tensor.untyped_storage().nbytes())  # an expanded tensor takes less than it seems
        key = tensor.data_ptr(), size
        self._held[key] += 1
        if self._held[key] == 1:
            self._now += size
            self.most = max(self.most, self._now)
        return _Saved(tensor, key, self)

    def let_go(self, key: tuple[int, int]) -> None:
        """One of those that saved it needs it no more."""
        self._held[key] -= 1
        if not self._held[key]:
            self._now -= key[1]


class _Saved:
    """What autograd keeps instead of a tensor: when it lets go of this, the tensor is freed."""

    def __init__(self, tensor: torch.Tensor, key: tuple[int, int] | None, counter: SavedBytes) -> None:
        self._tensor = tensor.detach()  # as it is, an output would lead back to the operation that saved it: a cycle
        self._key = key
        self._counter = counter

    def unpack(self) -> torch.Tensor:
        return self._tensor

    def __del__(self) -> None:
        if self._key is not None:
            self._counter.let_go(self._key)
