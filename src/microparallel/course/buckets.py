"""Gradients in buckets: few large all-reduces instead of many small ones, still during backward.

```
compute   F F F F F F │ B5   │ B4   │ B3   │ B2   │ B1   │ B0   │ finish
comm                                [ bucket 0 ]  [ bucket 1 ]  [ bucket 2 ]
                                      g5 and g4     g3 and g2     g1 and g0
```

Every message costs a latency, however small it is, and a model has many small gradients. A bucket collects gradients
in one flat buffer until it is full, and leaves as one message. Large buckets save latency, small buckets leave earlier:
the size is a compromise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from microparallel.comms import Comms, Request
from microparallel.course.hooks import GradientHooks
from microparallel.errors import UsageError


class GradientBucket:
    """The gradients of some parameters, one after another in a flat buffer that travels as one message.

    ```
    buffer   │ bias of 5 │ weight of 5               │ bias of 4 │ weight of 4               │
               a view in the shape of each parameter
    ```

    Each gradient is copied into its view when it is ready. After the all-reduce, the views themselves become the
    parameters' gradients: nothing is copied out, and what autograd adds to them next is in the bucket already. The next
    step overwrites them, so keep a clone of a gradient you want to keep.

    Attributes:
        parameters: whose gradients it holds; all of one dtype and on one device.
        buffer: these gradients, flat.
        ready: how many gradients are in the buffer.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        kinds = {(parameter.dtype, parameter.device) for parameter in parameters}
        if len(kinds) != 1:
            found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds)) or "no parameters"
            raise UsageError(
                f"a bucket is one buffer of one dtype on one device, and this one would hold {found}; "
                "make a bucket for each kind"
            )
        [(dtype, device)] = kinds
        sizes = [parameter.numel() for parameter in parameters]
        self.parameters: Sequence[nn.Parameter] = tuple(parameters)
        self.buffer = torch.zeros(sum(sizes), dtype=dtype, device=device)
        parts = zip(parameters, torch.split(self.buffer, sizes), strict=True)
        self._views = {id(parameter): part.view(parameter.shape) for parameter, part in parts}
        self.ready = 0
        self._request: Request[torch.Tensor] | None = None

    @property
    def full(self) -> bool:
        """Whether every gradient is in the buffer."""
        return self.ready == len(self.parameters)

    def put(self, parameter: nn.Parameter) -> None:
        """Copy a parameter's gradient into its view; zeros where there is none."""
        view = self._views[id(parameter)]
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad.data_ptr() != view.data_ptr():  # since the last step, grad may be the view
            view.copy_(parameter.grad.detach())
        self.ready += 1

    def start(self, comms: Comms) -> None:
        """Start the all-reduce, which averages over all ranks."""
        self._request = comms.all_reduce(self.buffer, op="mean", async_op=True)

    def finish(self) -> None:
        """Wait for the all-reduce, make each parameter's view its gradient, and be empty again."""
        if self._request is not None:
            self._request.wait()
        for parameter in self.parameters:
            parameter.grad = self._views[id(parameter)]
        self._request, self.ready = None, 0


class BucketedDDPHooks(GradientHooks):
    """Hooks on a model's parameters that collect gradients in buckets; a full bucket leaves while backward goes on.

    See `GradientHooks` for how to use them. Buckets leave in a fixed order, the bucket of the last layers first. A
    bucket that does not become full on a rank, because that rank did not use a parameter, leaves in `finish()`.

    Args:
        model: the same on every rank.
        comms: the ranks that average.
        bucket_size_mb: a bucket that has so many MiB of gradients takes no more.
    """

    def __init__(self, model: nn.Module, comms: Comms, bucket_size_mb: float = 25.0) -> None:
        if not isinstance(bucket_size_mb, int | float) or not bucket_size_mb > 0:  # NaN is not above 0
            raise UsageError(f"bucket_size_mb={bucket_size_mb!r}: a bucket needs a size above 0; try 25.0")
        self._enough_bytes = bucket_size_mb * 2**20
        super().__init__(model, comms)

    def _make_buckets(self) -> Sequence[GradientBucket]:
        return [GradientBucket(group) for group in in_buckets(self.parameters, self._enough_bytes)]


def in_buckets(parameters: Sequence[nn.Parameter], enough_bytes: float) -> list[list[nn.Parameter]]:
    """Put neighbours together until a bucket has enough bytes; another dtype or device begins another bucket."""
    groups: list[list[nn.Parameter]] = []
    for parameter in parameters:
        if not groups or not _goes_with(parameter, groups[-1], enough_bytes):
            groups.append([])
        groups[-1].append(parameter)
    return groups


def _goes_with(parameter: nn.Parameter, others: list[nn.Parameter], enough_bytes: float) -> bool:
    alike = (parameter.dtype, parameter.device) == (others[0].dtype, others[0].device)
    return alike and sum(other.nbytes for other in others) < enough_bytes
