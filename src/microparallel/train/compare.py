"""The same job done in several ways: do they learn the same thing?"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from microparallel.comms import Comms
from microparallel.train.build import build
from microparallel.train.config import TrainConfig
from microparallel.world import Pool

# How far apart two ways of adding the same numbers may end, relative to the largest: rounding, and nothing else.
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}


@dataclass(frozen=True)
class Outcome:
    """What one strategy made of the job."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    seconds_a_step: float


@dataclass(frozen=True)
class Comparison:
    """One strategy beside the single process."""

    strategy: str
    ranks: int
    final_loss: float
    loss_difference: float  # the largest over all steps, relative to the single process's loss
    weight_difference: float  # the largest over all weights, relative to the largest weight of its tensor
    seconds_a_step: float
    agrees: bool


def outcome(comms: Comms, config: TrainConfig) -> Outcome | None:
    """Do the job on one rank; rank 0 tells what came of it."""
    training = build(config, comms)
    losses, seconds = [], []
    for _ in range(config.steps or len(training.sampler)):
        begun = time.perf_counter()
        losses.append(training.step())
        seconds.append(time.perf_counter() - begun)
    if comms.rank != 0:
        return None
    weights = {name: tensor.cpu() for name, tensor in training.model.state_dict().items()}
    return Outcome(losses, weights, statistics.median(seconds[2:] or seconds))  # the first steps warm up


def compare(
    config: TrainConfig, strategies: Sequence[str], pool: Pool, progress: Callable[[str], None] = lambda _: None
) -> list[Comparison]:
    """Do a job as a single process, then with each strategy, and measure how far apart they end."""

    def run(strategy: str) -> Outcome:
        ranks = 1 if strategy == "single" else config.ranks
        progress(f"{strategy} on {ranks} rank{'s' * (ranks > 1)}")
        job = replace(config, strategy=strategy, ranks=ranks)
        result: Outcome = pool.run(outcome, ranks, job, transport=config.transport, device=config.device)[0]
        return result

    reference = run("single")
    rows = [_beside("single", 1, reference, reference, config.dtype)]
    return rows + [_beside(name, config.ranks, run(name), reference, config.dtype) for name in strategies]


def _beside(strategy: str, ranks: int, ours: Outcome, reference: Outcome, dtype: str) -> Comparison:
    loss_difference = _largest(
        abs(mine - theirs) / max(abs(theirs), 1e-30) for mine, theirs in zip(ours.losses, reference.losses, strict=True)
    )
    weight_difference = _largest(
        ((ours.weights[name] - weight).abs().max() / weight.abs().max().clamp_min(1e-30)).item()
        for name, weight in reference.weights.items()
        if weight.is_floating_point() and weight.numel()
    )
    return Comparison(
        strategy=strategy,
        ranks=ranks,
        final_loss=ours.losses[-1],
        loss_difference=loss_difference,
        weight_difference=weight_difference,
        seconds_a_step=ours.seconds_a_step,
        agrees=max(loss_difference, weight_difference) <= TOLERANCE[dtype],
    )


def _largest(differences: Iterable[float]) -> float:
    """The largest difference; infinite when one of them is not a number, which `max` would pass over."""
    return max(difference if math.isfinite(difference) else math.inf for difference in differences)
