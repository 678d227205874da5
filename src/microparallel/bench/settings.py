"""What the benchmarks can be told: each setting is declared once, for the command line and for what measures.

`BenchSettings` says how to measure, `StepSettings` adds how many training steps; each benchmark's own settings say what
to measure. Torch is not imported here, so that `--help` and a mistyped value are answered at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from microparallel.collectives import ALL_REDUCES
from microparallel.errors import ConfigError
from microparallel.schedules import PIPELINES
from microparallel.settings import AT_LEAST_ONE, DEVICES, MPS, MPS_HELP, POSITIVE, Range, check_all, setting
from microparallel.text import did_you_mean, parse_sizes
from microparallel.topology import Link, available_cores, parse_link, require_cores
from microparallel.topology.hosts import TRANSPORT_HELP, check_transport

Progress = Callable[[float, str, int], None]  # is told the fraction done, what is measured, and how often so far

HOW, WHAT = "How to measure", "What to measure"  # the headings of `--help`
WIDEST = 2**14  # numbers that go into a layer

LARGE = "gpt-85m"  # a model that gives a GPU something to do
DTYPES = ("float32", "bfloat16")  # of models
TORCH_DDP_ON_OURS = tuple(f"torch-ddp on {transport}" for transport in ("shm", "cuda"))  # our backend beneath torch's
DATA_PARALLEL = ("naive", "hooks", "buckets", "ddp", *TORCH_DDP_ON_OURS)
ALWAYS = ("none", "torch-ddp")  # are measured whether they are named or not
PREDICTED_REPLICAS = ("naive", "ddp")
PREDICTED = (*PREDICTED_REPLICAS, *(name for name in PIPELINES if name not in PREDICTED_REPLICAS))

COMPRESSED = ("bf16", "int8", "sign", "topk:0.01", "randomk:0.01", "powersgd:2", "topk:0.01+bf16")
TRANSPORT, GLOO = "transport", "gloo"  # links that are not injected: what the ranks talk through, and gloo beside it
LINKS = {"10gbit": "50us,10Gbit", "1gbit": "200us,1Gbit", "100mbit": "1ms,100Mbit"}

_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}
_SIZES = "4KB,64KB,1MB,4MB,25MB,100MB"


# ── lists with commas ───────────────────────────────────────────────────────────────────────────────────────────────


def _parse_names(text: str, flag: str) -> tuple[str, ...]:
    """Names with commas between them, each once."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ConfigError(f"{flag} {text!r}: there is a name missing; write them as in a,b,c")
    return tuple(dict.fromkeys(parts))


def _parse_names_of(choices: Sequence[str], noun: str) -> Callable[[str, str], tuple[str, ...]]:
    def parse(text: str, flag: str) -> tuple[str, ...]:
        names = _parse_names(text, flag)
        for name in names:
            if name not in choices:
                words = name.split()
                hint = did_you_mean(name, choices)
                if len(words) > 1 and all(word in choices for word in words):
                    hint = f"write commas between the names: {','.join(words)}"
                raise ConfigError(f"{flag} {text}: there is no {noun} {name!r}; {hint}")
        return names

    return parse


def _parse_algorithms(text: str, flag: str) -> tuple[str, ...]:
    if text == "none":
        return ()
    names = _parse_names_of((*ALL_REDUCES, "torch"), "all-reduce")(text, flag)
    return tuple(name for name in names if name != "torch")  # torch's own is always measured


def _parse_methods(text: str, flag: str) -> tuple[str, ...]:
    names = _parse_names_of((*DATA_PARALLEL, *ALWAYS), "method")(text, flag)
    return tuple(name for name in names if name not in ALWAYS)


def _parse_megabytes(text: str, flag: str) -> tuple[float, ...]:
    def parse(part: str) -> float:
        try:
            number = float(part)
        except ValueError:
            number = math.nan
        if number not in POSITIVE:
            raise ConfigError(f"{flag} {text}: {part!r} is no number of megabytes above 0; write them as in 1,4,25")
        return number

    return tuple(parse(part) for part in _parse_names(text, flag))


def _parse_compressors(text: str, flag: str) -> tuple[str, ...]:
    return tuple(name for name in _parse_names(text, flag) if name != "none")  # which is always measured


def _parse_links(text: str, flag: str) -> tuple[str, ...]:
    names = tuple(
        name.lower() if name.lower() in (TRANSPORT, GLOO, *LINKS) else name for name in _parse_names(text, flag)
    )
    for name in names:
        injected_link(name, f"{flag} {text}")
    return tuple(dict.fromkeys(names))


def injected_link(name: str, given: str = "--links") -> Link | None:
    """The link of that name, which messages are slowed down to; None where they are not slowed down.

    Args:
        name: `100mbit`, say; or a latency and a bandwidth, as in `5ms+50Mbit`.
        given: how the user wrote it, for the error.
    """
    if name in (TRANSPORT, GLOO):
        return None
    if name not in LINKS and not name[:1].isdigit():
        hint = did_you_mean(name, (TRANSPORT, GLOO, *LINKS))
        raise ConfigError(f"{given}: there is no link {name!r}; {hint}; or a latency and a bandwidth, as in 5ms+50Mbit")
    return parse_link(LINKS.get(name, name.replace("+", ",")), given)


# ── what benchmarks have in common ──────────────────────────────────────────────────────────────────────────────────


def _seconds(usual: float) -> Any:
    return setting(usual, "Time to spend on measuring, in all.", HOW, within=POSITIVE)


def _ranks(shown: str) -> Any:
    return setting(None, "How many processes.", HOW, shown=shown, within=AT_LEAST_ONE, example=2, check=require_cores)


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """How to measure: on how many ranks, for how long, where."""

    ranks: int | None = _ranks("2")
    seconds: float = _seconds(60.0)
    device: str = setting("auto", group=HOW, choices=DEVICES)
    transport: str = setting("auto", TRANSPORT_HELP, group=HOW, check=check_transport)
    mps: str = setting("auto", MPS_HELP, group=HOW, choices=MPS)

    def __post_init__(self) -> None:
        check_all(self)

    @property
    def usual_ranks(self) -> int:
        """How many ranks there are without --ranks."""
        return 2


@dataclass(frozen=True, kw_only=True)
class StepSettings(BenchSettings):
    """How to measure training steps."""

    steps: int | None = setting(
        None,
        "Steps of each, however long they take.",
        HOW,
        shown="as time allows",
        within=AT_LEAST_ONE,
        example=20,
    )


@dataclass(frozen=True, kw_only=True)
class RecordedSettings(StepSettings):
    """How to measure training steps of which one can be recorded."""

    dtype: str = setting("float32", "Of weights, gradients and activations: float32 or bfloat16.", WHAT, choices=DTYPES)

    trace: str | None = setting(
        None, "Record one more step of each, as Chrome traces (for Perfetto).", HOW, metavar="FOLDER"
    )


# ── each benchmark ──────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class AllReduceSettings(BenchSettings):
    """Which all-reduces to measure, of which tensors."""

    ranks: int | None = _ranks("one a core, from 2 to 4")
    repeats: int | None = setting(
        None,
        "Calls at each size, however long they take.",
        HOW,
        shown="as time allows",
        within=AT_LEAST_ONE,
        example=10,
    )
    sizes: tuple[int, ...] = setting(
        parse_sizes(_SIZES, "--sizes"),
        "Sizes of the tensor: KB is 1000 bytes, KiB 1024.",
        WHAT,
        shown=_SIZES,
        metavar="SIZES",
        parse=parse_sizes,
    )
    algorithms: tuple[str, ...] = setting(
        tuple(ALL_REDUCES),
        f"Some of {', '.join(ALL_REDUCES)}; or none.",
        WHAT,
        shown="all",
        metavar="NAMES",
        parse=_parse_algorithms,
    )
    dtype: str = setting("float32", group=WHAT, choices=tuple(_BYTES))
    with_nccl: bool = setting(
        True,
        "Where ranks share a GPU, measure NCCL, too, with a host's name of its own for each rank.",
        WHAT,
        shown="nccl",
        flag="--nccl/--no-nccl",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for size in self.sizes:
            if size % _BYTES[self.dtype]:
                nearest = max(1, round(size / _BYTES[self.dtype])) * _BYTES[self.dtype]
                raise ConfigError(f"--sizes: {size} bytes are no whole number of {self.dtype}s; try {nearest}")

    @property
    def usual_ranks(self) -> int:
        """One rank a core, from 2 to 4."""
        return max(2, min(4, available_cores()))


@dataclass(frozen=True, kw_only=True)
class DataParallelSettings(RecordedSettings):
    """Which models to train, and by which kinds of data parallelism."""

    seconds: float = _seconds(120.0)
    models: tuple[str, ...] = setting(
        ("mlp-1024", "mlp-512", "mlp-128", "gpt"),
        f"mlp-WIDTH (16 layers), gpt, gpt-WIDTH, or {LARGE}.",
        WHAT,
        metavar="NAMES",
        parse=_parse_names,
    )
    batch: int | None = setting(
        None, "Samples a rank.", WHAT, shown="32; mlp-512 64, gpt 8", within=AT_LEAST_ONE, example=32
    )
    methods: tuple[str, ...] = setting(
        DATA_PARALLEL[:4],
        f"Some of {', '.join(DATA_PARALLEL)}; {' and '.join(ALWAYS)} are always there.",
        WHAT,
        metavar="NAMES",
        parse=_parse_methods,
    )
    buckets_mb: tuple[float, ...] = setting(
        (1, 4, 25, 100),
        "Bucket sizes to try for ddp, as its bucket_cap_mb.",
        WHAT,
        metavar="SIZES",
        flag="--buckets",
        parse=_parse_megabytes,
    )


@dataclass(frozen=True, kw_only=True)
class ShardSettings(RecordedSettings):
    """Which models to train with parts of their state on each rank."""

    seconds: float = _seconds(150.0)
    models: tuple[str, ...] = setting(
        ("mlp-1024", "gpt"),
        f"mlp-WIDTH (16 layers), gpt, gpt-WIDTH, or {LARGE}.",
        WHAT,
        metavar="NAMES",
        parse=_parse_names,
    )
    batch: int | None = setting(
        None, "Samples a rank.", WHAT, shown="32; mlp-512 64, gpt 8", within=AT_LEAST_ONE, example=32
    )
    accumulate: int = setting(1, "Micro-batches of a step on each rank.", WHAT, within=AT_LEAST_ONE)
    bucket_cap_mb: float | None = setting(
        None,
        "Size of our buckets, in megabytes.",
        WHAT,
        shown="25; shard gradients: a sixteenth of all, from 4 to 25",
        within=POSITIVE,
        example=4,
    )


@dataclass(frozen=True, kw_only=True)
class CompressSettings(StepSettings):
    """Which models to train with compressed gradients, how, and over which links."""

    seconds: float = _seconds(150.0)
    models: tuple[str, ...] = setting(
        ("mlp-512",), "mlp-WIDTH (16 layers), gpt, or gpt-WIDTH.", WHAT, metavar="NAMES", parse=_parse_names
    )
    batch: int | None = setting(
        None, "Samples a rank.", WHAT, shown="32; mlp-512 64, gpt 8", within=AT_LEAST_ONE, example=32
    )
    methods: tuple[str, ...] = setting(
        COMPRESSED,
        "As --compress of train has them; with + between two, one after another. none is always there.",
        WHAT,
        metavar="NAMES",
        parse=_parse_compressors,
    )
    links: tuple[str, ...] = setting(
        (TRANSPORT, GLOO, *LINKS),
        f"{TRANSPORT} (as it is), {GLOO} (beside shared memory), {', '.join(LINKS)}, or as in 5ms+50Mbit.",
        WHAT,
        metavar="NAMES",
        parse=_parse_links,
    )
    train_steps: int = setting(150, "Steps of training after which the loss is taken.", WHAT, within=AT_LEAST_ONE)


_USUAL = {"mlp": (16, 512, 256), "gpt": (8, 128, 16), LARGE: (12, 768, 32)}  # depth, width, samples in a batch
_DEPTHS, _WIDTHS, _BATCHES = ([f"{model} {usual[part]}" for model, usual in _USUAL.items()] for part in range(3))


@dataclass(frozen=True)
class Size:
    """A model by name, and how large it is; what is None is as usual for that model."""

    model: str = setting("mlp", group=WHAT, choices=tuple(_USUAL))
    depth: int | None = setting(
        None,
        "Layers of mlp, blocks of gpt.",
        WHAT,
        shown=", ".join(_DEPTHS),
        within=Range(at_least=1, at_most=1024),
        example=16,
    )
    width: int | None = setting(
        None,
        "Width of a layer.",
        WHAT,
        shown=", ".join(_WIDTHS),
        within=Range(at_least=1, at_most=WIDEST),
        example=512,
    )
    batch: int | None = setting(
        None,
        "Samples of all micro-batches together.",
        WHAT,
        shown=", ".join(_BATCHES),
        within=Range(at_least=1, at_most=2**20),
        example=256,
    )

    def __post_init__(self) -> None:
        check_all(self)

    @property
    def layers(self) -> int:
        """Between how many layers a pipeline may cut."""
        return self.filled[0] + 2 * (self.model != "mlp")  # the embedding, and the head

    @property
    def filled(self) -> tuple[int, int, int]:
        """Depth, width and batch."""
        given = self.depth, self.width, self.batch
        depth, width, batch = (
            usual if one is None else one for one, usual in zip(given, _USUAL[self.model], strict=True)
        )
        return depth, width, batch


def _microbatches() -> Any:
    return setting(8, "Into how many micro-batches a batch is cut.", WHAT, within=AT_LEAST_ONE)


@dataclass(frozen=True, kw_only=True)
class PipelineSettings(Size, RecordedSettings):
    """Which schedules to measure, on what model."""

    seconds: float = _seconds(75.0)
    microbatches: int = _microbatches()
    schedules: tuple[str, ...] = setting(
        tuple(PIPELINES),
        f"Some of {', '.join(PIPELINES)}.",
        WHAT,
        shown="all",
        metavar="NAMES",
        parse=_parse_names_of(tuple(PIPELINES), "schedule"),
    )
    with_torch: bool = setting(True, "Measure torch's schedules, too.", WHAT, shown="torch", flag="--torch/--no-torch")


@dataclass(frozen=True, kw_only=True)
class PredictSettings(Size, StepSettings):
    """Which methods to predict and to measure, on what model."""

    seconds: float = _seconds(45.0)
    microbatches: int = _microbatches()
    methods: tuple[str, ...] = setting(
        ("naive", "ddp", "gpipe", "1f1b"),
        f"Some of {', '.join(PREDICTED)}.",
        WHAT,
        metavar="NAMES",
        parse=_parse_names_of(PREDICTED, "method"),
    )
    bucket_cap_mb: float = setting(4.0, "Size of ddp's buckets, in megabytes.", WHAT, within=POSITIVE)


# ── on a GPU ────────────────────────────────────────────────────────────────────────────────────────────────────────
#
# What keeps some cores busy is nothing to a GPU: there, starting operations would be all that is measured.

_ON_A_GPU: dict[type[BenchSettings], dict[str, Any]] = {
    AllReduceSettings: {"algorithms": ()},
    DataParallelSettings: {
        "models": (LARGE,),
        "dtype": "bfloat16",
        "methods": ("ddp", "torch-ddp on cuda"),
        "buckets_mb": (25.0, 100.0),
    },
    ShardSettings: {"models": (LARGE,), "dtype": "bfloat16"},
    PipelineSettings: {"model": LARGE, "dtype": "bfloat16", "schedules": ("gpipe", "1f1b", "zb-h1")},
}


def with_usual(settings: type[BenchSettings], given: dict[str, Any]) -> dict[str, Any]:
    """What was given, and with `--device cuda` what is usual there; a name that needs another transport is left out."""
    if given.get("device") != "cuda":
        return given
    usual = dict(_ON_A_GPU[settings])
    if given.get("transport", "auto") not in ("auto", "cuda") and "methods" in usual:
        usual["methods"] = tuple(name for name in usual["methods"] if name not in TORCH_DDP_ON_OURS)
    return usual | given
