"""Everything a training run can be told, checked before anything starts.

Each setting is declared once, as a field: `save_every = 100` in a TOML file is `--save-every 100` on the command line,
with the same help, range and default. Torch is not imported here, so that `--help` and a mistyped value are answered at
once.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from microparallel.collectives.compressed import parse_methods
from microparallel.errors import ConfigError, UsageError
from microparallel.schedules import PIPELINES
from microparallel.settings import (
    AT_LEAST_ONE,
    DEVICES,
    MPS,
    MPS_HELP,
    POSITIVE,
    Range,
    check_all,
    check_value,
    declared,
    setting,
)
from microparallel.text import did_you_mean, nearest
from microparallel.topology import parse_slow_links, parse_slow_ranks, require_cores
from microparallel.topology.hosts import TRANSPORT_HELP, check_transport
from microparallel.train import user_code

MODELS = ("mlp", "gpt")
LOSSES = ("cross-entropy", "mse")
STRATEGIES = ("auto", "single", "naive", "hooks", "ddp", "averaging", "torch-ddp", "pipeline")
ACCUMULATING = ("auto", "single", "ddp", "averaging")  # can compute a step in several micro-batches
SHARDED = ("optimizer", "gradients", "parameters")  # what each rank may keep its part of, each with those before
PRECISIONS = ("float32", "bf16", "fp16", "float64")
MIXED = ("bf16", "fp16")  # parameters are float32, and layers compute with copies
LR_SCHEDULES = ("constant", "linear", "cosine")
LOGS = ("tensorboard", "wandb")
ON_NAN = ("stop", "skip", "ignore")
# torch's optimizers, so that a right name is known to be right without torch. A newer torch may have more.
OPTIMIZERS = (
    *("adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "asgd", "muon", "nadam", "radam", "rmsprop"),
    *("rprop", "sgd"),
)
_WITH_MOMENTUM = ("muon", "rmsprop", "sgd")
_NOT_FOR_STEPS = {"lbfgs": "calls the model several times in a step", "sparseadam": "needs sparse gradients"}

# What a model trains with when nothing else is said. A size that is missing here means nothing to that model.
DEFAULTS: dict[str, dict[str, Any]] = {
    "mlp": {
        **{"data": "digits", "dim": 128, "depth": 16},
        **{"epochs": 15, "batch": 64, "lr": 3e-3, "schedule_lr": "linear", "optimizer": "adamw"},
    },
    "gpt": {
        **{"data": "text", "dim": 128, "depth": 4, "heads": 4, "context": 64},
        **{"steps": 300, "batch": 32, "lr": 1e-3, "schedule_lr": "linear", "optimizer": "adamw"},
    },
    # your own; it may train on text, so it has a context
    "module:function": {
        **{"context": 64, "epochs": 10, "batch": 32},
        **{"lr": 1e-3, "schedule_lr": "constant", "optimizer": "adamw"},
    },
}

MICROBATCHES = 8  # of a pipeline, unless the batch is smaller

# The headings under which `--help` shows the settings.
SUBJECT, STEPS, WORLD, ON_PURPOSE = "What to train", "How to train", "Where to train", "Slow on purpose"
SURVIVAL = "What may go wrong"
# Those that mean nothing without a pipeline.
OF_PIPELINES = ("schedule", "microbatches", "stages_per_rank", "balance", "recompute", "compress_activations")
# Those that mean nothing without --compress.
OF_COMPRESSION = ("no_feedback", "compress_warmup")
# Those that mean nothing without --shard parameters.
OF_PARAMETERS = ("prefetch", "keep_parameters", "replicas")

_LARGEST_SEED = 2**32 - 1  # the largest that Python, torch and numpy all take


def _by_model(name: str) -> str:
    """What each model takes when a setting is left out, for `--help`."""
    values = {model if ":" not in model else "your own": one[name] for model, one in DEFAULTS.items() if name in one}
    if len(values) == len(DEFAULTS) and len(set(values.values())) == 1:
        return str(values.popitem()[1])
    return ", ".join(f"{model} {value}" for model, value in values.items())


def _one_of_or_your_own(known: Sequence[str]) -> Callable[[str, str], None]:
    def check(value: str, given: str) -> None:
        if value not in known and not user_code.is_spec(value):
            raise ConfigError(f"{given}: {did_you_mean(value, known)} (your own: my_module:my_function)")

    return check


def optimizer_names() -> dict[str, str]:
    """The optimizers that the installed torch has, in small letters, with their real names; this imports torch."""
    from torch import optim

    classes = {name: one for name, one in vars(optim).items() if isinstance(one, type)}
    found = {name.lower(): name for name, one in classes.items() if issubclass(one, optim.Optimizer)}
    return {name: real for name, real in found.items() if name != "optimizer" and name not in _NOT_FOR_STEPS}


def _check_optimizer(value: str, given: str) -> None:
    name = value.lower()
    if name in OPTIMIZERS or user_code.is_spec(value):
        return
    if name in _NOT_FOR_STEPS:
        raise ConfigError(f"{given}: {value} {_NOT_FOR_STEPS[name]}, and train does not; try --optimizer adamw")
    if name not in (known := optimizer_names()):
        usual = ("adam", "adamw", "sgd")  # what is most often meant
        likely = usual if nearest(name, usual) else sorted(known)
        raise ConfigError(f"{given}: {did_you_mean(name, likely)} (your own: my_module:make_optimizer)")


def _check_warmup(value: float, given: str) -> None:
    if value > 1 and value != int(value):
        raise ConfigError(f"{given}: a number of steps is whole, and a part of all steps is below 1; try {int(value)}")


def _check_shard(value: str, given: str) -> None:
    if value in ("weights", "model"):
        raise ConfigError(f"{given}: did you mean 'parameters'?")
    if value not in (*SHARDED, "none"):
        raise ConfigError(f"{given}: {did_you_mean(value, (*SHARDED, 'none'))}")


def _check_compress(value: str, given: str) -> None:
    if value != "none":
        try:
            parse_methods(value.replace(":", "-"), value)
        except UsageError as error:
            raise ConfigError(f"{given}: {error}") from None


def _check_activations(value: str, given: str) -> None:
    _check_compress(value, given)
    if value.partition(":")[0] not in ("bf16", "fp16", "int8"):
        raise ConfigError(f"{given}: a stage needs every number of its input; choose bf16, fp16 or int8")


def _check_specs(value: str, given: str) -> None:
    for spec in value.split():
        if not user_code.is_spec(spec):
            raise ConfigError(f"{given}: {spec} does not name a function; write it as my_module:my_metric")


def _check_collate(value: str, given: str) -> None:
    if not user_code.is_spec(value):
        raise ConfigError(f"{given}: this does not name a function; write it as my_module:collate")


def _check_logs(value: str, given: str) -> None:
    for name in value.split():
        if name not in LOGS:
            raise ConfigError(f"{given}: {did_you_mean(name, LOGS)}")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of one training run; None stands for the model's own default, which `resolved` fills in."""

    model: str = setting(
        "mlp",
        "mlp, gpt, or your own as my_module:make_model.",
        SUBJECT,
        check=_one_of_or_your_own(MODELS),
    )
    data: str | None = setting(
        None,
        "digits, text (Python's own sources), a UTF-8 file or folder, or your own as my_module:make_dataset.",
        SUBJECT,
        shown="digits for mlp, text for gpt",
    )
    loss: str | None = setting(
        None,
        "cross-entropy, mse, or your own as my_module:my_loss.",
        SUBJECT,
        shown="what fits the model and data",
        check=_one_of_or_your_own(LOSSES),
    )
    collate: str | None = setting(
        None,
        "Your function that makes a batch of a list of samples, as my_module:collate; it may pad them.",
        SUBJECT,
        check=_check_collate,
    )
    dim: int | None = setting(None, "Width of the model.", SUBJECT, shown=_by_model("dim"), within=AT_LEAST_ONE)
    depth: int | None = setting(None, "Layers of the model.", SUBJECT, shown=_by_model("depth"), within=AT_LEAST_ONE)
    heads: int | None = setting(None, "Attention heads of gpt.", SUBJECT, shown=_by_model("heads"), within=AT_LEAST_ONE)
    context: int | None = setting(
        None, "Bytes of text seen at once.", SUBJECT, shown=_by_model("context"), within=AT_LEAST_ONE
    )

    # steps or epochs, not both
    steps: int | None = setting(
        None, "Length in steps.", STEPS, shown=_by_model("steps"), within=AT_LEAST_ONE, may_change=True
    )
    epochs: int | None = setting(
        None,
        "Length in passes over the data.",
        STEPS,
        shown=_by_model("epochs"),
        within=AT_LEAST_ONE,
        may_change=True,
    )
    batch: int | None = setting(
        None, "Samples a step, over all ranks together.", STEPS, shown=_by_model("batch"), within=AT_LEAST_ONE
    )
    accumulate: int = setting(
        1,
        "Micro-batches in which each rank computes its share of a step; gradients meet once, after the last.",
        STEPS,
        within=AT_LEAST_ONE,
        may_change=True,
    )
    lr: float | None = setting(None, "Learning rate.", STEPS, shown=_by_model("lr"), within=POSITIVE, example=0.001)
    schedule_lr: str | None = setting(
        None,
        "The learning rate over the steps: constant, linear (down to 0), cosine (down to 0 along a cosine), or your "
        "own as my_module:make_schedule.",
        STEPS,
        shown=_by_model("schedule_lr"),
        check=_one_of_or_your_own(LR_SCHEDULES),
    )
    warmup: float | None = setting(
        None,
        "Steps in which the learning rate first goes up, or, below 1, the part of all steps.",
        STEPS,
        shown="0.1 for linear and cosine, else 0",
        within=Range(at_least=0),
        example=100,
        check=_check_warmup,
    )
    optimizer: str | None = setting(
        None,
        "Any of torch.optim, in any letter case, or your own as my_module:make_optimizer.",
        STEPS,
        shown=_by_model("optimizer"),
        check=_check_optimizer,
    )
    momentum: float = setting(
        0.0, "Momentum of sgd, rmsprop or muon.", STEPS, within=Range(at_least=0, below=1), example=0.9
    )
    weight_decay: float | None = setting(
        None, "Weight decay.", STEPS, shown="the optimizer's own", within=Range(at_least=0), example=0.01
    )
    clip: float | None = setting(
        None,
        "Scale gradients so that the norm of all of them, over all ranks and stages, is at most this.",
        STEPS,
        within=POSITIVE,
        example=1.0,
        metavar="NORM",
    )
    seed: int = setting(0, "Seed of weights and order.", STEPS, within=Range(at_least=0, at_most=_LARGEST_SEED))
    precision: str = setting(
        "float32",
        "float32, bf16 or fp16 (16-bit copies of float32 parameters compute; fp16 scales the loss), or float64.",
        STEPS,
        choices=PRECISIONS,
    )

    ranks: int = setting(
        1,
        "How many processes share each batch.",
        WORLD,
        within=AT_LEAST_ONE,
        check=require_cores,
        may_change=True,
    )
    strategy: str = setting(
        "auto",
        "single, naive, hooks (gradients travel during backward), ddp (in buckets), averaging (of parameters, with "
        "--average-every), torch-ddp (torch's own, to compare with), or pipeline (see --pp).",
        WORLD,
        shown="single for 1 rank, else ddp; pipeline with --pp",
        choices=STRATEGIES,
        may_change=True,
    )
    shares: int | None = setting(
        None,
        "Into how many shares each batch is cut, each with its own random numbers; a rank, or a pipeline, computes one "
        "or more.",
        WORLD,
        shown="as many as the run has ranks, or pipelines, at first",
        within=AT_LEAST_ONE,
        example=4,
    )
    average_every: int | None = setting(
        None,
        "Average the ranks' parameters every so many steps, and never their gradients (local SGD). It sends less, and "
        "learns something else: see compare --shortcuts.",
        WORLD,
        within=AT_LEAST_ONE,
    )
    shard: str | None = setting(
        None,
        "What each rank keeps only its part of (ZeRO): optimizer (the optimizer's state), gradients (these, too), "
        "parameters (all of the model, gathered layer by layer) or none. What is learnt stays the same.",
        WORLD,
        shown="none",
        metavar="WHAT",
        check=_check_shard,
        may_change=True,
    )
    prefetch: int | None = setting(
        None,
        "With --shard parameters: how many units of layers ahead parameters are gathered.",
        WORLD,
        shown="1",
        within=Range(at_least=0),
        example=2,
        may_change=True,
    )
    keep_parameters: bool | None = setting(
        None,
        "With --shard parameters: keep what was gathered in forward until its backward, instead of gathering again.",
        WORLD,
        may_change=True,
    )
    replicas: int | None = setting(
        None,
        "With --shard parameters: groups of ranks, each of which keeps the whole model in parts.",
        WORLD,
        shown="1",
        within=AT_LEAST_ONE,
        example=2,
        may_change=True,
    )
    compress: str | None = setting(
        None,
        "Send fewer bytes of gradients: bf16, fp16, topk:0.01, randomk:0.01, int8, sign, powersgd:2, or two of them, "
        "such as topk:0.01+bf16; or none. What is learnt changes a little.",
        WORLD,
        shown="none",
        metavar="METHOD",
        check=_check_compress,
    )
    no_feedback: bool | None = setting(
        None, "With --compress: forget what was not sent, instead of sending it later (error feedback).", WORLD
    )
    compress_warmup: int | None = setting(
        None,
        "With --compress: steps that are sent uncompressed first.",
        WORLD,
        shown="0",
        within=Range(at_least=0),
        example=100,
    )
    dp: int | None = setting(
        None,
        "Replicas, each on its own samples.",
        WORLD,
        shown="ranks ÷ pp",
        within=AT_LEAST_ONE,
        may_change=True,
    )
    pp: int | None = setting(
        None,
        "Ranks of a pipeline, each with some layers.",
        WORLD,
        shown="1",
        within=AT_LEAST_ONE,
        may_change=True,
    )
    schedule: str | None = setting(
        None,
        f"Of the pipeline: {', '.join(PIPELINES)}; or a file with a program (see verify).",
        WORLD,
        shown="1f1b with --pp",
        metavar="NAME|FILE",
        check=user_code.require_schedule,
        may_change=True,
    )
    microbatches: int | None = setting(
        None,
        "Into which a pipeline cuts each of its shares of the batch.",
        WORLD,
        shown=f"{MICROBATCHES} with --pp",
        within=AT_LEAST_ONE,
        may_change=True,
    )
    stages_per_rank: int | None = setting(
        None,
        "Stages a rank, with --schedule interleaved.",
        WORLD,
        shown="2",
        within=AT_LEAST_ONE,
        may_change=True,
    )
    balance: str | None = setting(
        None,
        "Where a pipeline cuts the model: parameters, time, or numbers of layers such as 3,4,5,4.",
        WORLD,
        shown="parameters",
        may_change=True,
    )
    recompute: bool | None = setting(
        None, "Let a pipeline compute activations again instead of keeping them.", WORLD, may_change=True
    )
    compress_activations: str | None = setting(
        None,
        "In which form a pipeline's stages send each other activations and their gradients: bf16, fp16 or int8.",
        WORLD,
        shown="as they are",
        metavar="METHOD",
        check=_check_activations,
        may_change=True,
    )
    workers: int = setting(
        0,
        "Processes of each rank that load data ahead of time.",
        WORLD,
        within=Range(at_least=0),
        may_change=True,
    )
    device: str = setting("auto", group=WORLD, choices=DEVICES, may_change=True)
    transport: str = setting("auto", TRANSPORT_HELP, group=WORLD, check=check_transport, may_change=True)
    mps: str = setting("auto", MPS_HELP, group=WORLD, choices=MPS, may_change=True)

    slow_rank: str | None = setting(
        None,
        "Let a rank compute N times slower: 1=3x. Can be given several times.",
        ON_PURPOSE,
        metavar="R=Nx",
        several=True,
        may_change=True,
    )
    slow_link: str | None = setting(
        None,
        "Slow everything down that goes between two ranks, messages and collectives, and nothing else: "
        "0-1=5ms,100Mbit. First what each message takes, in us, ms or s; then what goes through in a second, in bit or "
        "B with K, M or G before it (thousands). Either may be left out. Can be given several times.",
        ON_PURPOSE,
        metavar="A-B=…",
        several=True,
        may_change=True,
    )

    out: str | None = setting(None, "Where the run is kept.", shown="runs/<time>-<model>", metavar="FOLDER")
    save_every: int | None = setting(
        None,
        "Steps between checkpoints.",
        SURVIVAL,
        shown="by the clock, at most 2 % of the time",
        within=AT_LEAST_ONE,
        may_change=True,
    )
    mtbf: float = setting(
        4.0,
        "Hours between failures that you expect; how often to save follows from it (Young's formula).",
        SURVIVAL,
        within=POSITIVE,
        metavar="HOURS",
        may_change=True,
    )
    keep: int = setting(
        3, "Checkpoints to keep, and the best by validation.", SURVIVAL, within=AT_LEAST_ONE, may_change=True
    )
    wait_for_saves: bool | None = setting(
        None,
        "Let the steps wait until a checkpoint is on the disk, without copies of the state in memory.",
        SURVIVAL,
        may_change=True,
    )
    restarts: int = setting(
        0,
        "How often ranks are started again after one has died, hung or raised; they go on from the last checkpoint.",
        SURVIVAL,
        within=Range(at_least=0),
        may_change=True,
    )
    min_ranks: int | None = setting(
        None,
        "With --restarts: with how few ranks it may go on, if the system cannot start as many; pipelines stay whole.",
        SURVIVAL,
        shown="all of them",
        within=AT_LEAST_ONE,
        may_change=True,
    )
    timeout: float | None = setting(
        None,
        "Seconds that a rank waits for another before it gives up: then that one hangs, or was stopped.",
        SURVIVAL,
        shown="1800",
        within=POSITIVE,
        metavar="SECONDS",
        example=60,
        may_change=True,
    )
    keep_every: int | None = setting(
        None,
        "Checkpoints of every so many steps that are never removed.",
        SURVIVAL,
        within=AT_LEAST_ONE,
        metavar="STEPS",
        example=1000,
        may_change=True,
    )
    on_nan: str = setting(
        "stop",
        "When a loss is not finite: stop, and say where it comes from; skip such steps, also those whose gradients are "
        "not finite; or ignore it.",
        SURVIVAL,
        choices=ON_NAN,
        may_change=True,
    )
    check_replicas: int | None = setting(
        None,
        "Compare the ranks' weights every so many steps, and before each save: a bit that flipped on one is found.",
        SURVIVAL,
        within=AT_LEAST_ONE,
        metavar="STEPS",
        example=100,
        may_change=True,
    )
    validate_every: int | None = setting(
        None,
        "Steps between measurements on held-back data.",
        shown="once an epoch",
        within=AT_LEAST_ONE,
        may_change=True,
    )
    metric: str | None = setting(
        None,
        "Measure on held-back data with your own my_module:f(outputs, targets). Can be given several times.",
        metavar="MODULE:F",
        several=True,
        check=_check_specs,
        may_change=True,
    )
    log: str | None = setting(
        None,
        "tensorboard or wandb, where installed: write metrics there as well. Can be given several times.",
        metavar="NAME",
        several=True,
        check=_check_logs,
        may_change=True,
    )
    trace: bool | None = setting(None, "Record ten steps: what every rank did when (see report).", may_change=True)

    def __post_init__(self) -> None:
        check_all(self)
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
        if self.optimizer is not None and not user_code.is_spec(self.optimizer):
            missing["optimizer"] = self.optimizer.lower()
        if self.shard == "none":
            missing["shard"] = None
        if self.compress == "none":
            missing["compress"] = None
        return replace(self, ranks=self.world_size, **missing)

    def _resolved_pipeline(self, batch: int) -> dict[str, Any]:
        dp, pp = self.layout
        schedule = user_code.canonical_schedule(self.schedule or "1f1b")
        return {
            "strategy": "pipeline",
            "dp": dp,
            "pp": pp,
            "schedule": schedule,
            "microbatches": self.microbatches or self._usual_microbatches(batch),
            "balance": self.balance or "parameters",
        }

    def with_shares(self, of_run: int | None = None) -> TrainConfig:
        """Return the same settings with the number of shares that this run keeps from now on.

        Args:
            of_run: how many it has had so far, if it goes on.
        """
        shares = max(self.shares or of_run or 0, self.layout[0])
        settings: dict[str, Any] = {"shares": shares}
        if self.is_pipeline and self.microbatches == self._usual_microbatches(self.batch or 1):
            settings["microbatches"] = replace(self, **settings)._usual_microbatches(self.batch or 1)
        return replace(self, **settings)

    def _usual_microbatches(self, batch: int) -> int:
        """Into how many micro-batches a pipeline cuts each share, unless it is told: it goes by the size of a share."""
        schedule = user_code.canonical_schedule(self.schedule or "1f1b")
        by_size = max(1, min(MICROBATCHES, batch // max(self.shares or 1, self.layout[0])))
        return user_code.microbatches_of_schedule(schedule) or by_size

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


_RENAMED = {
    "chunks": "stages_per_rank",
    "dtype": "precision",
    "lr_schedule": "schedule_lr",
}  # so that a run which began under the old name can go on


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
    known = declared(TrainConfig)
    values = {_RENAMED.get(name, name): value for name, value in values.items()}
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"{place}: unknown key {name!r}; {did_you_mean(name, known)}")
        check_value(known[name], value, f"{name} = {value!r} in {path}")
    return values


def config_text(config: TrainConfig) -> str:
    """Return a configuration as TOML, in the order of the fields. None is left out, so it reads back the same."""
    return tomli_w.dumps({name: value for name, value in asdict(config).items() if value is not None})


def merge(file_values: Mapping[str, Any], flag_values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a file with the flags that were given (those that are not None) put over them."""
    flags = {name: value for name, value in flag_values.items() if value is not None}
    # One length replaces the other: `epochs` in the file must not collide with --steps.
    replaced = {"steps", "epochs"} if {"steps", "epochs"} & flags.keys() else set()
    return {name: value for name, value in file_values.items() if name not in replaced} | flags


def _defaults(model: str) -> dict[str, Any]:
    return DEFAULTS[model if model in DEFAULTS else "module:function"]


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
    if config.min_ranks is not None and config.min_ranks > config.world_size:
        raise ConfigError(
            f"--min-ranks {config.min_ranks} is more than --ranks {config.world_size}; leave it out, or lower it"
        )
    _check_min_ranks(config)
    parse_slow_ranks((config.slow_rank or "").split(), config.world_size)
    parse_slow_links((config.slow_link or "").split(), config.world_size)
    if config.slow_link is not None and config.strategy == "torch-ddp":
        raise ConfigError(
            f"--slow-link {config.slow_link} does not reach --strategy torch-ddp, whose messages are torch's own; "
            "try --strategy ddp"
        )
    _check_averaging(config)
    _check_sharding(config)
    _check_precision(config)
    _check_compression(config)
    if config.is_pipeline:
        _check_pipeline(config, used["batch"])
    elif used["batch"] < config.world_size:
        raise ConfigError(
            f"--batch {used['batch']} is smaller than --ranks {config.world_size}: every rank needs at least one "
            f"sample; try --batch {config.world_size} or --ranks {used['batch']}"
        )
    _check_accumulation(config, used["batch"])
    _check_options_of_optimizer(config, used["optimizer"])
    if config.collate is not None and not user_code.is_spec(used["data"] or "a:b"):
        raise ConfigError(f"--collate {config.collate} is for data of your own, and --data is {used['data']}")
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


def _check_min_ranks(config: TrainConfig) -> None:
    """Raise a ConfigError if a run could not go on with as few ranks as that."""
    if config.min_ranks is None:
        return
    given, (_, pp) = f"--min-ranks {config.min_ranks}", config.layout
    if config.min_ranks % pp:
        fitting = max(1, config.min_ranks // pp) * pp
        raise ConfigError(f"{given}: a pipeline needs all of its {pp} ranks; try --min-ranks {fitting}")
    if config.compress not in (None, "none") and config.min_ranks < 2 * pp:
        raise ConfigError(
            f"{given}: --compress {config.compress} needs two replicas that send each other gradients; "
            f"try --min-ranks {2 * pp}"
        )


def _check_options_of_optimizer(config: TrainConfig, optimizer: str) -> None:
    if config.momentum and optimizer.lower() in OPTIMIZERS and optimizer.lower() not in _WITH_MOMENTUM:
        raise ConfigError(
            f"--momentum {config.momentum} is for sgd, and --optimizer is {optimizer}; try --optimizer sgd"
        )
    if user_code.is_spec(optimizer):
        for name in ("momentum", "weight_decay"):
            if value := getattr(config, name):
                given = declared(TrainConfig)[name].given(value)
                raise ConfigError(f"{given} is for torch's optimizers; set it in --optimizer {optimizer} itself")


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
        for name in OF_PIPELINES:
            if value := getattr(config, name):
                raise ConfigError(f"{declared(TrainConfig)[name].given(value)} is for pipelines; add --pp 2")
    elif config.strategy not in ("auto", "pipeline"):
        raise ConfigError(f"--pp {pp} makes a pipeline, and --strategy is {config.strategy}; leave one of them out")
    require_cores(dp * pp, f"--dp {dp} --pp {pp}" if config.dp or config.pp else f"--ranks {dp * pp}")


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
    user_code.require_fitting_schedule(config.schedule or "1f1b", pp, config.microbatches, share)
    if config.stages_per_rank is not None and (config.schedule or "").lower() != "interleaved":
        raise ConfigError(
            f"--stages-per-rank {config.stages_per_rank} is for --schedule interleaved, "
            f"and it is {config.schedule or '1f1b'}"
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
        raise ConfigError(f"{given}: one rank has no other rank to average with; try --ranks 2, or leave it out")


def _check_sharding(config: TrainConfig) -> None:
    """Raise a ConfigError if there is nothing to keep in parts, or no other rank to share it with."""
    _check_options_of_parameters(config)
    if config.shard in (None, "none"):
        return
    given = f"--shard {config.shard}"
    if config.is_pipeline:
        _check_sharding_of_pipeline(config, given)
    if config.average_every is not None:
        raise ConfigError(
            f"{given}: with --average-every {config.average_every} every rank has an optimizer state of its own, so "
            "there is nothing to share; leave one of them out"
        )
    if config.strategy not in ("auto", "ddp", "pipeline"):
        raise ConfigError(f"{given} is for --strategy ddp, and it is {config.strategy}; try that, or --shard none")
    if config.world_size == 1 and config.strategy == "auto":
        raise ConfigError(f"{given}: one rank has no other rank to share with; try --ranks 2, or --shard none")


def _check_precision(config: TrainConfig) -> None:
    """Raise a ConfigError if a run in 16 bits is asked of something that computes with the parameters themselves."""
    if config.precision not in MIXED:
        return
    given = f"--precision {config.precision}"
    if config.average_every is not None:
        raise ConfigError(f"{given}: --average-every {config.average_every} computes in float32 or float64; choose one")
    if config.strategy not in ("auto", "single", "ddp", "pipeline"):
        raise ConfigError(f"{given} is for --strategy ddp, and it is {config.strategy}; try that, or float32")


def _check_compression(config: TrainConfig) -> None:
    """Raise a ConfigError if there are no gradients to send, or they are sent in a way that cannot be compressed."""
    if config.compress in (None, "none"):
        for name in OF_COMPRESSION:
            value = getattr(config, name)
            if value is not None and value is not False:
                raise ConfigError(f"{declared(TrainConfig)[name].given(value)} is for --compress; add that")
        return
    given = f"--compress {config.compress}"
    if config.shard not in (None, "none"):
        raise ConfigError(
            f"{given}: a compressed sum leaves each rank with all gradients, and --shard {config.shard} with its part; "
            "leave one of them out"
        )
    if config.average_every is not None:
        raise ConfigError(
            f"{given}: with --average-every {config.average_every} no gradients are sent; leave one of them out"
        )
    if config.strategy not in ("auto", "ddp", "pipeline"):
        raise ConfigError(f"{given} is for --strategy ddp, and it is {config.strategy}; try that, or --compress none")
    if config.layout[0] == 1:
        alone = "--dp is 1" if config.is_pipeline else "there is one rank"
        more = "--dp 2" if config.is_pipeline else "--ranks 2"
        raise ConfigError(f"{given}: gradients are sent between replicas, and {alone}; try {more}, or --compress none")


def _check_options_of_parameters(config: TrainConfig) -> None:
    if config.shard != "parameters":
        for name in OF_PARAMETERS:
            value = getattr(config, name)
            if value is not None and value is not False:
                raise ConfigError(f"{declared(TrainConfig)[name].given(value)} is for --shard parameters; add that")
    replicas = config.replicas or 1
    if config.world_size % replicas:
        raise ConfigError(
            f"--replicas {replicas}: {config.world_size} ranks cannot be cut into {replicas} equal groups; "
            f"try --ranks {max(1, config.world_size // replicas) * replicas}, or leave it out"
        )


def _check_sharding_of_pipeline(config: TrainConfig, given: str) -> None:
    if config.shard == "parameters":
        raise ConfigError(
            f"{given}: each rank of a pipeline has layers of its own, and keeps them whole; try --shard optimizer, or "
            "leave the pipeline out"
        )
    if config.shard == "gradients":
        raise ConfigError(
            f"{given}: a pipeline adds up the gradients of all its micro-batches before they are summed; "
            "try --shard optimizer"
        )
    if config.layout[0] == 1:
        raise ConfigError(f"{given}: replicas of a pipeline share it, and --dp is 1; try --dp 2, or --shard none")


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
