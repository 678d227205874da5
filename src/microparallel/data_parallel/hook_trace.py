"""From what ranks wrote down during a step to a Trace: what each computed when, and when its buckets travelled."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from microparallel.collectives import traffic
from microparallel.program import AllReduce, Backward, Bucket, Forward, Lane, Program, TrainingStep
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
