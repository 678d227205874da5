"""A bucket: gradients side by side in one flat tensor, which is all-reduced as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from microparallel.comms import Comms, Request
from microparallel.program import AllReduce

_ALIGNMENT = 64  # bytes: each gradient begins on a cache line of its own
_AFTER_COUNTS = 1  # numbers behind the counts: how many gradients are not finite


class FlatBucket:
    """The gradients of some parameters, and what all ranks must know about them, in one message.

    ```
    gradient 0 │ gradient 1 │ … │ for each: how many ranks have one │ how many are not finite
    ```

    `parameter.grad` becomes a view of the buffer, so nothing is copied when the sum arrives.

    Attributes:
        parameters: whose gradients it holds, all of one dtype and on one device.
        number: its place among the buckets of the model.
        buffer: the flat tensor that is all-reduced.
        views: for each parameter, its gradient's place in the buffer.
        ranks_with_gradient: after the all-reduce, for each parameter the number of ranks that have a gradient for it.
        ready: for each parameter, whether this rank's gradient is in the buffer.
        missing: how many gradients are not ready.
        not_finite: how many gradients of this rank are infinite or not a number.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], comms: Comms, number: int = 0) -> None:
        self.parameters = parameters
        self.number = number
        offsets, stop = _offsets(parameters)
        first = parameters[0]
        length = stop + len(parameters) + _AFTER_COUNTS
        if first.device.type == "cpu":
            self.buffer = comms.empty((length,), first.dtype)
        else:
            self.buffer = torch.empty(length, dtype=first.dtype, device=first.device)
        self.buffer.zero_()
        self.views = [_view(self.buffer, at, like) for at, like in zip(offsets, parameters, strict=True)]
        self.ranks_with_gradient = self.buffer[stop : stop + len(parameters)]
        self._not_finite_on_all = self.buffer[-1]
        self.not_finite = 0
        self.ready = [False] * len(parameters)
        self.missing = len(parameters)
        self.request: Request[torch.Tensor] | None = None

    def put(self, index: int, scale: float) -> None:
        """Move the gradient of `parameters[index]` into the buffer, multiplied by `scale`; `grad` is then its view."""
        parameter, view = self.parameters[index], self.views[index]
        gradient = parameter.grad
        if gradient is view:  # autograd added to the buffer itself
            view.mul_(scale)
        elif gradient is not None:
            torch.mul(gradient, scale, out=view)
            parameter.grad = view
        self.ready[index] = True
        self.missing -= 1

    def fill_up(self, scale: float) -> None:
        """Fill the places of missing gradients: with what earlier passes left in `grad`, otherwise with zeros."""
        for index, parameter in enumerate(self.parameters):
            if not self.ready[index] and parameter.grad is not None:
                self.put(index, scale)
            elif not self.ready[index]:
                self.views[index].zero_()

    def start(self, comms: Comms, operation: AllReduce, overlap: bool) -> None:
        """All-reduce the buffer, which is `operation` of the program: with `overlap` in the background."""
        self._not_finite_on_all.fill_(self.not_finite)
        if self.missing:
            self.ranks_with_gradient.copy_(torch.tensor(self.ready))
        else:
            self.ranks_with_gradient.fill_(1)
        if overlap:
            self.request = comms.all_reduce(self.buffer, async_op=True, operation=operation)
        else:
            comms.all_reduce(self.buffer, operation=operation)

    def wait(self) -> None:
        """Return when the sum is in the buffer."""
        request, self.request = self.request, None  # a request that failed is not waited for again
        if request is not None:
            request.wait()

    @property
    def any_not_finite(self) -> bool:
        """Whether some rank had a gradient that is not finite; the same answer on every rank."""
        return bool(self._not_finite_on_all != 0)  # a sum of counts: float16 holds counts up to 65,504

    @property
    def fewest_ranks(self) -> int:
        """How many ranks had a gradient for the parameter that the fewest ranks used."""
        return int(self.ranks_with_gradient.min())

    def reset(self) -> None:
        """Make all gradients missing again, before the next pass."""
        self.ready = [False] * len(self.parameters)
        self.missing = len(self.parameters)
        self.not_finite = 0


def split(parameters: Iterable[nn.Parameter], limit: float) -> list[list[nn.Parameter]]:
    """Share parameters, in the order of their gradients, among buckets; one that has `limit` bytes takes no more.

    A bucket has one dtype and one device, so several buckets may be open at a time.
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
    """A gradient's place in the buffer, with the strides of its parameter, which optimizers are fastest with."""
    strides = torch.empty_like(like, device="meta").stride()
    return flat.as_strided(like.size(), strides, flat.storage_offset() + at)
