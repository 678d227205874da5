"""HookTracker: the real order and times of hooks and all-reduces, as a Trace."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from microparallel.comms import Comms
from microparallel.comms.slow_links import slow_network
from microparallel.data_parallel.buckets import GradientBucket
from microparallel.data_parallel.ddp import registered_hooks
from microparallel.data_parallel.flat_bucket import FlatBucket
from microparallel.data_parallel.hook_trace import Cargo, Notes, forward_order, trace_of
from microparallel.data_parallel.reducer import ArrivalHook, Reducer
from microparallel.errors import UsageError
from microparallel.observe import Activity
from microparallel.torch_private import hooks_of_gradient
from microparallel.trace import Trace


@dataclass
class Flight:
    """An all-reduce of gradients, with the times at which it left and was back, in seconds of `time.perf_counter`."""

    cargo: tuple[str, ...]  # the names of the parameters
    size: int  # bytes
    left: float
    back: float = math.nan


class HookTracker:
    """Writes down when each gradient of a step is ready, and when its all-reduce leaves and is back.

    It watches hooks, buckets or the naive step without changing them: it has hooks of its own on the model, which run
    before those that are registered later, and it observes the Comms.

    The ranks of one machine share a clock; those of several do not, and their times cannot be laid side by side. On a
    GPU operations are only queued when torch returns from them, so what is tracked must be on the CPU.

    Example:
        ```python
        tracker = mp.HookTracker(model, comms)
        hooks = mp.register_ddp_hooks(model, tracker.comms, bucket_size_mb=0.25)
        with tracker.step():
            mp.ddp_step(model, tracker.comms, inputs, targets)
        print(tracker.order)  # names, in the order in which this rank's gradients were ready
        print(mp.draw_overlap(tracker.trace("buckets"), seconds=True))
        tracker.remove()
        ```

    Args:
        model: the one to watch; register other hooks on it afterwards.
        comms: the ranks that take part.
        link_seconds: play a slower network: each message takes so much longer.

    Attributes:
        comms: the ranks, over the slower network if there is one; to be used in place of the one that was given.
    """

    def __init__(self, model: nn.Module, comms: Comms, link_seconds: float = 0.0) -> None:
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        if not named:
            raise UsageError("the model has no trainable parameters, so no gradient can be tracked; unfreeze some")
        if elsewhere := next((name for name, parameter in named if parameter.device.type != "cpu"), None):
            raise UsageError(f"{elsewhere} is not on the CPU, and elsewhere times cannot be told; use model.cpu()")
        if not (math.isfinite(link_seconds) and link_seconds >= 0):
            raise UsageError(f"link_seconds={link_seconds!r}: a time must be finite and at least 0; try 0.005")
        if registered_hooks(model) is not None:
            raise UsageError("the model has hooks already, which would run before those of the tracker; remove() them")
        self._model = model
        self._parameters = dict(named)
        self._names = {id(parameter): name for name, parameter in named}
        self._slowed = link_seconds > 0
        self.comms = slow_network(comms, link_seconds) if self._slowed else comms
        self.comms.observers.append(self)
        self._flights: dict[Activity, Flight] = {}  # in the order in which they left
        self._called: dict[str, float] = {}
        self._ready: dict[str, float] = {}
        self._forward_end = math.nan
        self._handles = list(self._register())

    @property
    def order(self) -> list[str]:
        """The parameters in the order in which their gradients were ready on this rank, in the last step."""
        return list(self._ready)

    @property
    def seconds(self) -> dict[str, float]:
        """How long after the end of the forward each gradient was ready on this rank, in the last step."""
        return {name: at - self._forward_end for name, at in self._ready.items()}

    @contextmanager
    def step(self) -> Iterator[None]:
        """Write down the one step that is done inside; what was written down before is forgotten."""
        self._called.clear()
        self._ready.clear()
        self._flights.clear()
        self._forward_end = time.perf_counter()  # of a rank that has no samples and does no forward
        yield

    def trace(self, name: str = "step") -> Trace:
        """What all ranks wrote down in the last step; every rank must ask for it together."""
        flights = list(self._flights.values())
        cargo = Cargo(
            self._forward_order([flight.cargo for flight in flights]),
            tuple(flight.cargo for flight in flights),
            tuple(flight.size for flight in flights),
        )
        return trace_of(name, cargo, self._everybodys_notes(cargo, flights), self.comms.transport_name)

    def remove(self) -> None:
        """Take the tracker's hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self in self.comms.observers:
            self.comms.observers.remove(self)
        if self._slowed:
            self.comms.close()

    # ── what a Comms tells ──────────────────────────────────────────────────────────────────────────────────────

    def begins(self, activity: Activity) -> None:
        """A call begins: an all-reduce of gradients leaves."""
        gradients = () if activity.tensor is None else self._cargo_of(activity.tensor)
        if gradients:
            self._flights[activity] = Flight(gradients, activity.bytes, time.perf_counter())

    def waits(self, activity: Activity) -> None:
        """Who waits, and how long, is not what the tracker shows."""

    def ends(self, activity: Activity) -> None:
        """It is back."""
        if activity in self._flights:
            self._flights[activity].back = time.perf_counter()

    # ── what torch tells ────────────────────────────────────────────────────────────────────────────────────────

    def _register(self) -> Iterator[RemovableHandle]:
        for parameter in self._parameters.values():
            yield parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
        owners = {name.rpartition(".")[0] for name in self._parameters}
        for owner in owners:
            # Each function gets its own name as an argument's default, at once: seen from inside, `owner` would be
            # whatever the loop has come to.
            def on_call(module: nn.Module, inputs: Any, owner: str = owner) -> None:  # noqa: ARG001
                self._called.setdefault(owner, time.perf_counter())

            yield self._model.get_submodule(owner).register_forward_pre_hook(on_call)
        yield self._model.register_forward_hook(self._on_forward_end)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        self._ready[self._names[id(parameter)]] = time.perf_counter()

    def _on_forward_end(self, *_: Any) -> None:
        self._forward_end = time.perf_counter()

    def _cargo_of(self, tensor: torch.Tensor) -> tuple[str, ...]:
        """Whose gradients a tensor holds: it is the gradient of one parameter, or the buffer of a bucket."""
        for bucket in _buckets_of(self._model):
            if bucket.buffer is tensor:
                return tuple(self._names[id(parameter)] for parameter in bucket.parameters)
        return tuple(name for name, parameter in self._parameters.items() if parameter.grad is tensor)

    def _forward_order(self, flights: list[tuple[str, ...]]) -> tuple[str, ...]:
        """The order in which parameters were registered, unless buckets were filled as gradients arrived."""
        if _reducer_of(self._model) is None:
            return tuple(self._parameters)
        travelling = forward_order(flights)
        return (*(name for name in self._parameters if name not in set(travelling)), *travelling)

    def _everybodys_notes(self, cargo: Cargo, sent: list[Flight]) -> list[Notes]:
        parameters, flights = len(cargo.parameters), len(cargo.flights)
        mine = [
            self._forward_end,
            *(self._called.get(name.rpartition(".")[0], math.nan) for name in cargo.parameters),
            *(self._ready.get(name, math.nan) for name in cargo.parameters),
            *(flight.left for flight in sent),
            *(flight.back for flight in sent),
        ]
        notes = []
        for numbers in self.comms.all_gather(torch.tensor(mine, dtype=torch.float64)):
            end, called, ready, left, back = torch.split(numbers, [1, parameters, parameters, flights, flights])
            notes.append(Notes(_row(called), end.item(), _row(ready), _row(left), _row(back)))
        return notes


def _buckets_of(model: nn.Module) -> Iterator[GradientBucket | FlatBucket]:
    """The buckets in which the gradients of a model travel, whoever fills them."""
    hooks = registered_hooks(model)
    if hooks is not None:
        yield from (parcel for parcel in hooks.parcels if isinstance(parcel, GradientBucket))
    reducer = _reducer_of(model)
    if reducer is not None:
        yield from reducer.buckets


def _reducer_of(model: nn.Module) -> Reducer | None:
    for parameter in model.parameters():
        for hook in hooks_of_gradient(parameter):
            if isinstance(hook, ArrivalHook):
                return hook.reducer()
    return None


def _row(numbers: torch.Tensor) -> tuple[float, ...]:
    return tuple(numbers.tolist())
