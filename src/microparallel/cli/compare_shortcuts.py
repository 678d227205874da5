"""`microparallel compare --shortcuts`: what synchronising less often saves, and what it does to the loss."""

from __future__ import annotations

import json as json_format
import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from microparallel.cli.curves import draw_curves
from microparallel.errors import ConfigError
from microparallel.train.config import TrainConfig
from microparallel.train.run_folder import without_nan

if TYPE_CHECKING:
    from microparallel.train.shortcuts import Curve

EVERY = 4
# A model that learns within a few seconds by plain SGD, for which the theory is simple.
DEFAULTS: dict[str, Any] = {"steps": 120, "lr": 0.05}
DEPTH = 4  # of the mlp


def show_shortcuts(config: TrainConfig, every: int, json: bool) -> int:
    """Do the work, and print it; the exit code is 1 if a loss was lost on the way."""
    _require_sensible(config, every)
    curves = _curves(config, every)
    if json:
        print(json_format.dumps(without_nan([asdict(curve) for curve in curves]), indent=2))
    else:
        console = Console()
        console.print(_table(curves, config))
        chart = draw_curves({curve.way: curve.losses for curve in curves}, curves[0].samples, "samples")
        console.print(chart, highlight=False, markup=False)
        console.print(explain(curves, config), highlight=False, markup=False)
    return 0 if all(math.isfinite(loss) for curve in curves for loss in curve.losses) else 1


def _require_sensible(config: TrainConfig, every: int) -> None:
    steps = config.steps or 0
    if every < 1:
        raise ConfigError(f"--every {every}: must be at least 1; try {EVERY}")
    if not steps:
        raise ConfigError(f"--epochs {config.epochs}: --shortcuts counts steps; give --steps instead")
    if steps % every:
        raise ConfigError(
            f"--every {every} does not divide --steps {steps}, and the last few would not be synchronised; "
            f"try --steps {-(-steps // every) * every}"
        )
    if config.accumulate > 1 or config.average_every is not None:
        raise ConfigError("--shortcuts compares accumulate and average_every itself; set --every, and leave them out")
    if config.transport == "nccl":
        raise ConfigError("--transport nccl: --shortcuts counts single messages, which gloo and shm send; leave it out")


def _curves(config: TrainConfig, every: int) -> list[Curve]:
    from microparallel.train.build import check
    from microparallel.train.shortcuts import compare_shortcuts
    from microparallel.world import Pool

    check(config)
    if config.transport == "auto":
        config = replace(config, transport="gloo")  # it sends messages from any device
    with Console(stderr=True).status("starting ranks") as status, Pool() as pool:
        return compare_shortcuts(config, every, pool, lambda text: status.update(f"running {text}"))


def _table(curves: list[Curve], config: TrainConfig) -> Table:
    table = Table(
        title=f"{config.model}, {config.steps} batches of {config.batch} samples on {config.ranks} ranks, "
        f"{config.dtype}, {config.optimizer}",
        caption="Δ loss: the largest difference from the curve of every step\n"
        "bytes: sent by a rank, counted as messages of a ring leave\n"
        "formula: 2(p - 1)/p of the parameters, each time",
    )
    headings = ("way", "synchro-\nnised", "updates", "final\nloss", "Δ loss", "bytes a\nsample", "by\nformula")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "way" else "right", no_wrap=True)
    for curve in curves:
        table.add_row(
            curve.way,
            f"{curve.synchronisations}",
            f"{curve.updates}",
            f"{curve.final_loss:.6f}",
            f"{curve.loss_difference:.1e}" if curve.loss_difference else "0",
            f"{curve.bytes_a_sample:,.0f}",
            f"{curve.bytes_by_formula:,.0f}",
        )
    return table


def explain(curves: list[Curve], config: TrainConfig) -> str:
    """Say in a sentence each what was seen of the two shortcuts, and why."""
    _, accumulation, averaging = curves
    every = accumulation.every
    if every == 1:
        first = "accumulation of 1 batch is the step itself."
    else:
        first = (
            f"accumulation is exactly the step of a batch {every} times as large, so nothing about it is wrong; but it "
            f"made {accumulation.updates} updates where every step made {averaging.updates}, at the same learning rate."
        )
    return f"{first}\n{_why_averaging_differs(curves[0], averaging, config)}"


def _why_averaging_differs(reference: Curve, averaging: Curve, config: TrainConfig) -> str:
    from microparallel.train.compare import TOLERANCE

    same = averaging.loss_difference <= TOLERANCE[config.dtype] * max(map(abs, reference.losses))
    if same and averaging.every == 1:
        return (
            "averaging parameters after every step is the same as averaging gradients here: the update of "
            f"{config.optimizer} is linear in the gradient, and the mean of (p - lr·g) is p - lr·(the mean of g)."
        )
    if same:
        return "averaging made no difference that can be measured here: the ranks hardly moved apart in between."
    if averaging.every > 1:
        stateless = config.optimizer == "sgd" and not config.momentum
        own = "" if stateless else ", with an optimizer state of its own"
        return (
            f"averaging parameters is not averaging gradients: after the first of {averaging.every} updates each rank "
            f"has weights of its own and computes its next gradients there{own}; that takes the loss up to "
            f"{averaging.loss_difference:.2g} away from the curve of every step."
        )
    if config.optimizer == "sgd":
        return "averaging differs though every step was averaged: momentum stays with the rank that gathered it."
    return (
        f"averaging parameters is not averaging gradients, even after every step: {config.optimizer} divides each "
        "rank's update by the size of its own gradients, and a mean of such ratios is not the ratio of the means."
    )
