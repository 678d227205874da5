"""`microparallel compare`: does every strategy end where a single process does?"""

from __future__ import annotations

import json as json_format
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from microparallel.cli import flags
from microparallel.cli.flags import takes
from microparallel.errors import ConfigError
from microparallel.text import count, without_nan
from microparallel.topology import ALONE, find_placement, ranks_of_the_world
from microparallel.train.config import MICROBATCHES, MIXED, STRATEGIES, TrainConfig, merge, read_config

if TYPE_CHECKING:
    from microparallel.trace import Trace
    from microparallel.train.compare import Comparison
    from microparallel.train.fewer_bytes import CompressedCurve
    from microparallel.train.shortcuts import Curve

EXAMPLES = flags.examples(
    ("microparallel compare --ranks 4", "20 steps of the MLP, in float64, where only rounding may differ"),
    ("microparallel compare --model gpt --ranks 2 --precision float32", "a small GPT in float32"),
    ("microparallel compare --pipelines --ranks 4", "every pipeline schedule against one process"),
    ("microparallel compare --shard parameters --ranks 4", "optimizer, gradients, parameters in parts: ZeRO 1, 2, 3"),
    ("microparallel compare --in-process --ranks 3", "three replicas in this process: through the CPU, by a ring"),
    ("microparallel compare --compress topk:0.01", "a hundredth of the gradients: with error feedback, and without"),
    ("microparallel compare --compress int8", "where error feedback does not matter"),
    ("microparallel compare --compress sign --optimizer adamw --lr 1e-3", "where it makes things worse"),
    ("torchrun --nproc-per-node=4 -m microparallel compare", "the same between ranks that torchrun has started"),
    ("microparallel compare --shortcuts --every 8", "synchronise 8 times less often: the loss, and the bytes sent"),
)
SHORTCUT_EVERY = 4
# A model that learns within a few seconds by plain SGD, for which the theory is simple.
SHORTCUT_DEFAULTS: dict[str, Any] = {"steps": 120, "lr": 0.05}
SHORTCUT_DEPTH = 4  # of the mlp
# The same model, by the same optimizer; what is compressed is float32.
COMPRESSION_DEFAULTS: dict[str, Any] = {"steps": 200, "lr": 0.1, "precision": "float32"}
SEEDS = 3
_DEFAULTS: dict[str, Any] = {
    "ranks": 2,
    "steps": 20,
    "precision": "float64",
    "optimizer": "sgd",
    "lr": 0.01,
    "schedule_lr": "constant",
}

_MATTERS = 0.1  # of the loss: less is not said to be a difference
_LOSSES_SHOWN = 20  # in the terminal; --json has the loss of every step
_CAPTION = {
    "float64": "Δ: the largest relative difference over all steps, over all weights",
    "float32": "Δ: the largest relative difference over all steps, over all weights.\n"
    "In float32 rounding alone may push a ReLU over its edge, and the runs part; --precision float64 shows which.",
}


def _shown_default(name: str) -> str:
    others = {"shortcuts": SHORTCUT_DEFAULTS, "--compress": COMPRESSION_DEFAULTS}
    parts = [f"of {what} {defaults[name]}" for what, defaults in others.items() if name in defaults]
    return "; ".join([str(_DEFAULTS[name]), *parts])


_CHANGED: dict[str, dict[str, Any]] = {name: {"shown": _shown_default(name)} for name in _DEFAULTS}
_CHANGED["steps"] |= {"help": "How many steps to compare."}
_CHANGED["ranks"] |= {"help": "How many processes (or replicas) share each batch."}
_CHANGED["shard"] = {"help": "Compare data parallelism whose ranks keep parts (ZeRO) instead, up to this."}
_CHANGED["accumulate"] = {"help": "With --shard: micro-batches in which each rank computes its share."}
_CHANGED["compress"] = {"help": "Compare a compression of gradients, with error feedback and without, with none."}
_CHANGED["microbatches"] = {"help": "With --pipelines: micro-batches of each batch.", "shown": str(MICROBATCHES)}


@takes(
    TrainConfig,
    (
        *("model", "data", "collate", "loss", "dim", "depth", "heads", "context", "steps", "batch", "lr"),
        "schedule_lr",
        *("optimizer", "momentum", "seed", "precision", "ranks", "shard", "prefetch", "keep_parameters", "replicas"),
        *("compress", "compress_warmup", "accumulate", "microbatches", "device", "transport", "mps"),
    ),
    changed=_CHANGED,
)
def compare(
    given: dict[str, Any],
    *,
    pipelines: Annotated[
        bool, typer.Option("--pipelines", help="Compare every pipeline schedule instead, the model cut for the ranks.")
    ] = False,
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
        typer.Option(help="With --shortcuts: batches between two synchronisations.", show_default=str(SHORTCUT_EVERY)),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="With --compress: runs of each, from --seed on.", show_default=str(SEEDS))
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Record each strategy's last five steps, as Chrome traces (for Perfetto)."),
    ] = None,
    config: flags.ConfigFile = None,
    json: flags.Json = False,
) -> int:
    """Run the same job as a single process and with each strategy, and show how far apart they end.

    torch's own DistributedDataParallel is measured beside ours. The exit code is 1 if a strategy differs from the
    single process by more than rounding.

    With --pipelines the model is cut into stages, one or more a rank, and each schedule does the job.

    With --shard each rank keeps only its part of the optimizer's state, with --shard gradients of these, too, and with
    --shard parameters of all of the model; each has a row of its own, up to the one that is named. Then sgd has
    momentum 0.9, which is a state to share, unless --optimizer or --momentum says something else.

    With --in-process no ranks are started: replicas in one process share each batch, on the GPUs in turn or all on the
    CPU. Their gradients are averaged through the CPU, then by a ring; where there are GPUs, torch's nn.DataParallel is
    measured beside them.

    With --shortcuts the ranks learn from the same batches in three ways: gradients averaged every step, gradients
    accumulated over several batches, and parameters averaged instead of gradients. These learn different things; what
    each does to the loss and to the bytes sent is shown.

    With --compress the ranks learn from the same batches in three ways: gradients whole, compressed with error feedback
    and compressed without; once for each seed.
    """
    if trace is not None:
        given["trace"] = True
    in_file = read_config(config) if config else {}
    compresses = (in_file | given).get("compress") not in (None, "none")
    defaults = _DEFAULTS
    if shortcuts or compresses:
        defaults = defaults | _defaults_of_curves(in_file | given, compresses)
    if pipelines:
        defaults = defaults | {"strategy": "pipeline"}
    elif (in_file | given).get("shard") is not None and not (in_file | given).keys() & {"optimizer", "momentum"}:
        defaults = defaults | {"momentum": 0.9}  # a state to share
    ranks = ranks_of_the_world(os.environ, given.get("ranks"))
    if ranks is not None:  # torchrun or Slurm has decided how many there are
        given["ranks"] = ranks
    chosen = TrainConfig(**merge(defaults | in_file, given)).resolved()
    _require_sense(chosen, in_process=in_process, shortcuts=shortcuts, pipelines=pipelines, every=every, seeds=seeds)
    if trace is not None and (in_process or shortcuts or compresses):
        raise ConfigError(
            "--trace records strategies between ranks; leave --in-process, --shortcuts and --compress out"
        )
    if compresses:
        return show_compression(chosen, SEEDS if seeds is None else seeds, json)
    if shortcuts:
        return show_shortcuts(chosen, SHORTCUT_EVERY if every is None else every, json)
    rows = _rows(chosen, in_process, trace)
    if not rows:  # rank 0 says what was found
        return 0
    if json:
        print(json_format.dumps(without_nan([asdict(row) for row in rows]), indent=2))
    else:
        _show(rows, chosen, in_process)
    if in_process:
        Console(stderr=json).print(_about_torch(chosen, rows), highlight=False)
    return 0 if all(row.agrees for row in rows) else 1


def _require_sense(
    config: TrainConfig, *, in_process: bool, shortcuts: bool, pipelines: bool, every: int | None, seeds: int | None
) -> None:
    """Refuse flags that mean nothing together."""
    if seeds is not None and (config.compress is None or seeds < 1):
        raise ConfigError(f"--seeds {seeds}: it is for --compress, and at least 1; add --compress topk:0.01, say")
    if config.compress is not None and (in_process or shortcuts or pipelines):
        raise ConfigError(
            f"--compress {config.compress} compares sums between ranks; leave --pipelines, --in-process and "
            "--shortcuts out"
        )
    if find_placement(os.environ) != ALONE and (in_process or shortcuts or config.compress is not None):
        raise ConfigError(
            "--in-process, --shortcuts and --compress start what they compare; run them without torchrun or srun"
        )
    if config.precision in MIXED:
        raise ConfigError(
            f"--precision {config.precision}: rounded to 16 bits, two right runs end far apart; compare in float64"
        )
    if config.ranks < 2:
        raise ConfigError(f"--ranks {config.ranks}: there is nothing to compare with fewer than 2 ranks; try --ranks 2")
    if in_process and (config.transport, config.mps) != ("auto", "auto"):
        given = f"--mps {config.mps}" if config.transport == "auto" else f"--transport {config.transport}"
        raise ConfigError(f"{given}: with --in-process nothing is transported; leave it out")
    if pipelines and (in_process or shortcuts):
        raise ConfigError("--pipelines compares schedules between ranks; leave --in-process and --shortcuts out")
    if shortcuts and in_process:
        raise ConfigError("--shortcuts and --in-process: replicas in one process send nothing; give one of them")
    if config.shard is not None and (pipelines or in_process or shortcuts):
        raise ConfigError(
            f"--shard {config.shard} compares parts between ranks; leave --pipelines, --in-process and --shortcuts out"
        )
    if config.accumulate > 1 and config.shard is None and not shortcuts:
        raise ConfigError(
            f"--accumulate {config.accumulate}: naive and hooks compute a step at once; try --shard gradients, or "
            "leave it out"
        )
    if every is not None and not shortcuts:
        raise ConfigError(f"--every {every} is for --shortcuts; add that, or leave it out")
    if config.average_every is not None and not shortcuts:
        raise ConfigError(
            f"average_every = {config.average_every}: parameters that are averaged are not those of one process; "
            "try --shortcuts, which compares them"
        )


def _defaults_of_curves(given: dict[str, Any], compresses: bool) -> dict[str, Any]:
    """What --shortcuts and --compress take when nothing else is said: 16 layers are slow to learn by plain SGD."""
    of_mlp = {"depth": SHORTCUT_DEPTH} if given.get("model") in (None, "mlp") else {}
    return (COMPRESSION_DEFAULTS if compresses else SHORTCUT_DEFAULTS) | of_mlp


def _rows(config: TrainConfig, in_process: bool, folder: Path | None) -> list[Comparison]:
    """Do the work, and say meanwhile what is being done."""
    from microparallel.train.build import check
    from microparallel.train.compare import compare as compare_strategies
    from microparallel.train.compare import compare_in_process, pipeline_rows, sharded_rows
    from microparallel.world import Pool, connect
    from microparallel.world.given_ranks import GivenRanks
    from microparallel.world.mps.choice import require_as_given

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
        if config.is_pipeline:
            strategies = pipeline_rows()
        elif config.shard is not None:
            strategies = sharded_rows(config.shard)
        else:
            strategies = [name for name in STRATEGIES if name not in ("auto", "single", "averaging", "pipeline")]
        if find_placement(os.environ) != ALONE:
            require_as_given(config.mps)
            with connect(config.transport, device=config.device) as comms:
                return compare_strategies(config, strategies, GivenRanks(comms), progress, keep)
        with Pool() as pool:
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
        title=f"{config.model}, {config.steps} steps of {config.batch} samples, {config.precision}, {config.optimizer}",
        caption=_CAPTION[config.precision],
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


# ── --shortcuts: what synchronising less often saves, and what it does to the loss ──────────────────────────────────


def show_shortcuts(config: TrainConfig, every: int, json: bool) -> int:
    """Do the work, and print it; the exit code is 1 if a loss was lost on the way."""
    _require_sensible(config, every)
    curves = _curves(config, every)
    if json:
        print(json_format.dumps(without_nan([asdict(curve) for curve in curves]), indent=2))
    else:
        console = Console()
        console.print(_shortcuts_table(curves, config))
        chart = draw_curves({curve.way: curve.losses for curve in curves}, curves[0].samples, "samples")
        console.print(chart, highlight=False, markup=False)
        console.print(explain(curves, config), highlight=False, markup=False)
    return 0 if all(math.isfinite(loss) for curve in curves for loss in curve.losses) else 1


def _require_sensible(config: TrainConfig, every: int) -> None:
    steps = config.steps or 0
    if every < 1:
        raise ConfigError(f"--every {every}: must be at least 1; try {SHORTCUT_EVERY}")
    if not steps:
        raise ConfigError(f"--epochs {config.epochs}: --shortcuts counts steps; give --steps instead")
    if steps % every:
        raise ConfigError(
            f"--every {every} does not divide --steps {steps}, and the last few would not be synchronised; "
            f"try --steps {-(-steps // every) * every}"
        )
    if config.accumulate > 1 or config.average_every is not None:
        raise ConfigError("--shortcuts compares accumulate and average_every itself; set --every, and leave them out")
    if config.transport == "nccl":
        raise ConfigError("--transport nccl: --shortcuts counts single messages, which gloo and shm send; leave it out")


def _curves(config: TrainConfig, every: int) -> list[Curve]:
    from microparallel.train.build import check
    from microparallel.train.shortcuts import compare_shortcuts
    from microparallel.world import Pool

    check(config)
    if config.transport == "auto":
        config = replace(config, transport="gloo")  # it sends messages from any device
    with Console(stderr=True).status("starting ranks") as status, Pool() as pool:
        return compare_shortcuts(config, every, pool, lambda text: status.update(f"running {text}"))


def _shortcuts_table(curves: list[Curve], config: TrainConfig) -> Table:
    table = Table(
        title=f"{config.model}, {config.steps} batches of {config.batch} samples on {config.ranks} ranks, "
        f"{config.precision}, {config.optimizer}",
        caption="Δ loss: the largest difference from the curve of every step\n"
        "bytes: sent by a rank, counted as messages of a ring leave\n"
        "formula: 2(p - 1)/p of the parameters, each time",
    )
    headings = ("way", "synchro-\nnised", "updates", "final\nloss", "Δ loss", "bytes a\nsample", "by\nformula")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "way" else "right", no_wrap=True)
    for curve in curves:
        table.add_row(
            curve.way,
            f"{curve.synchronisations}",
            f"{curve.updates}",
            f"{curve.final_loss:.6f}",
            f"{curve.loss_difference:.1e}" if curve.loss_difference else "0",
            f"{curve.bytes_a_sample:,.0f}",
            f"{curve.bytes_by_formula:,.0f}",
        )
    return table


def explain(curves: list[Curve], config: TrainConfig) -> str:
    """Say in a sentence each what was seen of the two shortcuts, and why."""
    _, accumulation, averaging = curves
    every = accumulation.every
    if every == 1:
        first = "accumulation of 1 batch is the step itself."
    else:
        first = (
            f"accumulation is exactly the step of a batch {every} times as large, so nothing about it is wrong; but it "
            f"made {accumulation.updates} updates where every step made {averaging.updates}, at the same learning rate."
        )
    return f"{first}\n{_why_averaging_differs(curves[0], averaging, config)}"


def _why_averaging_differs(reference: Curve, averaging: Curve, config: TrainConfig) -> str:
    from microparallel.train.compare import TOLERANCE

    same = averaging.loss_difference <= TOLERANCE[config.precision] * max(map(abs, reference.losses))
    if same and averaging.every == 1:
        return (
            "averaging parameters after every step is the same as averaging gradients here: the update of "
            f"{config.optimizer} is linear in the gradient, and the mean of (p - lr·g) is p - lr·(the mean of g)."
        )
    if same:
        return "averaging made no difference that can be measured here: the ranks hardly moved apart in between."
    if averaging.every > 1:
        stateless = config.optimizer == "sgd" and not config.momentum
        own = "" if stateless else ", with an optimizer state of its own"
        return (
            f"averaging parameters is not averaging gradients: after the first of {averaging.every} updates each rank "
            f"has weights of its own and computes its next gradients there{own}; that takes the loss up to "
            f"{averaging.loss_difference:.2g} away from the curve of every step."
        )
    if config.optimizer == "sgd":
        return "averaging differs though every step was averaged: momentum stays with the rank that gathered it."
    return (
        f"averaging parameters is not averaging gradients, even after every step: {config.optimizer} divides each "
        "rank's update by the size of its own gradients, and a mean of such ratios is not the ratio of the means."
    )


# ── --compress: what fewer bytes do to the loss ─────────────────────────────────────────────────────────────────────


def show_compression(config: TrainConfig, seeds: int, json: bool) -> int:
    """Do the work, and print it; the exit code is 1 if a loss was lost on the way."""
    if not config.steps:
        raise ConfigError(f"--epochs {config.epochs}: --compress counts steps; give --steps instead")
    curves = _compression_curves(config, range(config.seed, config.seed + seeds))
    if json:
        print(json_format.dumps(without_nan([asdict(curve) for curve in curves]), indent=2))
    else:
        console = Console()
        console.print(_compression_table(curves, config, seeds))
        shown = {curve.way: curve.losses for curve in curves}
        chart = draw_curves(shown, range(1, len(curves[0].losses) + 1), "steps")
        console.print(chart, highlight=False, markup=False)
        console.print(explain_compression(curves, config), highlight=False, markup=False)
    return 0 if all(math.isfinite(loss) for curve in curves for loss in curve.losses) else 1


def _compression_curves(config: TrainConfig, seeds: Sequence[int]) -> list[CompressedCurve]:
    from microparallel.train.build import check
    from microparallel.train.fewer_bytes import compare_compression
    from microparallel.world import Pool

    check(config)
    with Console(stderr=True).status("starting ranks") as status, Pool() as pool:
        return compare_compression(config, seeds, pool, lambda text: status.update(f"running {text}"))


def _compression_table(curves: list[CompressedCurve], config: TrainConfig, seeds: int) -> Table:
    table = Table(
        title=f"{config.compress}: {config.model}, {config.steps} steps of {config.batch} samples on {config.ranks} "
        f"ranks, {config.optimizer}",
        caption=f"loss: of the last steps, the mean of {count(seeds, 'seed')}, the least and the most\n"
        "bytes: sent by a rank in a step",
    )
    for heading in ("gradients", "loss", "least", "most", "accuracy", "bytes", "÷ whole"):
        table.add_column(heading, justify="left" if heading == "gradients" else "right", no_wrap=True)
    for curve in curves:
        known = [accuracy for accuracy in curve.accuracy if accuracy is not None]
        table.add_row(
            curve.way,
            f"{curve.final_loss:.4f}",
            f"{min(curve.final):.4f}",
            f"{max(curve.final):.4f}",
            f"{statistics.fmean(known):.1%}" if known else "–",
            f"{curve.bytes_a_step:,.0f}",
            f"{curve.bytes_a_step / curves[0].bytes_a_step:.3f}" if curves[0].bytes_a_step else "–",
        )
    return table


def explain_compression(curves: list[CompressedCurve], config: TrainConfig) -> str:
    """Say in a sentence what was seen of error feedback here."""
    if len(curves) == 2:
        return f"{config.compress} rounds every number a little, and sends all of them: it needs no error feedback."
    whole, with_feedback, without = curves
    spread = max(whole.final) - min(whole.final)
    lost = without.final_loss - with_feedback.final_loss
    chance = max(spread, _MATTERS * whole.final_loss)
    if lost > chance:
        return (
            f"without error feedback the loss ends {lost:.2g} higher: what {config.compress} leaves out is lost in "
            "every step. With it, what was left out is sent later: the sum of all that was sent follows the gradients."
        )
    if -lost > chance:
        return (
            f"with error feedback the loss ends {-lost:.2g} higher: what {config.compress} left out comes later, and "
            f"{config.optimizer} does worse with that on this problem; try --no-feedback of train."
        )
    return (
        f"error feedback makes no difference here that is larger than chance (seeds differ by {spread:.2g}): what "
        f"{config.compress} leaves out matters little to {config.optimizer} on this problem."
    )


# ── curves in the terminal ──────────────────────────────────────────────────────────────────────────────────────────

_MARKS, _SEVERAL = "●▲×", "◆"
_WIDTH, _HEIGHT = 60, 12


def draw_curves(curves: Mapping[str, Sequence[float]], x: Sequence[float], x_title: str) -> str:
    """Draw up to three curves over common points, one mark for each; what is not a finite number is left out.

    2.38 ┤◆
         │ ×▲
         │  ●  ▲
         │   ×● ×●  ▲
    0.29 ┤          ●●
         └──────────────
          0         7680  samples
          ● every step   ▲ accumulation   × averaging   ◆ several
    """
    finite = [value for values in curves.values() for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    cells: dict[tuple[int, int], str] = {}
    for mark, values in zip(_MARKS, curves.values(), strict=False):
        for place, value in zip(x, values, strict=True):
            if math.isfinite(value):
                cell = _position(high - value, high - low, _HEIGHT), _position(place - x[0], x[-1] - x[0], _WIDTH)
                cells[cell] = mark if cells.get(cell, mark) == mark else _SEVERAL
    lines = ["".join(cells.get((row, column), " ") for column in range(_WIDTH)) for row in range(_HEIGHT)]
    labels = {0: f"{high:.3g}", _HEIGHT - 1: f"{low:.3g}"}
    margin = max(map(len, labels.values()))
    drawn = [f"{labels.get(row, ''):>{margin}} {'┤' if row in labels else '│'}{line}" for row, line in enumerate(lines)]
    ends = f"{x[0]:g}".ljust(_WIDTH - len(last := f"{x[-1]:g}")) + last
    legend = "   ".join(f"{mark} {name}" for mark, name in zip(_MARKS, curves, strict=False))
    frame = [f"{'':{margin}} └{'─' * _WIDTH}", f"{'':{margin}}  {ends}  {x_title}"]
    return "\n".join(line.rstrip() for line in [*drawn, *frame, f"{'':{margin}}  {legend}   {_SEVERAL} several"])


def _position(distance: float, length: float, cells: int) -> int:
    return round(distance / length * (cells - 1)) if length else 0
