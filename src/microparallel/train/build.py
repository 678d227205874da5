"""Put a training run together from its configuration: the only file that knows all the parts."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from microparallel.comms import Comms
from microparallel.comms.calls import describe
from microparallel.comms.slow_links import slow_down
from microparallel.compression import Compressor, parse
from microparallel.course.shortcuts import ParameterAveraging
from microparallel.data_parallel import DataParallel, deferred_init, replicate
from microparallel.errors import ConfigError, DataError, UsageError
from microparallel.models import GPT, FullMLP, cross_entropy, mean_squared_error
from microparallel.models.loss import LossFunction
from microparallel.pipeline import Pipeline
from microparallel.pipeline.cut import cut
from microparallel.pipeline.layers import has_layers
from microparallel.pipeline.parts import pipeline_layers
from microparallel.pipeline.programs import Schedule, repeated
from microparallel.text import count, nearest
from microparallel.topology import parse_slow_links, parse_slow_ranks
from microparallel.train import user_code
from microparallel.train.batch import ModelSignature, ModelWithLoss, fitting_loss, placed
from microparallel.train.config import DEFAULTS, MIXED, TrainConfig, parse_balance
from microparallel.train.data import Dataset, Split, Stream, digits, from_user, text
from microparallel.train.fingerprint import fingerprint
from microparallel.train.fully_sharded import FullyShardedTraining, ShardedModelWithLoss
from microparallel.train.loader import Loader, Loading, SampleLoader, StreamLoader
from microparallel.train.logs import require_installed
from microparallel.train.metrics import load_metrics
from microparallel.train.mixed_precision import MixedModelWithLoss
from microparallel.train.optimizer import build_learning_rate, build_optimizer
from microparallel.train.sampler import ShardedSampler
from microparallel.train.shares import Shares
from microparallel.train.strategies import STEPS, data_parallel, slow_down_model
from microparallel.train.training import PipelineTraining, Training

Value = TypeVar("Value")

_LOSSES: dict[str, LossFunction] = {"cross-entropy": cross_entropy, "mse": mean_squared_error}
_VALIDATION_BATCH = 256


def build(config: TrainConfig, comms: Comms) -> Training:
    """Make one rank's part of the run that a configuration describes."""
    config = config.resolved()
    comms = _with_slow_links(config, comms)
    dtype = torch.float64 if config.precision == "float64" else torch.float32  # of parameters
    data = build_data(config)
    torch.manual_seed(config.seed)  # the same model on every rank
    defers = _defers(config)
    with deferred_init() if defers else nullcontext():
        model = build_model(config, data).to(dtype)
    if not config.is_pipeline and not defers:
        model.to(comms.device)
    if config.shard != "parameters":  # then the wrapper does it
        replicate(model, comms)  # the same model, even if it was made with other random numbers than torch's
    shares = _shares(config, comms)
    shares.begin()  # from here on each rank draws random numbers of its own
    made_of = fingerprint(config, data.training, [name for name, _ in model.named_parameters()])
    loss_fn = build_loss(config, model)
    _slow_down(config, model, comms.rank)
    training: Training
    if config.is_pipeline:
        training = _build_pipeline(config, comms, shares, model, loss_fn, data, dtype)
    elif config.shard == "parameters":
        training = _build_fully_sharded(config, comms, shares, model, loss_fn, data, dtype)
    else:
        training = _build_data_parallel(config, comms, shares, model, loss_fn, data, dtype)
    training.made_of = made_of
    return training


def _build_data_parallel(
    config: TrainConfig,
    comms: Comms,
    shares: Shares,
    model: nn.Module,
    loss_fn: LossFunction | None,
    data: Split,
    dtype: torch.dtype,
) -> Training:
    """Make one rank's part of a run in which each rank has the whole model."""
    with_loss = ModelWithLoss(model, loss_fn)
    wrapped = _wrapped(config, with_loss, comms)
    if wrapped is None:
        strategy = STEPS[config.strategy](with_loss, comms)
    else:
        strategy = data_parallel(wrapped, shares, config.accumulate)
    sharded = None if config.shard is None else wrapped
    return Training(
        model=model,
        with_loss=wrapped if isinstance(wrapped, MixedModelWithLoss) else with_loss,
        loss_scale=None if wrapped is None else wrapped.loss_scale,
        signature=ModelSignature(model, has_loss=loss_fn is not None),
        optimizer=build_optimizer(config, model, shared_by=None if sharded is None else comms),
        strategy=strategy,
        sharded=sharded,
        compressed=None if config.compress is None else wrapped,
        wrapped=wrapped,
        averaging=None if config.average_every is None else ParameterAveraging(model, comms, config.average_every),
        **_rest(config, comms, data, shares, dtype),
    )


def _wrapped(config: TrainConfig, with_loss: ModelWithLoss, comms: Comms) -> DataParallel | None:
    """The model as its replicas compute and send it; None where a strategy of the course does that, or torch's own."""
    options: dict[str, Any] = {"shard": config.shard, "compress": build_compressor(config), **_mixed(config)}
    if config.precision in MIXED:
        return MixedModelWithLoss(with_loss, comms, **options)
    return DataParallel(with_loss, comms, **options) if config.strategy == "ddp" else None


def _shares(config: TrainConfig, comms: Comms) -> Shares:
    """Deal out each batch, for this rank: there are as many as the run had replicas of the model at first.

    All ranks of a pipeline have the same shares. Where a rank can compute but one, there are as many as ranks.
    """
    replicas, pp = config.layout if config.is_pipeline else (comms.world_size, 1)
    can = config.strategy in ("single", "ddp", "pipeline") and config.average_every is None
    return Shares((config.shares or replicas) if can else replicas, comms.rank // pp, replicas, config.seed)


def _rest(config: TrainConfig, comms: Comms, data: Split, shares: Shares, dtype: torch.dtype) -> dict[str, Any]:
    """What a run has in any layout."""
    loader = build_loader(config, data.training, _resolved(config.batch), shares, comms)
    held_back = data.validation
    return {
        "comms": comms,
        "data": data,
        "loader": loader,
        "shares": shares,
        "measuring": None if held_back is None else _measuring(config, held_back, shares.fresh(), comms),
        "learning_rate": build_learning_rate(config, total_steps(config, loader)),
        "drawn": _drawn(config, shares),
        "dtype": dtype,
        "clip": config.clip,
        "on_nan": config.on_nan,
        "metrics": load_metrics(config.metric),
    }


def _drawn(config: TrainConfig, shares: Shares) -> str:
    """How random numbers are dealt out: as long as this stays the same, so do the numbers."""
    each = _resolved(config.microbatches) if config.is_pipeline else config.accumulate
    apart = "for each layer" if config.is_pipeline else "in a row"
    return f"{count(shares.total, 'share')} of {count(each, 'micro-batch', 'es')}, drawing {apart}"


def build_loader(
    config: TrainConfig, data: Dataset | Stream, batch: int, shares: Shares, comms: Comms, shuffle: bool = True
) -> Loader:
    """How a rank gets its shares of each global batch."""
    loading = Loading(config.workers, config.accumulate, comms.device.type == "cuda", config.seed)
    if isinstance(data, Stream):
        return StreamLoader(data, batch, shares, loading)
    return SampleLoader(data, ShardedSampler(data, batch, seed=config.seed, shuffle=shuffle), shares, loading)


def _measuring(config: TrainConfig, data: Dataset | Stream, shares: Shares, comms: Comms) -> Loader:
    return build_loader(replace(config, accumulate=1), data, _VALIDATION_BATCH, shares, comms, shuffle=False)


def _with_slow_links(config: TrainConfig, comms: Comms) -> Comms:
    links = parse_slow_links((config.slow_link or "").split(), comms.world_size)
    return slow_down(comms, links) if links else comms


def _slow_down(config: TrainConfig, model: nn.Module, rank: int) -> None:
    factor = parse_slow_ranks((config.slow_rank or "").split(), config.world_size).get(rank)
    if factor is not None:
        slow_down_model(model, factor)


def _defers(config: TrainConfig) -> bool:
    """Whether the model is built without memory, and each rank makes its part alone.

    That needs a model that is made of torch's random numbers, as ours are; hooks of its parameters would be lost.
    """
    return config.shard == "parameters" and not user_code.is_spec(config.model) and config.slow_rank is None


def _build_fully_sharded(
    config: TrainConfig,
    comms: Comms,
    shares: Shares,
    model: nn.Module,
    loss_fn: LossFunction | None,
    data: Split,
    dtype: torch.dtype,
) -> FullyShardedTraining:
    """Make one rank's part of a run in which each rank keeps its part of every parameter."""
    signature = ModelSignature(model, has_loss=loss_fn is not None)
    with_loss = ModelWithLoss(model, loss_fn)
    sharded = ShardedModelWithLoss(
        with_loss,
        comms,
        prefetch=1 if config.prefetch is None else config.prefetch,
        reshard_after_forward=not config.keep_parameters,
        replicas=config.replicas or 1,
        **_mixed(config),
    )
    return FullyShardedTraining(
        sharded,
        loss_scale=sharded.loss_scale,
        with_loss=with_loss,
        signature=signature,
        optimizer=build_optimizer(config, model),
        strategy=data_parallel(sharded, shares, config.accumulate),
        **_rest(config, comms, data, shares, dtype),
    )


def _mixed(config: TrainConfig) -> dict[str, Any]:
    """What a wrapper is told of a run in 16 bits; in others the model itself has been converted."""
    return {"precision": config.precision} if config.precision in MIXED else {}


def _build_pipeline(
    config: TrainConfig,
    comms: Comms,
    shares: Shares,
    model: nn.Module,
    loss_fn: LossFunction | None,
    data: Split,
    dtype: torch.dtype,
) -> PipelineTraining:
    """Make one rank's part of a run whose model is spread over ranks."""
    if loss_fn is None and _takes_targets(model):
        raise ConfigError(
            "--pp cuts the model from its loss, and this model computes its own; try --loss cross-entropy"
        )
    loss_fn = loss_fn or fitting_loss
    names = _first_names(model)
    schedule = user_code.schedule_of(_resolved(config.schedule))
    times = shares.most_of_a_rank
    pipe = Pipeline(
        model if has_layers(model) else _parts(config, model, data, dtype),
        comms,
        schedule if isinstance(schedule, str) else repeated(schedule, times),
        times * _resolved(config.microbatches),
        loss_fn,  # type: ignore[arg-type]
        parse_balance(_resolved(config.balance)),
        replicas=_resolved(config.dp),
        stages_per_rank=config.stages_per_rank,
        example=_example(config, model, data, dtype) if config.balance == "time" else None,
        recompute=bool(config.recompute),
        shard=config.shard,  # type: ignore[arg-type]
        compress=build_compressor(config),
        compress_activations=config.compress_activations,
        **_mixed(config),
    )
    return PipelineTraining(
        pipe,
        names,
        loss_scale=pipe.loss_scale,
        with_loss=ModelWithLoss(pipe.own_layers, loss_fn),
        signature=ModelSignature(model, has_loss=True, one_argument=True),
        optimizer=build_optimizer(config, pipe, shared_by=None if config.shard is None else comms),
        compressed=None if config.compress is None else pipe,
        microbatches=_resolved(config.microbatches),
        **_rest(config, comms, data, shares, dtype),
    )


def _parts(config: TrainConfig, model: nn.Module, data: Split, dtype: torch.dtype) -> list[nn.Module]:
    """Cut a model with a `forward` of its own, with a micro-batch as the example of what it takes."""
    streamed = isinstance(data.training, Stream)
    return pipeline_layers(model, example=None if streamed else _example(config, model, data, dtype))


def _example(config: TrainConfig, model: nn.Module, data: Split, dtype: torch.dtype) -> Any:
    """A micro-batch, to measure layers on, or to cut a model by."""
    if isinstance(data.training, Stream):
        raise ConfigError(
            "--balance time measures layers on samples with numbers, and --data is a stream; leave it out"
        )
    samples = _samples_of_microbatch(config, len(data.training))
    batch = ModelSignature(model, has_loss=True, one_argument=True).batch(data.training.batch(range(samples)), samples)
    return placed(batch.arguments[0], torch.device("cpu"), dtype)


def _first_names(model: nn.Module) -> dict[str, str]:
    """Every name of every parameter, with the first name of that parameter: tied weights have several."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    return {name: first[parameter] for name, parameter in model.named_parameters(remove_duplicate=False)}


def _samples_of_microbatch(config: TrainConfig, samples: int) -> int:
    share = _resolved(config.batch) // _resolved(config.dp)
    return max(1, min(samples, share // _resolved(config.microbatches)))


def total_steps(config: TrainConfig, loader: Loader) -> int:
    """How many steps the run has from its beginning to its end."""
    if config.steps is None and loader.length is None:
        raise ConfigError(
            f"--epochs {config.epochs}: --data {config.data} is a stream without __len__, so the length of "
            "a pass is not known; say how long the run is with --steps"
        )
    return config.steps or (config.epochs or 1) * (loader.length or 1)


def check(config: TrainConfig) -> None:
    """Stop before any process is started at what is wrong with the data, or with the user's own code."""
    if config.data is not None and user_code.is_spec(config.data):
        user_code.load(config.data, "dataset")
    else:
        _require_fit(config, build_data(config))
    own = {"model": config.model, "loss": config.loss, "collate": config.collate, "optimizer": config.optimizer}
    for what, name in (own | {"schedule": config.schedule_lr}).items():
        if user_code.is_spec(name or ""):
            user_code.load(name or "", what)
    if not user_code.is_spec(config.optimizer or "a:b"):
        build_optimizer(config, nn.Linear(1, 1, bias=False))  # its options are right, or it says which is not
    load_metrics(config.metric)
    require_installed(config.log)
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
        return from_user(name, config.collate)
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
        assert not isinstance(data.training, Stream)  # _require_fit has seen to it
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


def build_compressor(config: TrainConfig) -> Compressor | None:
    """How gradients are compressed; None if they are not."""
    if config.compress is None:
        return None
    options: dict[str, Any] = {"feedback": False} if config.no_feedback else {}
    return parse(config.compress, warmup=config.compress_warmup or 0, seed=config.seed, **options)


def build_loss(config: TrainConfig, model: nn.Module) -> LossFunction | None:
    """Choose the loss; None when the model computes its own, or what fits the targets is used."""
    if config.loss in _LOSSES:
        return _LOSSES[config.loss]
    if config.loss is not None:
        return user_code.load(config.loss, "loss")
    return cross_entropy if isinstance(model, FullMLP | GPT) else None


def _takes_targets(model: nn.Module) -> bool:
    """Whether a model is called with the targets: it names them, or needs more than its inputs."""
    parameters = inspect.signature(model.forward).parameters
    return "targets" in parameters or sum(one.default is one.empty and one.kind < 2 for one in parameters.values()) > 1


def _require_fit(config: TrainConfig, data: Split) -> None:
    """Refuse data that means nothing to a model of ours."""
    if user_code.is_spec(config.model):
        return
    if isinstance(data.training, Stream):
        raise ConfigError(f"--model {config.model} is made to fit its data, and --data {config.data} is a stream")
    sample = data.training.batch([0])
    if not (isinstance(sample, tuple | list) and len(sample) == 2 and isinstance(sample[1], torch.Tensor)):
        raise ConfigError(
            f"--model {config.model} takes pairs (input, target), and --data {config.data} has other samples; "
            "try a model of your own"
        )
    inputs, targets = sample
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
