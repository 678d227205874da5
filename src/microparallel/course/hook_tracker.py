"""From what ranks wrote down during a step to a Trace: what each computed when, and when its buckets travelled."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from microparallel.collectives import traffic
from microparallel.comms import Comms
from microparallel.comms.slow_links import slow_network
from microparallel.course.buckets import GradientBucket
from microparallel.course.ddp import registered_hooks
from microparallel.data_parallel.bucket import FlatBucket
from microparallel.data_parallel.reducer import ArrivalHook, Reducer
from microparallel.errors import UsageError
from microparallel.observe import Activity
from microparallel.program import AllReduce, Backward, Bucket, Forward, Lane, Program, TrainingStep
from microparallel.torch_private import hooks_of_gradient
from microparallel.trace import Event, Trace


@dataclass(frozen=True)
class Cargo:
    """What all ranks have in common: the parameters of the model, and which gradients travelled together."""

    parameters: tuple[str, ...]  # in the order of forward
    flights: tuple[tuple[str, ...], ...]  # in the order in which they left
    sizes: tuple[int, ...]  # bytes


def forward_order(flights: Sequence[Sequence[str]]) -> list[str]:
    """Parameters in the order of forward, where gradients travel in the order in which backward makes them."""
    return [name for flight in flights for name in flight][::-1]


def _ranges(layers: list[Layer], cargo: Cargo) -> tuple[tuple[int, int], ...]:
    """The layers of each flight: neighbours, since the layers stand in the order of the flights."""
    ranges = []
    for flight in range(len(cargo.flights)):
        stages = [layer.stage for layer in layers if layer.flight == flight]
        ranges.append((min(stages), max(stages) + 1))
    return tuple(ranges)


@dataclass(frozen=True)
class Notes:
    """What one rank wrote down, in seconds of a clock that the ranks of a machine share; NaN for what never happened.

    Numbers stand in the order of `Cargo`.
    """

    called: tuple[float, ...]  # for each parameter, when its module's forward first began
    forward_end: float
    ready: tuple[float, ...]  # for each parameter, when its gradient was
    left: tuple[float, ...]
    back: tuple[float, ...]


@dataclass(frozen=True)
class Layer:
    """Neighbouring parameters of one module that travel together: a stage of the program."""

    stage: int
    module: str
    members: tuple[int, ...]  # places among the parameters
    flight: int | None


def layers_of(cargo: Cargo) -> list[Layer]:
    """Cut the parameters into layers; a module whose gradients travel in two all-reduces is two."""
    flight_of = {name: index for index, names in enumerate(cargo.flights) for name in names}

    def key(place: int) -> tuple[str, int | None]:
        name = cargo.parameters[place]
        return name.rpartition(".")[0], flight_of.get(name)

    groups = groupby(range(len(cargo.parameters)), key)
    return [Layer(stage, module, tuple(places), flight) for stage, ((module, flight), places) in enumerate(groups)]


def trace_of(name: str, cargo: Cargo, notes: Sequence[Notes], transport: str = "gloo") -> Trace:
    """Put everybody's notes together.

    - A layer's forward lasts until the next one's begins; its backward from the gradient before until its own. (What is
      between, the loss for one, counts to the layer that follows.)
    - An all-reduce begins when every rank has handed it over and the one before it is back, not when this rank began
      to wait for that; whether the transport had in fact begun earlier, nobody outside can see.
    - A rank sends what the algorithm sends that the transport takes (`collectives.resolve`).
    """
    layers = layers_of(cargo)
    computed = [[*_forwards(rank, layers, mine), *_backwards(rank, layers, mine)] for rank, mine in enumerate(notes)]
    full = _full(layers, cargo, [event for events in computed for event in events])
    orders = []
    for rank, mine in enumerate(notes):
        events = [*computed[rank], *_flights(rank, mine, cargo, notes, full, transport)]
        orders.append(sorted(events, key=lambda event: (event.start, event.end)))  # what takes no time comes first
    program = Program(
        name,
        TrainingStep(len(layers), len(notes), _ranges(layers, cargo)),
        tuple(tuple(event.operation for event in order) for order in orders),
    )
    return Trace([event for order in orders for event in order], program)


def _forwards(rank: int, layers: list[Layer], notes: Notes) -> Iterator[Event]:
    """Modules one after another; of one that is two layers, the second has the time, and the first takes none."""
    begun = {layer.stage: notes.called[layer.members[0]] for layer in layers}
    called = sorted((layer for layer in layers if not math.isnan(begun[layer.stage])), key=lambda o: begun[o.stage])
    ends = [*(begun[layer.stage] for layer in called[1:]), *([notes.forward_end] if called else [])]
    for layer, end in zip(called, ends, strict=True):
        yield Event(rank, Lane.COMPUTE, Forward(layer.stage, rank), begun[layer.stage], end)
    for layer in layers:  # its parameters are used, but not by calling its module
        if math.isnan(begun[layer.stage]) and not math.isnan(_ready(layer, notes)):
            yield Event(rank, Lane.COMPUTE, Forward(layer.stage, rank), notes.forward_end, notes.forward_end)


def _backwards(rank: int, layers: list[Layer], notes: Notes) -> Iterator[Event]:
    """Gradients one after another; those of one module are made together, so the first layer of it has all the time."""
    used = [layer for layer in layers if not math.isnan(_ready(layer, notes))]
    free = notes.forward_end
    for _, together in groupby(sorted(used, key=lambda layer: _ready(layer, notes)), key=lambda layer: layer.module):
        burst = sorted(together, key=lambda layer: -layer.stage)
        end = max(_ready(layer, notes) for layer in burst)
        for layer in burst:
            yield Event(rank, Lane.COMPUTE, Backward(layer.stage, rank), free, end)
            free = end


def _full(layers: list[Layer], cargo: Cargo, computed: list[Event]) -> list[float]:
    """For each flight, when all its gradients were ready on all ranks that made them."""
    flight_of = {layer.stage: layer.flight for layer in layers}
    ends: list[list[float]] = [[-math.inf] for _ in cargo.flights]
    for event in computed:
        if isinstance(event.op, Backward) and (flight := flight_of[event.op.stage]) is not None:
            ends[flight].append(event.end)
    return [max(times) for times in ends]


def _flights(
    rank: int, mine: Notes, cargo: Cargo, notes: Sequence[Notes], full: list[float], transport: str
) -> Iterator[Event]:
    free = -math.inf
    for flight, size in enumerate(cargo.sizes):
        start = max([free, full[flight], *(other.left[flight] for other in notes)])
        free = max(start, mine.back[flight])
        operation = AllReduce(Bucket(flight), "dp")
        messages, sent = traffic(operation, range(len(notes)), size, transport)[rank]
        yield Event(rank, Lane.COMM, operation, start, free, messages, sent, size)


def _ready(layer: Layer, notes: Notes) -> float:
    """When the last gradient of a layer was ready; NaN if one never was."""
    times = [notes.ready[place] for place in layer.members]
    return math.nan if any(map(math.isnan, times)) else max(times)


# HookTracker: the real order and times of hooks and all-reduces, as a Trace.


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
        tracker = mp.course.HookTracker(model, comms)
        hooks = mp.course.register_ddp_hooks(model, tracker.comms, bucket_size_mb=0.25)
        with tracker.step():
            mp.course.ddp_step(model, tracker.comms, inputs, targets)
        print(tracker.order)  # names, in the order in which this rank's gradients were ready
        print(mp.course.draw_overlap(tracker.trace("buckets"), seconds=True))
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
