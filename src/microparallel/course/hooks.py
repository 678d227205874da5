"""Data parallelism with hooks: a gradient leaves as soon as backward has made it.

```
compute   forward │ backward of layer 2 │ of layer 1 │ of layer 0 │ finish
comm                                    [ all-reduce g2 ][ all-reduce g1 ][ all-reduce g0 ]
```

The naive step computes first and talks afterwards. But backward makes the last layer's gradients first, and nobody
touches them again before the optimizer does. torch calls a *hook* the moment a gradient is complete; ours starts its
all-reduce, which travels while backward goes on with the layer before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from microparallel.comms import Comms, Request
from microparallel.errors import UsageError


class Parcel(Protocol):
    """What travels in one all-reduce: the gradient of one parameter, or of several."""

    parameters: Sequence[nn.Parameter]

    @property
    def full(self) -> bool:
        """Whether all of its gradients are there, so that it may leave."""

    def put(self, parameter: nn.Parameter) -> None:
        """Take a parameter's gradient as it is now; zeros where there is none."""

    def start(self, comms: Comms) -> None:
        """Leave: start averaging over all ranks."""

    def finish(self) -> None:
        """Wait until it is back, give every parameter its averaged gradient, and be empty again."""


class OneGradient:
    """The gradient of one parameter, averaged where it lies."""

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
        """Leave: start averaging over all ranks."""
        [parameter] = self.parameters
        if parameter.grad is not None:
            self._request = comms.all_reduce(parameter.grad, op="mean", async_op=True)

    def finish(self) -> None:
        """Wait until it is back, and be empty again."""
        if self._request is not None:
            self._request.wait()
        self._request, self.full = None, False


class GradientHooks:
    """Hooks on a model's parameters: each gradient is averaged over the ranks as soon as backward has made it.

    All ranks must start their all-reduces in the same order, or one rank's bias would be added to another's weight.
    But a rank that skips a branch of the model makes other gradients, in another order. So gradients leave in an order
    that is fixed before the first step: from the last registered parameter to the first, which is the order in which
    backward makes them when layers are registered in the order of their use. One that is ready early waits its turn.

    Example:
        ```python
        hooks = mp.course.register_ddp_hooks(model, comms)
        for inputs, targets in batches:  # this rank's own
            optimizer.zero_grad()
            loss_fn(model(inputs), targets).backward()  # gradients leave meanwhile
            hooks.finish()  # and are all back, averaged
            optimizer.step()
        hooks.remove()
        ```

    Attributes:
        comms: the ranks that average.
        parameters: those that are trained, in the order in which their gradients leave; one that is used in several
            places is there once, one that is frozen is not.
        parcels: what travels, in the order in which it leaves.
    """

    def __init__(self, model: nn.Module, comms: Comms) -> None:
        self.comms = comms
        self._model = model
        self._names = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad][::-1]
        if not self.parameters:
            raise UsageError("the model has no trainable parameters, so there is nothing to average; unfreeze some")
        self.parcels = self._pack()
        self._parcel_of = {id(parameter): parcel for parcel in self.parcels for parameter in parcel.parameters}
        self._ready: set[int] = set()  # whose gradients have come since the last finish()
        self._left = 0  # how many parcels have started since then
        self._silent = False
        # One function for all parameters, which looks its parcel up. A function made for each in this loop would be
        # the famous trap: all of them would see the loop's last parcel.
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            for parameter in self.parameters
        ]

    def _pack(self) -> Sequence[Parcel]:
        return [OneGradient(parameter) for parameter in self.parameters]

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """A gradient is complete. torch hands us the parameter: it is `parameter.grad` that is to be averaged."""
        if self._silent:
            return
        self._require_sendable(parameter)
        self._ready.add(id(parameter))
        parcel = self._parcel_of[id(parameter)]
        parcel.put(parameter)  # type: ignore[arg-type]
        while self._left < len(self.parcels) and self.parcels[self._left].full:
            self.parcels[self._left].start(self.comms)
            self._left += 1

    def finish(self, loss: torch.Tensor | None = None) -> torch.Tensor:
        """Wait until every gradient is averaged; call it after each backward, before the optimizer steps.

        Every rank must call it, also one that had no backward. What a rank did not use has not left there yet: it
        leaves now, as zeros or as whatever `grad` held before. A parameter that no rank has a gradient for keeps none.

        Args:
            loss: a number to be averaged along: this rank's loss.

        Returns:
            The average of the ranks' losses.
        """
        self._require_all_hooked()
        # Others cannot see what this rank did not use, so the ranks tell each other, and the loss rides along.
        mine = 0.0 if loss is None else loss.item()
        news = torch.tensor([mine, *(p.grad is not None for p in self.parameters)], dtype=torch.float64)
        for parcel in self.parcels[self._left :]:
            for parameter in parcel.parameters:
                if id(parameter) not in self._ready:
                    parcel.put(parameter)
            parcel.start(self.comms)
        self._left = len(self.parcels)
        self.comms.all_reduce(news, op="mean")
        self._collect()
        for parameter, users in zip(self.parameters, news[1:].tolist(), strict=True):
            if not users:
                parameter.grad = None
        return news[0]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients only add up on this rank; the next backward outside averages all that has added up."""
        before, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = before

    def remove(self) -> None:
        """Take the hooks off the model, after what has left is back; removing twice is fine."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._collect()

    def _collect(self) -> None:
        """Wait for what has left, and be as before the first step."""
        for parcel in self.parcels[: self._left]:
            parcel.finish()
        self._left = 0
        self._ready.clear()

    def _require_sendable(self, parameter: torch.Tensor) -> None:
        name = self._names[id(parameter)]
        if id(parameter) in self._ready:
            raise UsageError(
                f"{name} has a second gradient before the first is averaged; call finish() after each backward, "
                "and let those that only accumulate run in no_sync()"
            )
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise UsageError(
                f"the gradient of {name} is sparse, and hooks average dense ones; make the embedding with sparse=False"
            )

    def _require_all_hooked(self) -> None:
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._names:
                raise UsageError(
                    f"{name} has no hook: it was frozen, or not there, when the others got theirs; "
                    "remove() them and register again"
                )
