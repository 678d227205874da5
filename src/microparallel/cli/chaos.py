"""`microparallel chaos`: break a run on purpose, and see whether anything is lost."""

from __future__ import annotations

import json as json_format
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from microparallel.cli import flags
from microparallel.errors import ConfigError
from microparallel.text import did_you_mean, show_seconds

if TYPE_CHECKING:
    from microparallel.train.chaos import Fault

EXAMPLES = flags.examples(
    ("microparallel chaos -- train --ranks 2 --steps 300", "six faults, by a seed, in a run of the default model"),
    ("microparallel chaos --faults 20 --seed 7 -- train --model gpt --dp 2 --pp 2", "more of them, and a pipeline"),
    ("microparallel chaos --kinds kill-rank,corrupt -- train --ranks 2 --shard parameters", "only these"),
)


def chaos(
    words: Annotated[list[str], typer.Argument(metavar="-- train …", help="The run to break.", show_default=False)],
    faults: Annotated[int, typer.Option(min=1, help="How often something goes wrong.")] = 6,
    seed: Annotated[int, typer.Option(help="Of what goes wrong when: the same seed, the same faults.")] = 0,
    kinds: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="kill-rank, kill-backward, kill-call (in a collective, a send or a receive), kill-saving (while a "
            "checkpoint is written), kill-launcher, kill-writer (the process that writes checkpoints), stop-rank, "
            "full-disk, corrupt (the newest checkpoint, and the launcher is killed), fewer-ranks (the launcher is "
            "killed, and the run goes on with other ranks; needs --precision float64); with commas between them.",
            show_default="all but fewer-ranks",
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.5, help="Seconds until ranks give up one that was stopped.")] = 5.0,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep both runs here.", show_default="removed")
    ] = None,
    json: flags.Json = False,
) -> int:
    """Break a training run on purpose, by a seed, and compare it with one that was left alone.

    The run is started again as often as a person would. What it has learnt must be the same, bit for bit, and nothing
    may be left running.
    """
    from microparallel.train import chaos as breaking

    if words[0] != "train":
        raise ConfigError(f"chaos breaks runs of train, not {words[0]!r}; write: microparallel chaos -- train …")
    chosen = breaking.KINDS if kinds is None else tuple(kinds.split(","))
    for kind in chosen:
        if kind not in (known := (*breaking.KINDS, breaking.FEWER)):
            raise ConfigError(f"--kinds {kinds}: {did_you_mean(kind, known)}")
    if out is not None and out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out {out} holds other files; choose a new or an empty folder")
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="microparallel-chaos-") as folder, console.status("…") as status:
        outcome = breaking.chaos(
            words[1:],
            out or Path(folder),
            seed=seed,
            faults=faults,
            kinds=chosen,
            timeout=timeout,
            tell=status.update,
        )
    if json:
        print(json_format.dumps(asdict(outcome) | {"survived": outcome.survived}, indent=2))
    else:
        Console().print(_table(outcome.faults))
        print(breaking.in_words(outcome))
    return 0 if outcome.survived else 1


def _table(faults: Sequence[Fault]) -> Table:
    table = Table("at step", "what went wrong", "steps lost", "until a new step", box=None, pad_edge=False)
    for fault in faults:
        lost = "" if fault.lost is None else str(fault.lost)
        seconds = "" if fault.seconds is None else show_seconds(fault.seconds)
        table.add_row(str(fault.step), fault.done or f"{fault.kind}: there was no occasion", lost, seconds)
    return table
