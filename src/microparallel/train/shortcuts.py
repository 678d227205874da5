"""Synchronise less often: what does it save, and what does it do to the loss?

Three ways to learn from the same batches in the same order, which differ in nothing else:

```
every step      ▒▒ ▓ u ▒▒ ▓ u ▒▒ ▓ u ▒▒ ▓ u    ▒▒ forward, backward    ▓ synchronise    u update
accumulation    ▒▒ ▒▒ ▒▒ ▒▒ ▓ u
averaging       ▒▒ u ▒▒ u ▒▒ u ▒▒ u ▓
                                           ↑ here all ranks have one model, whose loss is measured
```
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from microparallel.comms import Comms
from microparallel.comms.message_group import count_messages
from microparallel.course.shortcuts import ParameterAveraging, accumulate, accumulated_step
from microparallel.data_parallel import DataParallel
from microparallel.errors import UsageError
from microparallel.models.loss import sum_and_count
from microparallel.train.batch import Batch
from microparallel.train.build import build
from microparallel.train.compare import Progress, largest
from microparallel.train.config import TrainConfig
from microparallel.train.data import Stream
from microparallel.train.loader import Loaded
from microparallel.train.training import Training
from microparallel.world import Pool

_PROBE = 4  # batches: the samples on which the loss is measured, the same at every point and for every way

Drawn = tuple[list[Batch], int]  # this rank's micro-batches of a batch, and the samples of all ranks
Learn = Callable[[Sequence[Drawn]], int]  # learns from some batches; says how often the ranks synchronised


@dataclass(frozen=True)
class Curve:
    """What came of one way to learn from the batches."""

    way: str
    ranks: int
    every: int
    updates: int  # of the optimizer
    synchronisations: int
    bytes_a_sample: float  # sent by the rank that sent most, counted as the messages left
    bytes_by_formula: float  # what a ring sends of the parameters alone
    final_loss: float
    loss_difference: float  # the largest over the curve, from that of synchronising every step
    samples: list[int]  # seen so far, at each point of the curve
    losses: list[float]


@dataclass(frozen=True)
class _Counted:
    """What one rank has counted."""

    samples: list[int]
    losses: list[float]
    synchronisations: int
    bytes_sent: int
    parameter_bytes: int


def compare_shortcuts(config: TrainConfig, every: int, pool: Pool, progress: Progress = lambda _: None) -> list[Curve]:
    """Learn from the same batches in each of the three ways, and measure loss and bytes; `every` divides the steps."""
    curves: list[Curve] = []
    for way in WAYS:
        progress(f"{way} on {config.ranks} ranks")
        results = pool.run(
            learn, config.ranks, config, way, every, transport=config.transport, device=config.device, mps=config.mps
        )
        curves.append(_curve(way, config, every, results, curves[0].losses if curves else results[0].losses))
    return curves


def learn(comms: Comms, config: TrainConfig, way: str, every: int) -> _Counted:
    """One rank's part in learning all batches in one of the ways; only rank 0 measures the loss."""
    training = build(replace(config, strategy="naive"), comms)  # it adds nothing to the model; its step is not used
    counted, counts = count_messages(comms)
    learn_from = WAYS[way](training, counted, every)
    before = counts.bytes_sent  # getting ready is not counted
    samples, losses, synchronisations = [0], [_loss(training, config)], 0
    for first in range(0, config.steps or 0, every):
        training.set_learning_rate(first)  # where it is not constant, it changes for all ways at the same samples
        batches = [training.draw() for _ in range(every)]
        synchronisations += learn_from(batches)
        samples.append(samples[-1] + sum(together for _, together in batches))
        losses.append(_loss(training, config))
    parameters = [parameter for parameter in training.model.parameters() if parameter.requires_grad]
    return _Counted(
        samples, losses, synchronisations, counts.bytes_sent - before, sum(tensor.nbytes for tensor in parameters)
    )


# ── the three ways ──────────────────────────────────────────────────────────────────────────────────────────────────


def every_step(training: Training, comms: Comms, every: int) -> Learn:  # noqa: ARG001
    """Average gradients after every batch."""
    model = DataParallel(training.with_loss, comms)

    def learn_from(batches: Sequence[Drawn]) -> int:
        for parts, samples in batches:
            training.optimizer.zero_grad()
            accumulated_step(model, [part.pair for part in parts], samples=samples)
            training.optimizer.step()
        return len(batches)

    return learn_from


def accumulation(training: Training, comms: Comms, every: int) -> Learn:  # noqa: ARG001
    """Add gradients up over several batches, average them once, and update once."""
    model = DataParallel(training.with_loss, comms)

    def learn_from(batches: Sequence[Drawn]) -> int:
        micro_batches = [part.pair for parts, _ in batches for part in parts]
        training.optimizer.zero_grad()
        accumulated_step(model, micro_batches, samples=sum(samples for _, samples in batches))
        training.optimizer.step()
        return 1

    return learn_from


def averaging(training: Training, comms: Comms, every: int) -> Learn:
    """Let every rank update its own model after every batch, and average the models after several."""
    together = ParameterAveraging(training.model, comms, every)

    def learn_from(batches: Sequence[Drawn]) -> int:
        synchronisations = 0
        for parts, _ in batches:
            training.optimizer.zero_grad()
            if mine := sum(map(len, parts)):
                accumulate(training.with_loss, [part.pair for part in parts], samples=mine)
            training.optimizer.step()
            synchronisations += together.after_step(samples=mine)
        return synchronisations

    return learn_from


WAYS: dict[str, Callable[[Training, Comms, int], Learn]] = {
    "every step": every_step,
    "accumulation": accumulation,
    "averaging": averaging,
}


# ── what is measured ────────────────────────────────────────────────────────────────────────────────────────────────


def _loss(training: Training, config: TrainConfig) -> float:
    """The loss of the model that all ranks have now, on the first samples of the data."""
    if training.comms.rank != 0:
        return math.nan
    data = training.data.training
    if isinstance(data, Stream):
        raise UsageError("--shortcuts measures the loss on samples with numbers, and this data is a stream")
    samples = min(len(data), _PROBE * (config.batch or 1))
    [batch] = training.batches(Loaded([(data.batch(range(samples)), samples)], samples))
    training.model.eval()
    with torch.no_grad():
        total, count = sum_and_count(training.with_loss(batch), samples)
    training.model.train()
    return float(total) / count


def _curve(way: str, config: TrainConfig, every: int, results: Sequence[_Counted], reference: Sequence[float]) -> Curve:
    first = results[0]
    seen, steps = first.samples[-1], config.steps or 0
    differences = [abs(mine - theirs) for mine, theirs in zip(first.losses, reference, strict=True)]
    return Curve(
        way=way,
        ranks=config.ranks,
        every=every,
        updates=steps // every if way == "accumulation" else steps,
        synchronisations=first.synchronisations,
        bytes_a_sample=max(result.bytes_sent for result in results) / seen,
        bytes_by_formula=ring_bytes(config.ranks, first.parameter_bytes) * first.synchronisations / seen,
        final_loss=first.losses[-1],
        loss_difference=largest(differences),
        samples=first.samples,
        losses=first.losses,
    )


def ring_bytes(ranks: int, size: int) -> float:
    """What each rank of a ring sends to all-reduce so many bytes."""
    return 2 * (ranks - 1) / ranks * size
