"""A bucket of the reducer: gradients side by side in one flat tensor, which is all-reduced as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from microparallel.comms import Comms, Request
from microparallel.program import AllReduce

_ALIGNMENT = 64  # bytes: each gradient begins on a cache line of its own
_AT_THE_END = 1  # numbers behind the flags: how many gradients were not finite


class FlatBucket:
    """The gradients of some parameters, and what all ranks must know about them, in one message.

    ```
    gradient 0 │ gradient 1 │ … │ for each: how many ranks have one │ how many are not finite
    ```

    Each gradient is a view of the buffer, so that nothing is copied when the sum arrives.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], comms: Comms, number: int = 0) -> None:
        self.parameters = parameters
        self.number = number  # among those of its model
        offsets, stop = _offsets(parameters)
        first = parameters[0]
        length = stop + len(parameters) + _AT_THE_END
        if first.device.type == "cpu":
            self.buffer = comms.empty((length,), first.dtype)
        else:
            self.buffer = torch.empty(length, dtype=first.dtype, device=first.device)
        self.buffer.zero_()
        self.views = [_view(self.buffer, at, like) for at, like in zip(offsets, parameters, strict=True)]
        self.having = self.buffer[stop : stop + len(parameters)]
        self._not_finite = self.buffer[-1]
        self.bad = 0  # gradients of this rank that are not finite
        self.ready = [False] * len(parameters)
        self.missing = len(parameters)
        self.request: Request[torch.Tensor] | None = None

    def put(self, index: int, scale: float) -> None:
        """Take a parameter's gradient: from now on it lives here, weighted."""
        parameter, view = self.parameters[index], self.views[index]
        gradient = parameter.grad
        if gradient is view:  # it was accumulated right here
            view.mul_(scale)
        elif gradient is not None:
            torch.mul(gradient, scale, out=view)
            parameter.grad = view
        self.ready[index] = True
        self.missing -= 1

    def fill_up(self, scale: float) -> None:
        """What has not come counts as zero, unless earlier passes have left something."""
        for index, parameter in enumerate(self.parameters):
            if not self.ready[index] and parameter.grad is not None:
                self.put(index, scale)
            elif not self.ready[index]:
                self.views[index].zero_()

    def leave(self, comms: Comms, operation: AllReduce, overlap: bool) -> None:
        """Add up what all ranks have, as the program says: in the background, or right now."""
        self._not_finite.fill_(self.bad)
        if self.missing:
            self.having.copy_(torch.tensor(self.ready))
        else:
            self.having.fill_(1)
        if overlap:
            self.request = comms.all_reduce(self.buffer, async_op=True, operation=operation)
        else:
            comms.all_reduce(self.buffer, operation=operation)

    def come_back(self) -> None:
        """Wait for the sum."""
        request, self.request = self.request, None  # one that fails is not waited for again
        if request is not None:
            request.wait()

    @property
    def anything_bad(self) -> bool:
        """Whether any rank had a gradient that is not finite; the same answer on all."""
        return bool(self._not_finite != 0)  # a sum of counts, and no half-precision count overflows below 65,504

    @property
    def had_by_fewest(self) -> int:
        """How many ranks had the gradient that fewest had."""
        return int(self.having.min())

    def reset(self) -> None:
        """Be ready for the next pass."""
        self.ready = [False] * len(self.parameters)
        self.missing = len(self.parameters)
        self.bad = 0


def split(parameters: Iterable[nn.Parameter], limit: float) -> list[list[nn.Parameter]]:
    """Cut parameters, in the order of their gradients, into buckets that take no more when they have `limit` bytes.

    Each bucket has one dtype, so there may be several that are being filled.
    """
    full: list[list[nn.Parameter]] = []
    filling: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device)
        filling.setdefault(kind, []).append(parameter)
        if sum(parameter.nbytes for parameter in filling[kind]) >= limit:
            full.append(filling.pop(kind))
    return full + list(filling.values())


def _offsets(parameters: Sequence[nn.Parameter]) -> tuple[list[int], int]:
    """Where each gradient begins, and where the last one ends."""
    step = max(1, _ALIGNMENT // parameters[0].element_size())
    offsets, position = [], 0
    for parameter in parameters:
        offsets.append(position)
        position += -(-parameter.numel() // step) * step
    return offsets, position


def _view(flat: torch.Tensor, at: int, like: torch.Tensor) -> torch.Tensor:
    """A gradient's place, laid out as its parameter is (channels last, say), so that optimizers run at full speed."""
    strides = torch.empty_like(like, device="meta").stride()
    return flat.as_strided(like.size(), strides, flat.storage_offset() + at)
