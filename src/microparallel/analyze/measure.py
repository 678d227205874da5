"""What `microparallel analyze` does on the ranks: train a few steps, and record them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from microparallel.analyze.analyzer import CommunicationEstimate, DDPPerformanceAnalyzer
from microparallel.analyze.bottleneck import Demand, Machine, demand_of, measure_machine
from microparallel.analyze.codecs import measure_codecs
from microparallel.analyze.compressed import Codec, gradient_sums
from microparallel.analyze.step_timing import StepTiming
from microparallel.bench.engine import Measured, where
from microparallel.bench.ranks import progress_on_standard_error
from microparallel.collectives import ALL_REDUCES
from microparallel.comms import Comms
from microparallel.course.shortcuts import accumulate
from microparallel.simulator.fitted import fit_step
from microparallel.topology import Link
from microparallel.train.build import build
from microparallel.train.config import OF_COMPRESSION, TrainConfig
from microparallel.train.training import Training

_WARM_UP = 3  # steps: buckets are arranged, memory is taken
_LARGER_WORLDS = (8, 64)
_ESTIMATED = ("ring", "tree", "halving-doubling")
_SMALLEST_ESTIMATE, _LARGEST_ESTIMATE = 1000, 64 * 10**6  # bytes


@dataclass(frozen=True)
class Findings(Measured):
    """What was found out about a run, on rank 0."""

    timing: StepTiming
    estimates: tuple[CommunicationEstimate, ...]
    demand: Demand | None
    machine: Machine | None
    parameters: int
    codecs: tuple[Codec, ...] = ()
    link: Link | None = None  # what a message costs, where that was measured


def measure(comms: Comms, config: TrainConfig, steps: int, barriers: bool, quiet: bool) -> Findings:
    """Train, record and estimate; every rank calls this."""
    training = build(config, comms)
    comms = training.comms  # whose links may be slow on purpose
    analyzer = DDPPerformanceAnalyzer(comms)
    with progress_on_standard_error(comms.rank == 0 and not quiet, "steps") as progress:
        total = _WARM_UP + steps
        done = 0

        def step() -> float:
            nonlocal done
            progress(0.8 * done / total, "a step", done)
            done += 1
            return training.step()

        for _ in range(_WARM_UP):
            step()
        first = comms.rank == 0  # the samples are those of all ranks, so one of them tells
        timing = analyzer.time_steps(step, lambda: training.last_samples * first, steps)
        if barriers:
            progress(0.8, "barriers", 0)
            timing = _beside_barriers(analyzer, training, timing, first)
        progress(0.85, "memory", 0)
        machine, demand = measure_machine(comms.device), _demand(training, config)
        progress(0.9, "messages", 0)
        estimates = _estimates(analyzer, comms, timing)
        progress(0.95, "compression", 0)
        codecs = _codecs(training, comms, timing)
    link = Link(estimates[0].latency, 1 / estimates[0].bandwidth) if estimates else None
    return Findings(*where(comms), timing, estimates, demand, machine, training.parameters, codecs, link)


def _codecs(training: Training, comms: Comms, timing: StepTiming) -> tuple[Codec, ...]:
    """What it costs to compress a step's gradients; nothing where they are not summed, or compressed already."""
    if comms.world_size == 1 or not gradient_sums(fit_step(timing.trace)):
        return ()
    shapes = [tuple(one.shape) for one in training.model.parameters() if one.requires_grad]
    return measure_codecs(shapes, comms.world_size, comms.device)


def _beside_barriers(
    analyzer: DDPPerformanceAnalyzer, training: Training, timing: StepTiming, first: bool
) -> StepTiming:
    def backward() -> Any:
        batches, samples = training.draw()
        training.optimizer.zero_grad()
        return training.strategy(batches, samples)

    update = training.optimizer.step
    samples = training.last_samples * first
    phases, distorted = analyzer.time_with_barriers(training.model, backward, update, samples)
    return replace(timing, phases=phases, with_barriers=distorted)


def _demand(training: Training, config: TrainConfig) -> Demand | None:
    """What a step asks of this rank; None for a pipeline, whose ranks have a part of the model each."""
    if config.is_pipeline:
        return None
    batches, _ = training.draw()
    if not batches:
        return None
    model = copy.deepcopy(training.with_loss)  # without hooks, so no other rank is needed
    parameters = [one for one in model.parameters() if one.requires_grad]

    def step() -> None:
        accumulate(model, [batch.pair for batch in batches], samples=sum(map(len, batches)))

    return demand_of(step, parameters, type(training.optimizer).__name__)


def _estimates(analyzer: DDPPerformanceAnalyzer, comms: Comms, timing: StepTiming) -> tuple[CommunicationEstimate, ...]:
    """An all-reduce of the largest size in the step, by some algorithms, here and in larger worlds."""
    sizes = [int(event.bytes) for event in timing.trace.events if event.kind == "collective"]
    if comms.world_size == 1 or max(sizes, default=0) < _SMALLEST_ESTIMATE:
        return ()
    size = min(_LARGEST_ESTIMATE, max(sizes)) // 4 * 4
    worlds = [comms.world_size, *(world for world in _LARGER_WORLDS if world > comms.world_size)]
    return tuple(
        analyzer.estimate_communication(name, size, world)
        for name in _ESTIMATED
        if name in ALL_REDUCES
        for world in worlds
    )


def make_step(config: TrainConfig, comms: Comms, batch: int) -> Callable[[], Any]:
    """A function that does one step of the same training with other ranks, or another batch."""
    return build(config_for(config, comms.world_size, batch), comms).step


def config_for(config: TrainConfig, ranks: int, batch: int) -> TrainConfig:
    """The same training with other ranks, and another batch."""
    dp, pp = config.layout
    if ranks != config.world_size:  # the rank that is slow on purpose may not be there
        config = replace(config, slow_rank=None, slow_link=None)
    if ranks == (pp if dp > 1 else 1):  # one replica sends no gradients
        config = replace(config, **dict.fromkeys(("compress", *OF_COMPRESSION)))  # type: ignore[arg-type]
    balance = None if config.balance is not None and "," in config.balance else config.balance
    if config.is_pipeline:
        layout = {"dp": ranks // pp, "pp": pp} if dp > 1 else {"dp": 1, "pp": ranks}
        return replace(config, ranks=1, batch=batch, balance=balance, **layout)  # type: ignore[arg-type]
    if ranks == 1:
        return replace(config, ranks=1, dp=None, batch=batch, strategy="auto", average_every=None)
    return replace(config, ranks=ranks, dp=None, batch=batch)
