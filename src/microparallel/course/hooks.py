"""Data parallelism with hooks: a gradient leaves as soon as backward has made it.

```
compute   forward │ backward of layer 2 │ of layer 1 │ of layer 0 │ finish
comm                                    [ all-reduce g2 ][ all-reduce g1 ][ all-reduce g0 ]
```

The naive step computes first and communicates afterwards. But backward makes the last layer's gradients first, and
nothing changes them before the optimizer reads them. torch calls a *hook* when a gradient is complete; our hook starts
its all-reduce, which runs while backward goes on with the layer before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from microparallel.comms import Comms, Request
from microparallel.errors import UsageError


class GradientHooks:
    """Hooks on a model's parameters: each gradient is averaged over the ranks as soon as backward has made it.

    All ranks must start their all-reduces in the same order, or one rank's bias would be added to another's weight.
    But a rank that skips a branch of the model makes other gradients, in another order. So gradients leave in an order
    that is fixed before the first step: from the last registered parameter to the first, which is the order in which
    backward makes them when layers are registered in the order of their use. A gradient that is ready early waits for
    those before it.

    Example:
        ```python
        hooks = mp.course.register_ddp_hooks(model, comms)
        for inputs, targets in batches:  # this rank's own
            optimizer.zero_grad()
            loss_fn(model(inputs), targets).backward()  # all-reduces start meanwhile
            hooks.finish()  # now all gradients are averaged
            optimizer.step()
        hooks.remove()
        ```

    Attributes:
        comms: the ranks that average.
        parameters: those that are trained, in the order in which their gradients leave; one that is used in several
            places is there once, one that is frozen is not.
        buckets: the gradients of one all-reduce each, in the order in which they leave; here one gradient each.
    """

    def __init__(self, model: nn.Module, comms: Comms) -> None:
        self.comms = comms
        self._model = model
        self._names = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad][::-1]
        if not self.parameters:
            raise UsageError("the model has no trainable parameters, so there is nothing to average; unfreeze some")
        self.buckets = self._make_buckets()
        self._bucket_of = {id(parameter): bucket for bucket in self.buckets for parameter in bucket.parameters}
        self._ready: set[int] = set()  # parameters whose gradients were made since the last finish()
        self._started = 0  # how many buckets have started since then
        self._in_no_sync = False
        # One function for all parameters, which looks its bucket up. Functions made in a loop would be Python's famous
        # trap: all of them would see the loop's last bucket.
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            for parameter in self.parameters
        ]

    def _make_buckets(self) -> Sequence[BucketLike]:
        return [OneGradient(parameter) for parameter in self.parameters]

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """Start every bucket that is now full. torch passes the parameter; `parameter.grad` is its gradient."""
        if self._in_no_sync:
            return
        self._require_sendable(parameter)
        self._ready.add(id(parameter))
        self._bucket_of[id(parameter)].put(parameter)  # type: ignore[arg-type]
        while self._started < len(self.buckets) and self.buckets[self._started].full:
            self.buckets[self._started].start(self.comms)
            self._started += 1

    def finish(self, loss: torch.Tensor | None = None) -> torch.Tensor:
        """Wait until every gradient is averaged; call it after each backward, before the optimizer steps.

        Every rank must call it, also a rank that had no backward. The gradients of parameters that this rank did not
        use start now, as zeros or as what `grad` held before. A parameter that no rank has a gradient for keeps none.

        Args:
            loss: this rank's loss, which is averaged as well.

        Returns:
            The average of the ranks' losses.
        """
        self._require_all_hooked()
        # One more message: the loss, and for each parameter whether this rank has a gradient, which others cannot see.
        mine = 0.0 if loss is None else loss.item()
        means = torch.tensor([mine, *(p.grad is not None for p in self.parameters)], dtype=torch.float64)
        for bucket in self.buckets[self._started :]:
            for parameter in bucket.parameters:
                if id(parameter) not in self._ready:
                    bucket.put(parameter)
            bucket.start(self.comms)
        self._started = len(self.buckets)
        self.comms.all_reduce(means, op="mean")
        self._finish_buckets()
        for parameter, users in zip(self.parameters, means[1:].tolist(), strict=True):
            if not users:
                parameter.grad = None
        return means[0]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients only add up on this rank; the next backward outside averages all that has added up."""
        before, self._in_no_sync = self._in_no_sync, True
        try:
            yield
        finally:
            self._in_no_sync = before

    def remove(self) -> None:
        """Take the hooks off the model, and wait for all-reduces that have started; removing twice is fine."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._finish_buckets()

    def _finish_buckets(self) -> None:
        """Wait for the buckets that have started; then no gradient is ready and no bucket started."""
        for bucket in self.buckets[: self._started]:
            bucket.finish()
        self._started = 0
        self._ready.clear()

    def _require_sendable(self, parameter: torch.Tensor) -> None:
        name = self._names[id(parameter)]
        if id(parameter) in self._ready:
            raise UsageError(
                f"{name} has a second gradient before the first is averaged; call finish() after each backward, "
                "and run backwards that only accumulate inside no_sync()"
            )
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise UsageError(
                f"the gradient of {name} is sparse, and hooks average dense ones; make the embedding with sparse=False"
            )

    def _require_all_hooked(self) -> None:
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._names:
                raise UsageError(
                    f"{name} has no hook: it was frozen, or not in the model, when the hooks were registered; "
                    "remove() them and register again"
                )


# ── what one all-reduce averages ────────────────────────────────────────────────────────────────────────────────────


class OneGradient:
    """A bucket of one: the gradient of one parameter, averaged where it is."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameters: Sequence[nn.Parameter] = (parameter,)
        self.full = False
        self._request: Request[torch.Tensor] | None = None

    def put(self, parameter: nn.Parameter) -> None:
        """Take the gradient as it is now; zeros where there is none."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        self.full = True

    def start(self, comms: Comms) -> None:
        """Start the all-reduce."""
        [parameter] = self.parameters
        if parameter.grad is not None:
            self._request = comms.all_reduce(parameter.grad, op="mean", async_op=True)

    def finish(self) -> None:
        """Wait for the all-reduce, and be empty again."""
        if self._request is not None:
            self._request.wait()
        self._request, self.full = None, False


class BucketLike(Protocol):
    """What one all-reduce averages: the gradient of one parameter (`OneGradient`) or several (`GradientBucket`)."""

    parameters: Sequence[nn.Parameter]

    @property
    def full(self) -> bool:
        """Whether all of its gradients are there, so that its all-reduce may start."""

    def put(self, parameter: nn.Parameter) -> None:
        """Take a parameter's gradient as it is now; zeros where there is none."""

    def start(self, comms: Comms) -> None:
        """Start the all-reduce, which averages over all ranks."""

    def finish(self) -> None:
        """Wait for the all-reduce, give every parameter its averaged gradient, and be empty again."""
