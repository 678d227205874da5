"""The optimizer, by its name in torch or the user's own, and the learning rate over the steps of a run."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from microparallel.comms import Comms
from microparallel.data_parallel import ShardedOptimizer
from microparallel.data_parallel.sharded_optimizer import finest_cut, is_known
from microparallel.errors import ConfigError, UsageError
from microparallel.pipeline import Pipeline
from microparallel.train import user_code
from microparallel.train.config import TrainConfig, optimizer_names

_WARM_UP = 0.1  # the part of a run in which a linear or cosine learning rate goes up, unless something else is said


def build_optimizer(
    config: TrainConfig, model: nn.Module | Pipeline, shared_by: Comms | None = None
) -> torch.optim.Optimizer:
    """Make one of torch's own optimizers, or call the user's function with the model and the learning rate.

    Args:
        config: names it, with its options.
        model: whose parameters it updates.
        shared_by: ranks that keep a part of its state each; None: every rank keeps all of it.
    """
    name, lr = config.optimizer or "", config.lr
    if user_code.is_spec(name):
        made = user_code.call(user_code.load(name, "optimizer"), f"optimizer {name!r}", model, lr)
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(
                f"--optimizer {name} returned {type(made).__name__}: return a torch.optim.Optimizer of the parameters "
                "of the model it is given"
            )
        _require_divisible(config, made)
        return made if shared_by is None else _sharded(config, made, shared_by)
    kind = getattr(torch.optim, optimizer_names()[name.lower()])
    given = {"momentum": config.momentum or None, "weight_decay": config.weight_decay}
    options = {option: value for option, value in given.items() if value is not None}
    known = inspect.signature(kind).parameters
    for option, value in options.items():
        if option not in known:
            raise ConfigError(
                f"--{option.replace('_', '-')} {value} means nothing to --optimizer {name}; leave one of them out"
            )
    try:
        optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=lr, **options)
    except ValueError as error:
        raise ConfigError(f"--optimizer {name} cannot train this model: {error}") from error
    _require_divisible(config, optimizer)
    return optimizer if shared_by is None else _sharded(config, optimizer, shared_by)


def _require_divisible(config: TrainConfig, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that looks at whole parameters where each rank has its part of them."""
    kind = type(optimizer)
    if config.shard != "parameters" or finest_cut(kind) == "element":
        return
    if is_known(kind):
        raise ConfigError(
            f"--shard parameters: --optimizer {config.optimizer} looks at whole parameters, and a rank has a part of "
            "each; try --optimizer adamw, or --shard gradients"
        )
    raise ConfigError(_not_known(config, kind))


def _sharded(config: TrainConfig, whole: torch.optim.Optimizer, ranks: Comms) -> ShardedOptimizer:
    """The same optimizer, whose state the ranks share; a group has all options, so nothing else is needed of it."""
    kind = type(whole)
    if not is_known(kind):
        raise ConfigError(_not_known(config, kind))
    return ShardedOptimizer(whole.param_groups, kind, ranks, by=finest_cut(kind))


def _not_known(config: TrainConfig, kind: type[torch.optim.Optimizer]) -> str:
    return (
        f"--shard {config.shard}: --optimizer {config.optimizer} returned {kind.__name__}, which is none of "
        "torch's own, so it is not known how to share its state; leave --shard out, or try --optimizer adamw"
    )


# ── the learning rate ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class LearningRate:
    """A learning rate over a run of so many steps: constant, linear, cosine, or the user's own function of the step.

    ```
    linear   peak    ╱╲__
                    ╱    ╲__
             0     ╱        ╲__
                   0  10 %    100 % of the steps
    ```

    It is a function of the step alone, so a resumed run needs to remember nothing; one that is made longer follows the
    longer schedule from there on.

    Attributes:
        schedule: `constant`, `linear` or `cosine`, or a function from the step, counted from 0, to a factor.
        steps: how many steps the run has.
        warmup: the steps in which the rate goes up to its peak, or, below 1, the part of all steps; None for a tenth
            of them, or for none with `constant` and the user's own.
    """

    schedule: str | Callable[[int], float]
    steps: int
    warmup: float | None = None

    @property
    def up(self) -> int:
        """The steps in which the rate goes up."""
        if self.warmup is None:
            return max(1, round(_WARM_UP * self.steps)) if self.schedule in ("linear", "cosine") else 0
        return int(self.warmup) if self.warmup >= 1 else round(self.warmup * self.steps)

    def at(self, step: int, peak: float) -> float:
        """The learning rate of a step, counted from 0, where it is `peak` at its highest."""
        if callable(self.schedule):
            peak = peak * _factor(self.schedule, step)
        if step < self.up:
            return peak * (step + 1) / self.up
        if self.schedule == "linear":
            return peak * max(0, self.steps - step) / max(1, self.steps - self.up)
        if self.schedule == "cosine":
            return peak * (1 + math.cos(math.pi * min(1.0, (step - self.up) / max(1, self.steps - self.up)))) / 2
        return peak


def build_learning_rate(config: TrainConfig, steps: int) -> LearningRate:
    """The learning rate that the configuration names; a user's `make_schedule` is called with the number of steps."""
    name: Any = config.schedule_lr
    if user_code.is_spec(name):
        made = user_code.call(user_code.load(name, "schedule"), f"--schedule-lr {name}", steps)
        if not callable(made):
            raise ConfigError(
                f"--schedule-lr {name} returned {type(made).__name__}: return a function from the step, counted from "
                "0, to the factor by which --lr is multiplied"
            )
        _factor(made, 0)
        return LearningRate(made, steps, config.warmup)
    return LearningRate(name, steps, config.warmup)


def _factor(schedule: Callable[[int], float], step: int) -> float:
    factor = user_code.call(schedule, f"--schedule-lr, asked for step {step},", step)
    if not (isinstance(factor, int | float) and math.isfinite(factor) and factor >= 0):
        raise UsageError(f"--schedule-lr returned {factor!r} for step {step}: return a finite number, at least 0")
    return float(factor)
