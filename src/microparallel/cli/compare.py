"""`microparallel compare`: is every strategy as good as one process?"""

from __future__ import annotations

import json as json_format
import os
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from microparallel.cli import options
from microparallel.errors import ConfigError
from microparallel.topology import ALONE, find_placement
from microparallel.train.config import STRATEGIES, TrainConfig, merge, read_config
from microparallel.train.run_folder import without_nan

EXAMPLES = options.examples(
    ("microparallel compare --ranks 4", "20 steps of the MLP, in float64, where only rounding may differ"),
    ("microparallel compare --model gpt --ranks 2 --dtype float32", "a small GPT in float32"),
)
_DEFAULTS: dict[str, Any] = {
    "ranks": 2,
    "steps": 20,
    "dtype": "float64",
    "optimizer": "sgd",
    "lr": 0.01,
    "lr_schedule": "constant",
}

_CAPTION = {
    "float64": "Δ: the largest relative difference over all steps, over all weights",
    "float32": "Δ: the largest relative difference over all steps, over all weights.\n"
    "In float32 rounding alone may push a ReLU over its edge, and the runs part; --dtype float64 shows which it is.",
}


def compare(
    model: options.Model = None,
    data: options.Data = None,
    loss: options.Loss = None,
    dim: options.Dim = None,
    depth: options.Depth = None,
    heads: options.Heads = None,
    context: options.Context = None,
    steps: Annotated[int | None, typer.Option(help="How many steps to compare.", show_default="20")] = None,
    batch: options.Batch = None,
    lr: Annotated[float | None, typer.Option("--lr", help="Learning rate.", show_default="0.01")] = None,
    lr_schedule: Annotated[
        str | None, typer.Option("--lr-schedule", help="linear or constant.", show_default="constant")
    ] = None,
    optimizer: Annotated[str | None, typer.Option(help="adam, adamw or sgd.", show_default="sgd")] = None,
    momentum: options.Momentum = None,
    seed: options.Seed = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="float32 or float64.", show_default="float64")] = None,
    ranks: Annotated[int | None, typer.Option(help="How many processes share each batch.", show_default="2")] = None,
    device: options.Device = None,
    transport: options.TransportName = None,
    config: options.ConfigFile = None,
    json: options.Json = False,
) -> int:
    """Run the same job as a single process and with each strategy, and show how far apart they end.

    torch's own DistributedDataParallel is measured beside ours. The exit code is 1 if a strategy differs from the
    single process by more than rounding.
    """
    given = {name: value for name, value in locals().items() if name in TrainConfig.__dataclass_fields__}
    chosen = TrainConfig(**merge(_DEFAULTS | (read_config(config) if config else {}), given)).resolved()
    if find_placement(os.environ) != ALONE:
        raise ConfigError("compare starts its own ranks; run it without torchrun or srun")
    if chosen.ranks < 2:
        raise ConfigError(f"--ranks {chosen.ranks}: there is nothing to compare with fewer than 2 ranks; try --ranks 2")
    strategies = [name for name in STRATEGIES if name not in ("auto", "single")]

    from microparallel.train.build import check
    from microparallel.train.compare import compare as compare_strategies
    from microparallel.world import Pool

    check(chosen)
    console = Console(stderr=True)
    with console.status("starting ranks") as status, Pool() as pool:
        rows = compare_strategies(chosen, strategies, pool, progress=lambda text: status.update(f"running {text}"))
    if json:
        print(json_format.dumps(without_nan([asdict(row) for row in rows]), indent=2))
    else:
        Console().print(_table(rows, chosen))
    return 0 if all(row.agrees for row in rows) else 1


def _table(rows: list[Any], config: TrainConfig) -> Table:
    table = Table(
        title=f"{config.model}, {config.steps} steps of {config.batch} samples, {config.dtype}, {config.optimizer}",
        caption=_CAPTION[config.dtype],
    )
    for heading in ("strategy", "ranks", "final loss", "Δ loss", "Δ weights", "ms a step", "verdict"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    for row in rows:
        table.add_row(
            row.strategy,
            str(row.ranks),
            f"{row.final_loss:.6f}",
            f"{row.loss_difference:.1e}" if row.loss_difference else "0",
            f"{row.weight_difference:.1e}" if row.weight_difference else "0",
            f"{row.seconds_a_step * 1e3:.1f}",
            "[green]same[/]" if row.agrees else "[bold red]different[/]",
        )
    return table
