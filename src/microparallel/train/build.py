"""Put a training run together from its configuration: the only file that knows all the parts."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from microparallel.comms import Comms
from microparallel.comms.calls import describe
from microparallel.comms.slow_links import slow_down
from microparallel.course.shortcuts import ParameterAveraging
from microparallel.data_parallel import replicate
from microparallel.errors import ConfigError, DataError, UsageError
from microparallel.models import GPT, FullMLP, cross_entropy, mean_squared_error
from microparallel.models.loss import LossFunction
from microparallel.pipeline import Pipeline
from microparallel.pipeline.cut import cut
from microparallel.pipeline.programs import Schedule
from microparallel.text import nearest
from microparallel.topology import parse_slow_links, parse_slow_ranks
from microparallel.torch_private import pytree
from microparallel.train import user_code
from microparallel.train.config import DEFAULTS, TrainConfig, parse_balance
from microparallel.train.data import Split, digits, from_user, text
from microparallel.train.sampler import ShardedSampler
from microparallel.train.strategies import STEPS, Step, slow_down_model
from microparallel.train.training import LearningRate, PipelineTraining, Training

Value = TypeVar("Value")

_LOSSES: dict[str, LossFunction] = {"cross-entropy": cross_entropy, "mse": mean_squared_error}


def build(config: TrainConfig, comms: Comms) -> Training:
    """Make one rank's part of the run that a configuration describes."""
    config = config.resolved()
    comms = _with_slow_links(config, comms)
    dtype: torch.dtype = getattr(torch, config.dtype)
    data = build_data(config)
    torch.manual_seed(config.seed)  # the same model on every rank
    model = build_model(config, data).to(dtype)
    if not config.is_pipeline:
        model.to(comms.device)
    replicate(model, comms)  # the same model, even if it was made with other random numbers than torch's
    torch.manual_seed(config.seed + 1 + comms.rank)  # from here on each rank draws its own
    loss_fn = build_loss(config, model, data)
    _slow_down(config, model, comms.rank)
    if config.is_pipeline:
        return _build_pipeline(config, comms, model, loss_fn, data, dtype)
    sampler = ShardedSampler(data.training, _resolved(config.batch), comms=comms, seed=config.seed)
    return Training(
        comms=comms,
        model=model,
        loss_fn=loss_fn,
        optimizer=build_optimizer(config, model),
        data=data,
        sampler=sampler,
        strategy=build_step(config, model, comms, loss_fn),
        learning_rate=LearningRate(_resolved(config.lr_schedule), _resolved(config.lr), total_steps(config, sampler)),
        dtype=dtype,
        averaging=None if config.average_every is None else ParameterAveraging(model, comms, config.average_every),
    )


def _with_slow_links(config: TrainConfig, comms: Comms) -> Comms:
    links = parse_slow_links((config.slow_link or "").split(), comms.world_size)
    return slow_down(comms, links) if links else comms


def _slow_down(config: TrainConfig, model: nn.Module, rank: int) -> None:
    factor = parse_slow_ranks((config.slow_rank or "").split(), config.world_size).get(rank)
    if factor is not None:
        slow_down_model(model, factor)


def _build_pipeline(
    config: TrainConfig, comms: Comms, model: nn.Module, loss_fn: LossFunction | None, data: Split, dtype: torch.dtype
) -> PipelineTraining:
    """Make one rank's part of a run whose model is spread over ranks."""
    if loss_fn is None:
        raise ConfigError(
            "--pp cuts the model from its loss, and this model computes its own; try --loss cross-entropy"
        )
    names = _first_names(model)
    inputs, _ = data.training.batch(range(_samples_of_microbatch(config, len(data.training))))
    pipe = Pipeline(
        model,
        comms,
        user_code.schedule_of(_resolved(config.schedule)),
        _resolved(config.microbatches),
        loss_fn,
        parse_balance(_resolved(config.balance)),
        replicas=_resolved(config.dp),
        stages_per_rank=config.stages_per_rank,
        example=_cast(inputs, dtype) if config.balance == "time" else None,
        recompute=bool(config.recompute),
    )
    sampler = ShardedSampler(
        data.training, _resolved(config.batch), rank=pipe.replica, world_size=pipe.mesh.dp, seed=config.seed
    )
    return PipelineTraining(
        pipe,
        names,
        comms=comms,
        loss_fn=loss_fn,
        optimizer=build_optimizer(config, pipe),
        data=data,
        sampler=sampler,
        learning_rate=LearningRate(_resolved(config.lr_schedule), _resolved(config.lr), total_steps(config, sampler)),
        dtype=dtype,
    )


def _first_names(model: nn.Module) -> dict[str, str]:
    """Every name of every parameter, with the first name of that parameter: tied weights have several."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    return {name: first[parameter] for name, parameter in model.named_parameters(remove_duplicate=False)}


def _samples_of_microbatch(config: TrainConfig, samples: int) -> int:
    share = _resolved(config.batch) // _resolved(config.dp)
    return max(1, min(samples, share // _resolved(config.microbatches)))


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, batch
    )


def total_steps(config: TrainConfig, sampler: ShardedSampler) -> int:
    """How many steps the run has from its beginning to its end."""
    return config.steps or (config.epochs or 1) * len(sampler)


def check(config: TrainConfig) -> None:
    """Stop before any process is started at what is wrong with the data, or with the user's own code."""
    if config.data is not None and user_code.is_spec(config.data):
        user_code.load(config.data, "dataset")
    else:
        _require_fit(config, build_data(config))
    for name, what in ((config.model, "model"), (config.loss or "", "loss")):
        if user_code.is_spec(name):
            user_code.load(name, what)
    if config.is_pipeline and not user_code.is_spec(config.model):
        _require_cut(config)


def _require_cut(config: TrainConfig) -> None:
    """Refuse a pipeline that a model of ours has not enough layers for; the model is not made for this."""
    chosen = user_code.schedule_of(_resolved(config.schedule))
    schedule = Schedule(chosen, _resolved(config.pp), _resolved(config.microbatches), config.stages_per_rank)
    layers = _resolved(config.depth) + (2 if config.model == "gpt" else 0)  # its embedding and its head
    balance = _resolved(config.balance)
    stand_ins = [nn.Identity() for _ in range(layers)]
    cut(stand_ins, schedule.stages, "parameters" if balance == "time" else parse_balance(balance))


def build_data(config: TrainConfig) -> Split:
    """Load what the configuration names: digits, text, a path, or the user's own dataset."""
    name = _resolved(config.data)
    if name == "digits":
        return digits()
    if user_code.is_spec(name):
        return from_user(name)
    context = config.context or DEFAULTS["gpt"]["context"]
    if name == "text":
        return text(None, context)
    if not Path(name).exists() and (near := nearest(name, ["digits", "text"])):
        raise DataError(f"--data {name}: there is no such file or folder; did you mean {near!r}?")
    return text(name, context)


def build_model(config: TrainConfig, data: Split) -> nn.Module:
    """Make the model, its ends fitted to the data where it is one of ours."""
    _require_fit(config, data)
    if config.model == "mlp":
        inputs, targets = data.training.batch(range(len(data.training)))
        classes = int(targets.max()) + 1
        return FullMLP(_resolved(config.dim), _resolved(config.depth), inputs.shape[1], classes)
    if config.model == "gpt":
        return GPT(
            context=_resolved(config.context),
            dim=_resolved(config.dim),
            heads=_resolved(config.heads),
            depth=_resolved(config.depth),
        )
    model = user_code.call(user_code.load(config.model, "model"), f"model {config.model!r}")
    if not isinstance(model, nn.Module):
        raise UsageError(f"model {config.model!r} returned {type(model).__name__}: return a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(f"model {config.model!r} has no trainable parameters: there is nothing to train")
    return model


def build_loss(config: TrainConfig, model: nn.Module, data: Split) -> LossFunction | None:
    """Choose the loss; None when the model computes its own from `model(inputs, targets)`."""
    if config.loss in _LOSSES:
        return _LOSSES[config.loss]
    if config.loss is not None:
        return user_code.load(config.loss, "loss")
    if isinstance(model, FullMLP | GPT):
        return cross_entropy
    if "targets" in inspect.signature(model.forward).parameters:
        return None
    _, targets = data.training.batch([0])
    return mean_squared_error if targets.is_floating_point() else cross_entropy


def build_step(config: TrainConfig, model: nn.Module, comms: Comms, loss_fn: LossFunction | None) -> Step:
    """Choose how a step is done; only some strategies can cut it into micro-batches."""
    make = STEPS[config.strategy]
    return make(model, comms, loss_fn) if config.accumulate == 1 else make(model, comms, loss_fn, config.accumulate)


def build_optimizer(config: TrainConfig, model: nn.Module | Pipeline) -> torch.optim.Optimizer:
    """Make one of torch's own optimizers."""
    parameters, lr = model.parameters(), _resolved(config.lr)
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=config.momentum)
    if config.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=lr)
    return torch.optim.AdamW(parameters, lr=lr)


def _require_fit(config: TrainConfig, data: Split) -> None:
    """Refuse data that means nothing to a model of ours."""
    inputs, targets = data.training.batch([0])
    is_tensor = isinstance(inputs, torch.Tensor) and inputs.dim() == 2
    kind = describe(inputs[0]) if isinstance(inputs, torch.Tensor) else type(inputs).__name__
    given = f"inputs {kind} and targets {describe(targets[0])}"
    if config.model == "mlp" and not (is_tensor and inputs.is_floating_point() and not targets.is_floating_point()):
        raise ConfigError(
            f"--model mlp takes rows of real numbers with a class each, and --data {config.data} has {given}; "
            "try --model gpt for text, or a model of your own"
        )
    if config.model == "gpt" and not (is_tensor and not inputs.is_floating_point()):
        raise ConfigError(
            f"--model gpt takes text, and --data {config.data} has {given}; try --data text, or --model mlp"
        )


def _resolved(value: Value | None) -> Value:
    if value is None:
        raise ConfigError("a default is missing: call config.resolved() first")
    return value
