"""`microparallel compare`: is every strategy as good as one process?"""

from __future__ import annotations

import json as json_format
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from microparallel.cli import compare_shortcuts, options
from microparallel.errors import ConfigError
from microparallel.topology import ALONE, find_placement
from microparallel.train.config import STRATEGIES, TrainConfig, merge, read_config
from microparallel.train.run_folder import without_nan

if TYPE_CHECKING:
    from microparallel.trace import Trace
    from microparallel.train.compare import Comparison

EXAMPLES = options.examples(
    ("microparallel compare --ranks 4", "20 steps of the MLP, in float64, where only rounding may differ"),
    ("microparallel compare --model gpt --ranks 2 --dtype float32", "a small GPT in float32"),
    ("microparallel compare --pipelines --ranks 4", "every pipeline schedule against one process"),
    ("microparallel compare --in-process --ranks 3", "three replicas in this process: through the CPU, by a ring"),
    ("microparallel compare --shortcuts --every 8", "synchronise 8 times less often: the loss, and the bytes sent"),
)
_DEFAULTS: dict[str, Any] = {
    "ranks": 2,
    "steps": 20,
    "dtype": "float64",
    "optimizer": "sgd",
    "lr": 0.01,
    "lr_schedule": "constant",
}

_LOSSES_SHOWN = 20  # in the terminal; --json has the loss of every step
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
    steps: Annotated[
        int | None, typer.Option(help="How many steps to compare.", show_default="20; of shortcuts 120")
    ] = None,
    batch: options.Batch = None,
    lr: Annotated[
        float | None, typer.Option("--lr", help="Learning rate.", show_default="0.01; of shortcuts 0.05")
    ] = None,
    lr_schedule: Annotated[
        str | None, typer.Option("--lr-schedule", help="linear or constant.", show_default="constant")
    ] = None,
    optimizer: Annotated[str | None, typer.Option(help="adam, adamw or sgd.", show_default="sgd")] = None,
    momentum: options.Momentum = None,
    seed: options.Seed = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="float32 or float64.", show_default="float64")] = None,
    ranks: Annotated[
        int | None, typer.Option(help="How many processes (or replicas) share each batch.", show_default="2")
    ] = None,
    pipelines: Annotated[
        bool, typer.Option("--pipelines", help="Compare every pipeline schedule instead, the model cut for the ranks.")
    ] = False,
    microbatches: Annotated[
        int | None, typer.Option(help="With --pipelines: micro-batches of each batch.", show_default="8")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Record each strategy's last five steps, as Chrome traces (for Perfetto)."),
    ] = None,
    in_process: Annotated[
        bool,
        typer.Option("--in-process", help="Compare replicas in one process with each other and with nn.DataParallel."),
    ] = False,
    shortcuts: Annotated[
        bool,
        typer.Option("--shortcuts", help="Compare every step, accumulation and parameter averaging: loss and bytes."),
    ] = False,
    every: Annotated[
        int | None,
        typer.Option(
            help="With --shortcuts: batches between two synchronisations.", show_default=str(compare_shortcuts.EVERY)
        ),
    ] = None,
    device: options.Device = None,
    transport: options.TransportName = None,
    config: options.ConfigFile = None,
    json: options.Json = False,
) -> int:
    """Run the same job as a single process and with each strategy, and show how far apart they end.

    torch's own DistributedDataParallel is measured beside ours. The exit code is 1 if a strategy differs from the
    single process by more than rounding.

    With --pipelines the model is cut into stages, one or more a rank, and each schedule does the job.

    With --in-process no ranks are started: replicas in one process share each batch, on the GPUs in turn or all on the
    CPU. Their gradients are averaged through the CPU, then by a ring; where there are GPUs, torch's nn.DataParallel is
    measured beside them.

    With --shortcuts the ranks learn from the same batches in three ways: gradients averaged every step, gradients
    accumulated over several batches, and parameters averaged instead of gradients. These learn different things; what
    each does to the loss and to the bytes sent is shown.
    """
    given = options.settings(locals())
    given["trace"] = True if trace is not None else None
    in_file = read_config(config) if config else {}
    defaults = _DEFAULTS | _defaults_of_shortcuts(in_file | given) if shortcuts else _DEFAULTS
    if pipelines:
        defaults = defaults | {"strategy": "pipeline"}
    chosen = TrainConfig(**merge(defaults | in_file, given)).resolved()
    _require_sense(chosen, in_process=in_process, shortcuts=shortcuts, pipelines=pipelines, every=every)
    if trace is not None and (in_process or shortcuts):
        raise ConfigError("--trace records strategies between ranks; leave --in-process and --shortcuts out")
    if shortcuts:
        return compare_shortcuts.show_shortcuts(chosen, compare_shortcuts.EVERY if every is None else every, json)
    rows = _rows(chosen, in_process, trace)
    if json:
        print(json_format.dumps(without_nan([asdict(row) for row in rows]), indent=2))
    else:
        _show(rows, chosen, in_process)
    if in_process:
        Console(stderr=json).print(_about_torch(chosen, rows), highlight=False)
    return 0 if all(row.agrees for row in rows) else 1


def _require_sense(
    config: TrainConfig, *, in_process: bool, shortcuts: bool, pipelines: bool, every: int | None
) -> None:
    """Refuse flags that mean nothing together."""
    if find_placement(os.environ) != ALONE:
        raise ConfigError("compare starts its own ranks; run it without torchrun or srun")
    if config.ranks < 2:
        raise ConfigError(f"--ranks {config.ranks}: there is nothing to compare with fewer than 2 ranks; try --ranks 2")
    if in_process and config.transport != "auto":
        raise ConfigError(f"--transport {config.transport}: with --in-process nothing is transported; leave it out")
    if pipelines and (in_process or shortcuts):
        raise ConfigError("--pipelines compares schedules between ranks; leave --in-process and --shortcuts out")
    if shortcuts and in_process:
        raise ConfigError("--shortcuts and --in-process: replicas in one process send nothing; give one of them")
    if every is not None and not shortcuts:
        raise ConfigError(f"--every {every} is for --shortcuts; add that, or leave it out")
    if config.average_every is not None and not shortcuts:
        raise ConfigError(
            f"average_every = {config.average_every}: parameters that are averaged are not those of one process; "
            "try --shortcuts, which compares them"
        )


def _defaults_of_shortcuts(given: dict[str, Any]) -> dict[str, Any]:
    """What --shortcuts takes when nothing else is said: 16 layers are slow to learn by plain SGD."""
    of_mlp = {"depth": compare_shortcuts.DEPTH} if given.get("model") in (None, "mlp") else {}
    return compare_shortcuts.DEFAULTS | of_mlp


def _rows(config: TrainConfig, in_process: bool, folder: Path | None) -> list[Comparison]:
    """Do the work, and say meanwhile what is being done."""
    from microparallel.train.build import check
    from microparallel.train.compare import compare as compare_strategies
    from microparallel.train.compare import compare_in_process, pipeline_rows
    from microparallel.world import Pool

    check(config)
    with Console(stderr=True).status("running" if in_process else "starting ranks") as status:

        def progress(text: str) -> None:
            status.update(f"running {text}")

        def keep(strategy: str, trace: Trace) -> None:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                trace.to_chrome(folder / f"{strategy.replace(' ', '-')}.json")

        if in_process:
            return compare_in_process(config, progress)
        with Pool() as pool:
            if config.is_pipeline:
                return compare_strategies(config, pipeline_rows(), pool, progress, keep)
            strategies = [name for name in STRATEGIES if name not in ("auto", "single", "averaging", "pipeline")]
            return compare_strategies(config, strategies, pool, progress, keep)


def _about_torch(config: TrainConfig, rows: list[Comparison]) -> str:
    """What was compared with torch's own, or why it was not."""
    gpus = next((row.ranks for row in rows if row.strategy == "torch-dp"), 0)
    if gpus == 1:
        return "torch-dp is nn.DataParallel, which gives each GPU one share: with 1 GPU that is plain training."
    if gpus:
        return f"torch-dp is nn.DataParallel, on {gpus} GPUs."
    why = "--device is cpu" if config.device == "cpu" else "torch sees none here"
    return f"nn.DataParallel needs a GPU, and {why}: compared with plain training on one device (single) alone."


def _show(rows: list[Comparison], config: TrainConfig, in_process: bool) -> None:
    console = Console()
    if in_process:
        console.print(_loss_table(rows))
    console.print(_table(rows, config, "replicas" if in_process else "ranks"))


def _loss_table(rows: list[Comparison]) -> Table:
    """The loss of each strategy, step by step; of a long run, a selection of steps."""
    table = Table(title="loss at each step")
    table.add_column("step", justify="right")
    for row in rows:
        table.add_column(row.strategy, justify="right")
    steps = len(rows[0].losses)
    for step in sorted({round(line * (steps - 1) / (_LOSSES_SHOWN - 1)) for line in range(_LOSSES_SHOWN)}):
        table.add_row(str(step + 1), *(f"{row.losses[step]:.12f}" for row in rows))
    return table


def _table(rows: list[Comparison], config: TrainConfig, unit: str) -> Table:
    table = Table(
        title=f"{config.model}, {config.steps} steps of {config.batch} samples, {config.dtype}, {config.optimizer}",
        caption=_CAPTION[config.dtype],
    )
    for heading in ("strategy", unit, "final loss", "Δ loss", "Δ weights", "ms a step", "verdict"):
        # In a narrow terminal numbers may be cut short, but not who did how well.
        words = heading in ("strategy", "verdict")
        table.add_column(heading, justify="left" if heading == "strategy" else "right", no_wrap=words)
    for row in rows:
        table.add_row(
            row.strategy,
            str(row.ranks),
            f"{row.final_loss:.6f}",
            f"{row.loss_difference:.1e}" if row.loss_difference else "0",
            f"{row.weight_difference:.1e}" if row.weight_difference else "0",
            f"{row.seconds_a_step * 1e3:.1f}",
            "[green]same[/]" if row.agrees else "[bold red]differs[/]",
        )
    return table
