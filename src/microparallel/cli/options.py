"""The flags that several verbs share. None means "not given": the configuration file or the model decides."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from microparallel.schedules import PIPELINES
from microparallel.train.config import DEFAULTS, TrainConfig

_SUBJECT, _STEPS, _WORLD, _ON_PURPOSE = "What to train", "How to train", "Where to train", "Slow on purpose"


def _default(key: str) -> str:
    """What each model takes when the flag is left out."""
    return ", ".join(
        f"{model} {values[key]}" for model, values in DEFAULTS.items() if key in values and ":" not in model
    )


Model = Annotated[
    str | None,
    typer.Option(help="mlp, gpt, or your own as my_module:make_model.", show_default="mlp", rich_help_panel=_SUBJECT),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="digits, text (Python's own sources), a UTF-8 file or folder, or your own as my_module:make_dataset.",
        show_default="digits for mlp, text for gpt",
        rich_help_panel=_SUBJECT,
    ),
]
Loss = Annotated[
    str | None,
    typer.Option(
        help="cross-entropy, mse, or your own as my_module:my_loss.",
        show_default="what fits the model and data",
        rich_help_panel=_SUBJECT,
    ),
]
Dim = Annotated[
    int | None, typer.Option(help="Width of the model.", show_default=_default("dim"), rich_help_panel=_SUBJECT)
]
Depth = Annotated[
    int | None, typer.Option(help="Layers of the model.", show_default=_default("depth"), rich_help_panel=_SUBJECT)
]
Heads = Annotated[
    int | None, typer.Option(help="Attention heads of gpt.", show_default=_default("heads"), rich_help_panel=_SUBJECT)
]
Context = Annotated[
    int | None,
    typer.Option(help="Bytes of text seen at once.", show_default=_default("context"), rich_help_panel=_SUBJECT),
]

Steps = Annotated[
    int | None, typer.Option(help="Length in steps.", show_default=_default("steps"), rich_help_panel=_STEPS)
]
Epochs = Annotated[
    int | None,
    typer.Option(help="Length in passes over the data.", show_default=_default("epochs"), rich_help_panel=_STEPS),
]
Batch = Annotated[
    int | None,
    typer.Option(
        help="Samples a step, over all ranks together.", show_default=_default("batch"), rich_help_panel=_STEPS
    ),
]
LearningRate = Annotated[
    float | None, typer.Option("--lr", help="Learning rate.", show_default=_default("lr"), rich_help_panel=_STEPS)
]
LearningRateSchedule = Annotated[
    str | None,
    typer.Option(
        "--lr-schedule",
        help="linear (a tenth of the steps up, the rest down to 0) or constant.",
        rich_help_panel=_STEPS,
    ),
]
Optimizer = Annotated[
    str | None, typer.Option(help="adam, adamw or sgd.", show_default=_default("optimizer"), rich_help_panel=_STEPS)
]
Momentum = Annotated[float | None, typer.Option(help="Momentum of sgd.", rich_help_panel=_STEPS)]
Seed = Annotated[int | None, typer.Option(help="Seed of weights and order.", show_default="0", rich_help_panel=_STEPS)]
DType = Annotated[
    str | None, typer.Option("--dtype", help="float32 or float64.", show_default="float32", rich_help_panel=_STEPS)
]

Ranks = Annotated[
    int | None,
    typer.Option(help="How many processes share each batch.", show_default="1", rich_help_panel=_WORLD),
]
Strategy = Annotated[
    str | None,
    typer.Option(
        help="single, naive, hooks (gradients travel during backward), ddp (in buckets), averaging (of parameters, "
        "with --average-every), torch-ddp (torch's own, to compare with), or pipeline (see --pp).",
        show_default="single for 1 rank, else ddp; pipeline with --pp",
        rich_help_panel=_WORLD,
    ),
]
Dp = Annotated[
    int | None,
    typer.Option("--dp", help="Replicas, each on its own samples.", show_default="ranks ÷ pp", rich_help_panel=_WORLD),
]
Pp = Annotated[
    int | None,
    typer.Option("--pp", help="Ranks of a pipeline, each with some layers.", show_default="1", rich_help_panel=_WORLD),
]
Schedule = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help=f"Of the pipeline: {', '.join(PIPELINES)}; or a file with a program (see verify).",
        show_default="1f1b with --pp",
        rich_help_panel=_WORLD,
    ),
]
Microbatches = Annotated[
    int | None,
    typer.Option(help="Into which a pipeline cuts its samples.", show_default="8 with --pp", rich_help_panel=_WORLD),
]
Chunks = Annotated[
    int | None,
    typer.Option(help="Stages a rank, with --schedule interleaved.", show_default="2", rich_help_panel=_WORLD),
]
Balance = Annotated[
    str | None,
    typer.Option(
        help="Where a pipeline cuts the model: parameters, time, or numbers of layers such as 3,4,5,4.",
        show_default="parameters",
        rich_help_panel=_WORLD,
    ),
]
Recompute = Annotated[
    bool | None,
    typer.Option(
        "--recompute",
        help="Let a pipeline compute activations again instead of keeping them.",
        rich_help_panel=_WORLD,
    ),
]
Accumulate = Annotated[
    int | None,
    typer.Option(
        help="Micro-batches in which each rank computes its share of a step; gradients meet once, after the last.",
        show_default="1",
        rich_help_panel=_STEPS,
    ),
]
AverageEvery = Annotated[
    int | None,
    typer.Option(
        help="Average the ranks' parameters every so many steps, and never their gradients (local SGD). It sends less, "
        "and learns something else: see compare --shortcuts.",
        show_default=False,
        rich_help_panel=_WORLD,
    ),
]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.", show_default="auto", rich_help_panel=_WORLD)]
TransportName = Annotated[
    str | None,
    typer.Option("--transport", help="auto, shm, gloo or nccl.", show_default="auto", rich_help_panel=_WORLD),
]

SlowRank = Annotated[
    list[str] | None,
    typer.Option(
        metavar="R=Nx",
        help="Let a rank compute N times slower: 1=3x. Can be given several times.",
        rich_help_panel=_ON_PURPOSE,
    ),
]
SlowLink = Annotated[
    list[str] | None,
    typer.Option(
        metavar="A-B=…",
        help="Slow everything down that goes between two ranks, messages and collectives, and nothing else: "
        "0-1=5ms,100Mbit. First what each message takes, in us, ms or s; then what goes through in a second, in bit or "
        "B with K, M or G before it (thousands). Either may be left out. Can be given several times.",
        rich_help_panel=_ON_PURPOSE,
    ),
]

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for scripts.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="A TOML file with these settings; flags win over it.")
]


def settings(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that were given and are settings of a training; what was given several times has blanks between."""
    return {
        name: " ".join(value) if isinstance(value, list) else value
        for name, value in flags.items()
        if name in TrainConfig.__dataclass_fields__ and value is not None and value != []
    }


def examples(*lines: tuple[str, str]) -> str:
    """The end of a verb's help: commands to copy, each with what it does."""
    return "**Examples**\n\n" + "\n\n".join(f"`{command}`  \n{meaning}" for command, meaning in lines)
