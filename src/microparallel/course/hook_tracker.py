"""HookTracker: when each gradient of a real step was ready, and when its all-reduce began and ended, as a Trace.

The tracker writes times down on every rank (`RankTimes`); `trace_of` makes one `Trace` of all ranks' times.
"""

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


class HookTracker:
    """Writes down when each gradient of a step is ready, and when its all-reduce begins and ends.

    It does not change the hooks, buckets or naive step that it tracks: it has hooks of its own on the model, which run
    before those that are registered later, and it is an observer of the Comms.

    All ranks must be on one machine, where they share a clock. The model must be on the CPU: on a GPU, torch returns
    from an operation when it is queued, not when it is done.

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
        model: the model to track; register other hooks on it afterwards.
        comms: the ranks that take part.
        link_seconds: imitate a slower network: each message takes so much longer.

    Attributes:
        comms: the ranks, over the slower network if there is one; use it in place of the one that was passed.
    """

    def __init__(self, model: nn.Module, comms: Comms, link_seconds: float = 0.0) -> None:
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        if not named:
            raise UsageError("the model has no trainable parameters, so no gradient can be tracked; unfreeze some")
        if elsewhere := next((name for name, parameter in named if parameter.device.type != "cpu"), None):
            raise UsageError(f"{elsewhere} is not on the CPU, and only there can hooks tell the time; use model.cpu()")
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
        self._sent: dict[Activity, SentBucket] = {}  # in the order in which they were sent
        self._called: dict[str, float] = {}  # when each module's forward first began
        self._ready: dict[str, float] = {}  # when each parameter's gradient was ready
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
        """Write down the one step that is done inside; the times of earlier steps are forgotten."""
        self._called.clear()
        self._ready.clear()
        self._sent.clear()
        self._forward_end = time.perf_counter()  # for a rank that has no samples and does no forward
        yield

    def trace(self, name: str = "step") -> Trace:
        """What all ranks did in the last step; every rank must call this together."""
        sent = list(self._sent.values())
        buckets = tuple(bucket.parameters for bucket in sent)
        step = TrackedStep(self._forward_order(buckets), buckets, tuple(bucket.size for bucket in sent))
        return trace_of(name, step, self._gather_times(step, sent), self.comms.transport_name)

    def remove(self) -> None:
        """Take the tracker's hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self in self.comms.observers:
            self.comms.observers.remove(self)
        if self._slowed:
            self.comms.close()

    # ── what the Comms reports (it calls these as an observer's) ────────────────────────────────────────────────

    def begins(self, activity: Activity) -> None:
        """Write down when an all-reduce of gradients begins."""
        gradients = () if activity.tensor is None else self._gradients_in(activity.tensor)
        if gradients:
            self._sent[activity] = SentBucket(gradients, activity.bytes, time.perf_counter())

    def waits(self, activity: Activity) -> None:
        """Ignore it: the tracker does not show how long ranks wait."""

    def ends(self, activity: Activity) -> None:
        """Write down when an all-reduce of gradients ends."""
        if activity in self._sent:
            self._sent[activity].end = time.perf_counter()

    # ── what torch reports ──────────────────────────────────────────────────────────────────────────────────────

    def _register(self) -> Iterator[RemovableHandle]:
        for parameter in self._parameters.values():
            yield parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
        owners = {name.rpartition(".")[0] for name in self._parameters}
        for owner in owners:
            # `owner=owner` gives each function the name of its own module; without it, every function would see the
            # loop's last.
            def on_call(module: nn.Module, inputs: Any, owner: str = owner) -> None:  # noqa: ARG001
                self._called.setdefault(owner, time.perf_counter())

            yield self._model.get_submodule(owner).register_forward_pre_hook(on_call)
        yield self._model.register_forward_hook(self._on_forward_end)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        self._ready[self._names[id(parameter)]] = time.perf_counter()

    def _on_forward_end(self, *_: Any) -> None:
        self._forward_end = time.perf_counter()

    def _gradients_in(self, tensor: torch.Tensor) -> tuple[str, ...]:
        """The parameters whose gradients a tensor holds: it is one's gradient, or the buffer of a bucket."""
        for bucket in _buckets_of(self._model):
            if bucket.buffer is tensor:
                return tuple(self._names[id(parameter)] for parameter in bucket.parameters)
        return tuple(name for name, parameter in self._parameters.items() if parameter.grad is tensor)

    def _forward_order(self, buckets: Sequence[Sequence[str]]) -> tuple[str, ...]:
        """The order in which parameters were registered, unless `DataParallel` filled buckets as gradients arrived."""
        if _reducer_of(self._model) is None:
            return tuple(self._parameters)
        sent = [name for bucket in buckets for name in bucket][::-1]  # backward's order, reversed
        return (*(name for name in self._parameters if name not in set(sent)), *sent)

    def _gather_times(self, step: TrackedStep, sent: Sequence[SentBucket]) -> list[RankTimes]:
        """Every rank's times, by an all-gather."""
        parameters, buckets = len(step.parameters), len(step.buckets)
        mine = [
            self._forward_end,
            *(self._called.get(name.rpartition(".")[0], math.nan) for name in step.parameters),
            *(self._ready.get(name, math.nan) for name in step.parameters),
            *(bucket.start for bucket in sent),
            *(bucket.end for bucket in sent),
        ]
        times = []
        for numbers in self.comms.all_gather(torch.tensor(mine, dtype=torch.float64)):
            end, *rows = torch.split(numbers, [1, parameters, parameters, buckets, buckets])
            called, ready, starts, ends = (tuple(row.tolist()) for row in rows)
            times.append(RankTimes(called, end.item(), ready, starts, ends))
        return times


@dataclass
class SentBucket:
    """An all-reduce of gradients on this rank; times in seconds of `time.perf_counter`."""

    parameters: tuple[str, ...]  # names
    size: int  # bytes
    start: float
    end: float = math.nan


def _buckets_of(model: nn.Module) -> Iterator[GradientBucket | FlatBucket]:
    """The buckets of a model's hooks (`BucketedDDPHooks`), or of its reducer (`DataParallel`)."""
    hooks = registered_hooks(model)
    if hooks is not None:
        yield from (bucket for bucket in hooks.buckets if isinstance(bucket, GradientBucket))
    reducer = _reducer_of(model)
    if reducer is not None:
        yield from reducer.buckets


def _reducer_of(model: nn.Module) -> Reducer | None:
    for parameter in model.parameters():
        for hook in hooks_of_gradient(parameter):
            if isinstance(hook, ArrivalHook):
                return hook.reducer()
    return None


# ── from times to a trace ───────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class TrackedStep:
    """What is the same on all ranks: the parameters of the model, and which gradients were sent together."""

    parameters: tuple[str, ...]  # in the order of forward
    buckets: tuple[tuple[str, ...], ...]  # in the order in which they were sent
    sizes: tuple[int, ...]  # bytes of each bucket


@dataclass(frozen=True)
class RankTimes:
    """What one rank wrote down, in seconds of a clock that all ranks share; NaN for what never happened.

    Numbers stand in the order of `TrackedStep`.
    """

    called: tuple[float, ...]  # for each parameter, when its module's forward first began
    forward_end: float
    ready: tuple[float, ...]  # for each parameter, when its gradient was
    starts: tuple[float, ...]  # for each bucket, when this rank called all_reduce
    ends: tuple[float, ...]  # for each bucket, when the sum was there


@dataclass(frozen=True)
class TrackedLayer:
    """Neighbouring parameters of one module whose gradients are sent together: a stage of the program."""

    stage: int
    module: str
    members: tuple[int, ...]  # places among the parameters
    bucket: int | None


def trace_of(name: str, step: TrackedStep, times: Sequence[RankTimes], transport: str = "gloo") -> Trace:
    """Make one trace of all ranks' times.

    - A layer's forward lasts until the forward of the next begins; its backward lasts from the gradient before it to
      its own. (What lies between, such as the loss, counts as part of the layer that follows.)
    - An all-reduce begins when every rank has called it and the all-reduce before it has ended, since a rank that only
      waits for these does not communicate. (The transport may have begun earlier, which hooks cannot see.)
    - A rank sends what the algorithm sends that the transport takes (`collectives.resolve`).
    """
    layers = layers_of(step)
    computed = [[*_forwards(rank, layers, mine), *_backwards(rank, layers, mine)] for rank, mine in enumerate(times)]
    full = _full(layers, step, [event for events in computed for event in events])
    orders = []
    for rank in range(len(times)):
        events = [*computed[rank], *_all_reduces(rank, step, times, full, transport)]
        orders.append(sorted(events, key=lambda event: (event.start, event.end)))  # what takes no time comes first
    program = Program(
        name,
        TrainingStep(len(layers), len(times), _ranges(layers, step)),
        tuple(tuple(event.operation for event in order) for order in orders),
    )
    return Trace([event for order in orders for event in order], program)


def layers_of(step: TrackedStep) -> list[TrackedLayer]:
    """Cut the parameters into layers; a module whose gradients are sent in two all-reduces is two layers."""
    bucket_of = {name: index for index, names in enumerate(step.buckets) for name in names}

    def key(place: int) -> tuple[str, int | None]:
        name = step.parameters[place]
        return name.rpartition(".")[0], bucket_of.get(name)

    groups = groupby(range(len(step.parameters)), key)
    return [
        TrackedLayer(stage, module, tuple(places), bucket) for stage, ((module, bucket), places) in enumerate(groups)
    ]


def _ranges(layers: list[TrackedLayer], step: TrackedStep) -> tuple[tuple[int, int], ...]:
    """The layers of each bucket, which are neighbours, since layers stand in the order of the buckets."""
    ranges = []
    for bucket in range(len(step.buckets)):
        stages = [layer.stage for layer in layers if layer.bucket == bucket]
        ranges.append((min(stages), max(stages) + 1))
    return tuple(ranges)


def _forwards(rank: int, layers: list[TrackedLayer], times: RankTimes) -> Iterator[Event]:
    """Modules one after another; of a module that is two layers, the second has the time, and the first takes none."""
    begun = {layer.stage: times.called[layer.members[0]] for layer in layers}
    called = sorted((layer for layer in layers if not math.isnan(begun[layer.stage])), key=lambda o: begun[o.stage])
    ends = [*(begun[layer.stage] for layer in called[1:]), *([times.forward_end] if called else [])]
    for layer, end in zip(called, ends, strict=True):
        yield Event(rank, Lane.COMPUTE, Forward(layer.stage, rank), begun[layer.stage], end)
    for layer in layers:  # its parameters are used, but not by calling its module
        if math.isnan(begun[layer.stage]) and not math.isnan(_ready(layer, times)):
            yield Event(rank, Lane.COMPUTE, Forward(layer.stage, rank), times.forward_end, times.forward_end)


def _backwards(rank: int, layers: list[TrackedLayer], times: RankTimes) -> Iterator[Event]:
    """Gradients one after another; those of one module are made together, so its first layer has all the time."""
    used = [layer for layer in layers if not math.isnan(_ready(layer, times))]
    free = times.forward_end
    for _, together in groupby(sorted(used, key=lambda layer: _ready(layer, times)), key=lambda layer: layer.module):
        burst = sorted(together, key=lambda layer: -layer.stage)
        end = max(_ready(layer, times) for layer in burst)
        for layer in burst:
            yield Event(rank, Lane.COMPUTE, Backward(layer.stage, rank), free, end)
            free = end


def _full(layers: list[TrackedLayer], step: TrackedStep, computed: list[Event]) -> list[float]:
    """For each bucket, when all its gradients were ready on all ranks that made them."""
    bucket_of = {layer.stage: layer.bucket for layer in layers}
    ends: list[list[float]] = [[-math.inf] for _ in step.buckets]
    for event in computed:
        if isinstance(event.op, Backward) and (bucket := bucket_of[event.op.stage]) is not None:
            ends[bucket].append(event.end)
    return [max(each) for each in ends]


def _all_reduces(
    rank: int, step: TrackedStep, times: Sequence[RankTimes], full: list[float], transport: str
) -> Iterator[Event]:
    free = -math.inf
    for bucket, size in enumerate(step.sizes):
        start = max([free, full[bucket], *(other.starts[bucket] for other in times)])
        free = max(start, times[rank].ends[bucket])
        operation = AllReduce(Bucket(bucket), "dp")
        messages, sent = traffic(operation, range(len(times)), size, transport)[rank]
        yield Event(rank, Lane.COMM, operation, start, free, messages, sent, size)


def _ready(layer: TrackedLayer, times: RankTimes) -> float:
    """When the last gradient of a layer was ready; NaN if one never was."""
    members = [times.ready[place] for place in layer.members]
    return math.nan if any(map(math.isnan, members)) else max(members)
