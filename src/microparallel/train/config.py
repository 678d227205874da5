"""Everything a training run can be told, checked before anything starts.

Each key is a flag of the command line: `save_every = 100` in a TOML file is `--save-every 100`. Torch is not imported
here, so that `--help` and a mistyped value are answered at once.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import tomli_w

from microparallel.errors import ConfigError
from microparallel.topology import MOST_RANKS_PER_CORE, available_cores, parse_slow_links, parse_slow_ranks
from microparallel.train import own_schedule, user_code

MODELS = ("mlp", "gpt")
LOSSES = ("cross-entropy", "mse")
STRATEGIES = ("auto", "single", "naive", "hooks", "ddp", "averaging", "torch-ddp", "pipeline")
ACCUMULATING = ("auto", "single", "ddp", "averaging")  # can compute a step in several micro-batches
OPTIMIZERS = ("adam", "adamw", "sgd")
LR_SCHEDULES = ("constant", "linear")

# What a model trains with when nothing else is said. A size that is missing here means nothing to that model.
DEFAULTS: dict[str, dict[str, Any]] = {
    "mlp": {
        **{"data": "digits", "dim": 128, "depth": 16},
        **{"epochs": 15, "batch": 64, "lr": 3e-3, "lr_schedule": "linear", "optimizer": "adamw"},
    },
    "gpt": {
        **{"data": "text", "dim": 128, "depth": 4, "heads": 4, "context": 64},
        **{"steps": 300, "batch": 32, "lr": 1e-3, "lr_schedule": "linear", "optimizer": "adamw"},
    },
    # your own; it may train on text, so it has a context
    "module:function": {
        **{"context": 64, "epochs": 10, "batch": 32},
        **{"lr": 1e-3, "lr_schedule": "constant", "optimizer": "adamw"},
    },
}

MICROBATCHES = 8  # of a pipeline, unless the batch is smaller

_CHOICES = {
    "strategy": STRATEGIES,
    "optimizer": OPTIMIZERS,
    "lr_schedule": LR_SCHEDULES,
    "dtype": ("float32", "float64"),
    "device": ("auto", "cpu", "cuda"),
    "transport": ("auto", "shm", "gloo", "nccl"),
}
_CHOICES_OR_YOUR_OWN = {"model": MODELS, "loss": LOSSES}  # or "module:function"
_WORDS = {"int": "a whole number", "float": "a number", "str": "text in quotes", "bool": "true or false"}
_LARGEST_SEED = 2**32 - 1  # the largest that Python, torch and numpy all take


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of one training run; None stands for the model's own default, which `resolved` fills in."""

    model: str = "mlp"  # or gpt, or module:function
    data: str | None = None  # digits, text, a UTF-8 file or folder, or module:function
    loss: str | None = None  # cross-entropy, mse, or module:function
    dim: int | None = None
    depth: int | None = None
    heads: int | None = None
    context: int | None = None  # bytes of text the model sees at once
    ranks: int = 1
    strategy: str = "auto"  # single for one rank, ddp for more, averaging with average_every, pipeline with pp
    dp: int | None = None  # how many pipelines, or replicas, each on its own samples
    pp: int | None = None  # how many ranks each pipeline has
    schedule: str | None = None  # of the pipeline
    microbatches: int | None = None  # into which a pipeline cuts its share of the batch
    chunks: int | None = None  # stages of each rank; only with the interleaved schedule
    balance: str | None = None  # parameters, time, or the numbers of layers, such as 3,4,5,4
    recompute: bool | None = None  # activation checkpointing, in a pipeline
    accumulate: int = 1  # micro-batches in which each rank computes its share of a step
    average_every: int | None = None  # steps between two averages of the parameters; only with averaging
    steps: int | None = None  # steps or epochs, not both
    epochs: int | None = None
    batch: int | None = None  # samples a step, over all ranks together
    lr: float | None = None
    lr_schedule: str | None = None  # linear: up for a tenth of the steps, then down to nothing; or constant
    optimizer: str | None = None
    momentum: float = 0.0  # of sgd
    seed: int = 0
    dtype: str = "float32"
    device: str = "auto"
    transport: str = "auto"
    slow_rank: str | None = None  # 2=3x: rank 2 computes three times slower; several have blanks between them
    slow_link: str | None = None  # 0-1=5ms,100Mbit: every message between them takes that long; several as well
    validate_every: int | None = None  # steps; None: once an epoch and at the end
    save_every: int | None = None  # steps; None: only at the end
    keep: int = 3  # checkpoints
    trace: bool | None = None  # record some steps, for `microparallel report`
    out: str | None = None  # None: runs/<time>-<model>

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            _check_value(name, value)
        _check_together(self)

    def resolved(self) -> TrainConfig:
        """Return the same settings with every default of the model filled in, and the strategy that "auto" means."""
        defaults = dict(_defaults(self.model))
        if self.steps is not None or self.epochs is not None:
            defaults.pop("steps", None)
            defaults.pop("epochs", None)
        missing = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        if self.is_pipeline:
            missing |= self._resolved_pipeline(missing.get("batch", self.batch) or 1)
        elif self.strategy == "auto":
            several = "ddp" if self.average_every is None else "averaging"
            missing["strategy"] = "single" if self.world_size == 1 else several
        return replace(self, ranks=self.world_size, **missing)

    def _resolved_pipeline(self, batch: int) -> dict[str, Any]:
        dp, pp = self.layout
        schedule = own_schedule.canonical(self.schedule or "1f1b")
        microbatches = self.microbatches or own_schedule.microbatches_of(schedule)
        return {
            "strategy": "pipeline",
            "dp": dp,
            "pp": pp,
            "schedule": schedule,
            "microbatches": microbatches or max(1, min(MICROBATCHES, batch // dp)),
            "balance": self.balance or "parameters",
        }

    @property
    def is_pipeline(self) -> bool:
        """Whether the model is spread over ranks."""
        return self.pp is not None or self.strategy == "pipeline"

    @property
    def layout(self) -> tuple[int, int]:
        """How many replicas there are, and how many ranks each has."""
        without_pp = max(1, self.ranks // (self.dp or 1)) if self.is_pipeline else 1
        pp = self.pp or without_pp
        return self.dp or max(1, self.ranks // pp), pp

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return math.prod(self.layout)


_TYPES = {field.name: str(field.type) for field in fields(TrainConfig)}  # such as "int | None"


def read_config(path: Path | str) -> dict[str, Any]:
    """Read the settings in a TOML file, each checked on its own; errors name the file, the key and the fix."""
    place = f"--config {path}"
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{place}: there is no such file; check the name, or leave --config out") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place}: not UTF-8 text, so not TOML (byte {error.start}); is it another file?") from error
    except OSError as error:
        raise ConfigError(f"{place}: cannot be read: {error.strerror or error}; name a file you may read") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f'{place}: not valid TOML: {error}; lines look like  batch = 64  or  model = "mlp"'
        ) from error
    for name, value in values.items():
        if name not in _TYPES:
            raise ConfigError(f"{place}: unknown key {name!r}; {_nearest(name, _TYPES)}")
        _check_value(name, value, file=str(path))
    return values


def config_text(config: TrainConfig) -> str:
    """Return a configuration as TOML, in the order of the fields; None is left out, so it reads back the same."""
    return tomli_w.dumps({name: value for name, value in asdict(config).items() if value is not None})


def merge(file_values: Mapping[str, Any], flag_values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a file with the flags that were given (those that are not None) put over them."""
    flags = {name: value for name, value in flag_values.items() if value is not None}
    # One length replaces the other: `epochs` in the file must not collide with --steps.
    replaced = {"steps", "epochs"} if {"steps", "epochs"} & flags.keys() else set()
    return {name: value for name, value in file_values.items() if name not in replaced} | flags


def _defaults(model: str) -> dict[str, Any]:
    return DEFAULTS[model if model in DEFAULTS else "module:function"]


def _check_value(name: str, value: Any, file: str | None = None) -> None:
    """Raise a ConfigError if this value cannot be right whatever the others are."""
    given = _shown(name, value, file)
    kind, optional = _TYPES[name].removesuffix(" | None"), _TYPES[name].endswith("None")
    if value is None and optional:
        return
    actual = type(value).__name__
    if actual != kind and (actual, kind) != ("int", "float"):
        example = {"int": "4", "float": "0.001", "str": '"mlp"', "bool": "true"}[kind]
        raise ConfigError(
            f"{given}: {_WORDS[kind]} is needed, and this is {_WORDS.get(actual, actual)}; it looks like  {example}"
        )
    if kind == "str":
        _check_text(name, value, given)
    elif kind == "int":
        _check_whole_number(name, value, given)
    elif name == "lr" and not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{given}: the learning rate must be above 0 and finite; try 0.001")
    elif name == "momentum" and not 0 <= value < 1:
        raise ConfigError(f"{given}: momentum must be at least 0 and below 1; try 0.9")


def _check_text(name: str, value: str, given: str) -> None:
    if not value or re.search("[\0\ud800-\udfff]", value):  # halves of characters, which UTF-8 cannot store
        raise ConfigError(f"{given!r}: empty, or with characters that cannot be written down; try a plain name")
    if name in _CHOICES and value not in _CHOICES[name]:
        raise ConfigError(f"{given}: {_nearest(value, _CHOICES[name])}")
    if name == "schedule":
        own_schedule.require_schedule(value, given)
    own = _CHOICES_OR_YOUR_OWN.get(name)
    if own and value not in own and not user_code.is_spec(value):
        raise ConfigError(f"{given}: {_nearest(value, own)}, or your own as my_module:my_function")


def _check_whole_number(name: str, value: int, given: str) -> None:
    if name == "seed":
        if not 0 <= value <= _LARGEST_SEED:
            raise ConfigError(f"{given}: a seed is a whole number from 0 to {_LARGEST_SEED}; try 0")
    elif value < 1:
        raise ConfigError(f"{given}: must be at least 1; try 1, or leave it out")
    elif name == "ranks" and value > MOST_RANKS_PER_CORE * (cores := available_cores()):
        raise ConfigError(
            f"{given}: this machine has {cores} core{'s' * (cores > 1)}, "
            f"and more than {MOST_RANKS_PER_CORE} ranks a core cannot work; try {cores}"
        )


def _check_together(config: TrainConfig) -> None:
    """Raise a ConfigError if values that are each right cannot be right together."""
    defaults = _defaults(config.model)
    used: dict[str, Any] = {
        name: defaults.get(name) if value is None else value for name, value in asdict(config).items()
    }
    if config.steps is not None and config.epochs is not None:
        raise ConfigError(f"--steps {config.steps} and --epochs {config.epochs} both set the length; give one of them")
    _check_layout(config)
    if config.strategy == "single" and config.world_size > 1:
        raise ConfigError(f"--strategy single is for one rank, and --ranks is {config.world_size}; try --strategy ddp")
    parse_slow_ranks((config.slow_rank or "").split(), config.world_size)
    parse_slow_links((config.slow_link or "").split(), config.world_size)
    if config.slow_link is not None and config.strategy == "torch-ddp":
        raise ConfigError(
            f"--slow-link {config.slow_link} does not reach --strategy torch-ddp, whose messages are torch's own; "
            "try --strategy ddp"
        )
    _check_averaging(config)
    if config.is_pipeline:
        _check_pipeline(config, used["batch"])
    elif used["batch"] < config.world_size:
        raise ConfigError(
            f"--batch {used['batch']} is smaller than --ranks {config.world_size}: every rank needs at least one "
            f"sample; try --batch {config.world_size} or --ranks {used['batch']}"
        )
    _check_accumulation(config, used["batch"])
    if config.momentum and used["optimizer"] != "sgd":
        raise ConfigError(
            f"--momentum {config.momentum} is for sgd, and --optimizer is {used['optimizer']}; try --optimizer sgd"
        )
    for name in ("dim", "depth", "heads", "context"):
        if used[name] is not None and name not in defaults:
            raise ConfigError(f"--{name} {used[name]} means nothing to --model {config.model}; leave it out")
    if used["data"] is None:
        raise ConfigError(
            f"--model {config.model} has no data of its own; try --data digits, --data text, a path, "
            "or your own as my_module:make_dataset"
        )
    if used["heads"] and used["dim"] % used["heads"]:
        nearest = used["dim"] // used["heads"] * used["heads"] or used["heads"]
        raise ConfigError(
            f"--dim {used['dim']} cannot be split evenly over --heads {used['heads']}; try --dim {nearest}"
        )


def _check_layout(config: TrainConfig) -> None:
    """Raise a ConfigError if dp, pp and ranks contradict each other, or mean nothing."""
    dp, pp = config.layout
    if config.dp is None and config.ranks > 1 and config.ranks % pp:
        raise ConfigError(
            f"--ranks {config.ranks} cannot be shared out among pipelines of --pp {pp}; "
            f"try --ranks {max(1, config.ranks // pp) * pp}"
        )
    if config.ranks not in (1, dp * pp):
        raise ConfigError(
            f"--dp {dp} times --pp {pp} is {dp * pp}, and there are {config.ranks} ranks; leave one of them out"
        )
    if not config.is_pipeline:
        for name in ("schedule", "microbatches", "chunks", "balance", "recompute"):
            if getattr(config, name):
                raise ConfigError(f"{_shown(name, getattr(config, name))} is for pipelines; add --pp 2")
    elif config.strategy not in ("auto", "pipeline"):
        raise ConfigError(f"--pp {pp} makes a pipeline, and --strategy is {config.strategy}; leave one of them out")
    _check_whole_number("ranks", dp * pp, f"--dp {dp} --pp {pp}" if config.dp or config.pp else f"--ranks {dp * pp}")


def _check_pipeline(config: TrainConfig, batch: int) -> None:
    dp, pp = config.layout
    share = batch // dp
    if share < 1:
        raise ConfigError(f"--batch {batch} is smaller than --dp {dp}: every pipeline needs at least one sample")
    if (config.microbatches or 1) > share:
        each = f"each of {dp} pipelines has" if dp > 1 else "there are"
        raise ConfigError(
            f"--microbatches {config.microbatches}: of --batch {batch} {each} only {share} samples to cut; "
            f"try --microbatches {share}, or --batch {(config.microbatches or 1) * dp}"
        )
    own_schedule.require_fit(config.schedule or "1f1b", pp, config.microbatches, share)
    if config.chunks is not None and (config.schedule or "").lower() != "interleaved":
        raise ConfigError(
            f"--chunks {config.chunks} is for --schedule interleaved, and it is {config.schedule or '1f1b'}"
        )
    if config.balance is not None:
        parse_balance(config.balance)


def parse_balance(balance: str) -> str | list[int]:
    """Read where a model is to be cut: by parameters, by time, or after so many layers each."""
    if balance in ("parameters", "time"):
        return balance
    if not re.fullmatch(r"[1-9][0-9]*(,[1-9][0-9]*)*", balance):
        raise ConfigError(f"--balance {balance}: choose parameters or time, or name numbers of layers as in 3,4,5,4")
    return [int(number) for number in balance.split(",")]


def _check_averaging(config: TrainConfig) -> None:
    if config.average_every is None:
        if config.strategy == "averaging":
            raise ConfigError("--strategy averaging needs to know how often; try --average-every 4")
        return
    given = f"--average-every {config.average_every}"
    if config.strategy not in ("auto", "averaging"):
        raise ConfigError(f"{given} is for --strategy averaging, and it is {config.strategy}; leave one of them out")
    if config.world_size == 1:
        raise ConfigError(f"{given}: one rank has nobody to average with; try --ranks 2, or leave it out")


def _check_accumulation(config: TrainConfig, batch: int) -> None:
    if config.accumulate == 1:
        return
    given = f"--accumulate {config.accumulate}"
    if config.is_pipeline:
        raise ConfigError(f"{given}: a pipeline has micro-batches anyway; try --microbatches")
    if config.strategy not in ACCUMULATING:
        raise ConfigError(
            f"{given}: --strategy {config.strategy} computes a step at once; leave --strategy out, or --accumulate"
        )
    share = batch // config.world_size
    if config.accumulate > share:
        each = f"each of {config.world_size} ranks has" if config.world_size > 1 else "there are"
        raise ConfigError(
            f"{given}: of --batch {batch} {each} only {share} samples to cut; try --accumulate {share}, "
            f"or --batch {config.accumulate * config.world_size}"
        )


def _shown(name: str, value: Any, file: str | None = None) -> str:
    """Write a setting as the user gave it: a flag, or a line of a file."""
    if file is None:
        return f"--{name.replace('_', '-')} {value}"
    return f"{name} = {value!r} in {file}"


def _nearest(value: str, choices: Iterable[str]) -> str:
    """Name the choice the user probably meant, or all of them."""
    close = difflib.get_close_matches(value, list(choices), n=1)
    return f"did you mean {close[0]}?" if close else f"choose from {', '.join(choices)}"
