"""`microparallel analyze`: where does the time of a training step go, what does it cost, and what would help?"""

from __future__ import annotations

import json as json_format
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from microparallel.cli import flags
from microparallel.cli.flags import require_writable, takes
from microparallel.errors import ConfigError
from microparallel.settings import declared
from microparallel.text import count, did_you_mean
from microparallel.topology import ALONE, find_placement
from microparallel.train.config import OF_COMPRESSION, OF_PIPELINES, TrainConfig

if TYPE_CHECKING:
    from microparallel.analyze.measure import Findings
    from microparallel.analyze.scaling import Kind, Scaling
    from microparallel.analyze.table import Analysis
    from microparallel.world import Pool

EXAMPLES = flags.examples(
    ("microparallel analyze --ranks 2", "where a step's time goes, how it scales, and what would help"),
    ("microparallel analyze --ranks 4 --scaling both --plot scaling.svg", "1, 2 and 4 ranks, and as a picture"),
    ("microparallel analyze --model gpt --strategy naive --scaling none", "another model, another strategy"),
    ("microparallel analyze --pp 2 --schedule gpipe --microbatches 4", "a pipeline: what is its bubble?"),
    ("microparallel analyze --slow-rank 1=3x --scaling none", "what a straggler does"),
    ("microparallel analyze --slow-link 0-1=1ms,100Mbit --scaling none", "would compressed gradients help?"),
    ("microparallel analyze --barriers", "how barriers between the phases distort"),
    (
        "microparallel train --ranks 2 --trace --out runs/mine; microparallel analyze runs/mine",
        "a run that was recorded",
    ),
    ("microparallel analyze --json > analysis.json", "every number, for scripts"),
)
_SCALINGS = ("strong", "weak", "both", "none")
_RANKS, _STEPS = 2, 20  # unless something else is said
_STEPS_OF_SCHEDULE = 10**6  # of the learning rate's schedule, whose end is never reached here


@takes(
    TrainConfig,
    (
        *("model", "data", "collate", "loss", "dim", "depth", "heads", "context", "batch", "accumulate", "optimizer"),
        "seed",
        *("precision", "ranks", "strategy", "average_every", "compress", *OF_COMPRESSION),
        *("dp", "pp", *OF_PIPELINES, "device", "transport", "mps"),
        *("slow_rank", "slow_link"),
    ),
    changed={"ranks": {"shown": str(_RANKS)}},
)
def analyze(
    given: dict[str, Any],
    *,
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN]",
            help="A run's folder with a trace.json (train --trace), or such a file.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps to record.", show_default=str(_STEPS))] = None,
    scaling: Annotated[
        str | None,
        typer.Option(help="Run 1, 2, 4, … ranks: strong, weak, both or none.", show_default="strong"),
    ] = None,
    barriers: Annotated[
        bool, typer.Option("--barriers", help="Do a step with barriers between its phases, too.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the scaling, as .svg or .png.", show_default=False)
    ] = None,
    quiet: flags.Quiet = False,
    json: flags.Json = False,
) -> int:
    """Train a few steps, and say where their time went; or read it from a run that was recorded.

    Every number of the parts comes from events that were recorded while steps ran as they always do: computing,
    communication that nothing else went on beside (exposed), waiting for other ranks, and the rest. They add up to the
    step. Communication behind computation is hidden, and costs nothing. Waiting is never called communication.

    The verdict comes from the simulator: the recorded step is simulated without communication, without its slowest
    rank's delay, with other buckets and so on, and the time saved is what that cost. Where gradients are summed as they
    are, it is also simulated with each way to compress them; what encoding takes is measured on this machine. That is
    advised if it would help, and only then.

    Of a recorded step whose parameters are gathered on demand (mp.FullyShardedDataParallel) it says which gather and
    which sum computation waited for, and what another prefetch, or parameters that are kept, would give and cost.
    """
    if run is not None:
        _require_nothing_else(run, given, {"--steps": steps, "--scaling": scaling, "--plot": plot}, barriers)
        analysis = _recorded(run)
    else:
        found = _live(given, _STEPS if steps is None else steps, scaling or "strong", barriers, plot, quiet)
        if found is None:  # another rank of torchrun's world speaks
            return 0
        analysis = found
    _show(analysis, plot, json)
    return 0


# ── a run that was recorded ─────────────────────────────────────────────────────────────────────────────────────────


def _require_nothing_else(run: Path, given: dict[str, Any], others: dict[str, Any], barriers: bool) -> None:
    flags = [declared(TrainConfig)[name].flag for name in given]
    flags += [flag for flag, value in others.items() if value is not None] + ["--barriers"] * barriers
    if flags:
        raise ConfigError(f"{flags[0]}: {run} is analysed as it was recorded; leave {' and '.join(flags)} out")


def _recorded(run: Path) -> Analysis:
    from microparallel.analyze.bottleneck import find_bottleneck
    from microparallel.analyze.codecs import codecs_for
    from microparallel.analyze.step_timing import median_of, time_steps
    from microparallel.analyze.table import Analysis
    from microparallel.reporting.folder import read_trace

    file = run / "trace.json" if run.is_dir() else run
    if not file.is_file():
        what = "has no trace.json" if run.is_dir() else "is not there"
        raise ConfigError(f"{run} {what}: name the folder of a run that was trained with --trace, or its trace.json")
    trace = read_trace(file, "; record it again with `microparallel train --trace`")
    if trace is None or not trace.events:
        raise ConfigError(f"{file} holds no steps: nothing was computed while it was recorded")
    samples = trace.about.get("batch")
    timings = time_steps(trace, samples if isinstance(samples, int) else 0)
    timing = median_of(timings[1:] or timings)
    about = ", ".join(f"{name} {value}" for name, value in trace.about.items())
    verdict = find_bottleneck(timing.trace, took=timing.total, codecs=codecs_for(timing.trace))
    return Analysis(f"{file}: {about}" if about else str(file), timing, verdict)


# ── a run of our own ────────────────────────────────────────────────────────────────────────────────────────────────


def _live(
    given: dict[str, Any], steps: int, scaling: str, barriers: bool, plot: Path | None, quiet: bool
) -> Analysis | None:
    config = _config(given, steps, scaling, barriers)
    outside = find_placement(os.environ)
    if outside != ALONE:
        if given.get("ranks") is not None and config.world_size != outside.world_size:
            raise ConfigError(
                f"--ranks {given['ranks']}: this process belongs to a world of {outside.world_size} ranks"
            )
        config = config if config.is_pipeline else replace(config, ranks=outside.world_size)
    from microparallel.bench.chart import require_drawable
    from microparallel.train.build import check

    if plot is not None:
        require_drawable(plot, "--plot")
        require_writable(plot, "--plot")
    config = config.resolved()
    check(config)
    kinds: list[Kind] = [kind for kind in ("strong", "weak") if scaling in (kind, "both")]
    if outside != ALONE:
        return _in_a_given_world(config, steps, barriers, quiet)
    counts = _counts(config, kinds)
    from microparallel.analyze.measure import measure
    from microparallel.world import Pool

    if not quiet:
        print(f"starting {count(config.ranks, 'rank')} …", file=sys.stderr)
    how: dict[str, Any] = {"transport": config.transport, "device": config.device, "mps": config.mps}
    with Pool() as pool:
        findings: Findings = pool.run(measure, config.ranks, config, steps, barriers, quiet, **how)[0]
        scalings = _scale(pool, config, kinds, counts, quiet)
    return _analysis(config, findings, scalings)


def _config(given: dict[str, Any], steps: int, scaling: str, barriers: bool) -> TrainConfig:
    if scaling not in _SCALINGS:
        raise ConfigError(f"--scaling {scaling}: {did_you_mean(scaling, _SCALINGS)}")
    if steps < 1:
        raise ConfigError(f"--steps {steps}: must be at least 1; try {_STEPS}")
    if not given.keys() & {"ranks", "dp", "pp"} and given.get("strategy") != "single":
        given = {**given, "ranks": _RANKS}
    config = TrainConfig(**given, steps=_STEPS_OF_SCHEDULE)
    if barriers and config.is_pipeline:
        raise ConfigError("--barriers is for data parallelism: a pipeline's phases are interwoven; leave --pp out")
    return config


def _in_a_given_world(config: TrainConfig, steps: int, barriers: bool, quiet: bool) -> Analysis | None:
    """Among the ranks that torchrun or Slurm started, whose number cannot be changed: so there is no scaling."""
    from microparallel.analyze.measure import measure
    from microparallel.world import connect
    from microparallel.world.mps.choice import require_as_given

    require_as_given(config.mps)
    with connect(config.transport, device=config.device) as comms:
        findings = measure(comms, config, steps, barriers, quiet)
        return _analysis(config, findings, []) if comms.rank == 0 else None


def _counts(config: TrainConfig, kinds: list[Kind]) -> list[int]:
    """How many ranks to try; each world is checked before any process is started."""
    from microparallel.analyze.measure import config_for
    from microparallel.analyze.scaling import rank_counts
    from microparallel.train.build import check

    dp, pp = config.layout
    counts = (
        [pp * replicas for replicas in rank_counts(dp)] if config.is_pipeline and dp > 1 else rank_counts(config.ranks)
    )
    for ranks in counts if kinds else []:
        check(config_for(config, ranks, config.batch or 1).resolved())
    return counts


def _scale(pool: Pool, config: TrainConfig, kinds: list[Kind], counts: list[int], quiet: bool) -> list[Scaling]:
    from microparallel.analyze.measure import make_step
    from microparallel.analyze.scaling import measure_scaling
    from microparallel.bench.ranks import progress_on_standard_error

    found = []
    with progress_on_standard_error(not quiet and bool(kinds), "worlds") as progress:
        done = 0

        def tell(ranks: int) -> None:
            nonlocal done
            progress(done / (len(kinds) * len(counts)), count(ranks, "rank"), 0)
            done += 1

        for kind in kinds:
            batch = config.batch or 1
            # Weak scaling gives each rank what it has in the largest world of strong scaling.
            smallest = batch if kind == "strong" else max(1, batch * counts[0] // counts[-1])
            how: dict[str, Any] = {"transport": config.transport, "device": config.device, "mps": config.mps}
            step = partial(make_step, config)
            found.append(measure_scaling(pool, step, kind, counts, smallest, progress=tell, **how))
    return found


def _analysis(config: TrainConfig, findings: Findings, scalings: list[Scaling]) -> Analysis:
    from microparallel.analyze.bottleneck import find_bottleneck
    from microparallel.analyze.table import Analysis

    timing = findings.timing
    verdict = find_bottleneck(
        timing.trace, findings.demand, findings.machine, timing.total, findings.codecs, findings.link
    )
    how = f"{config.schedule} on --dp {config.dp} --pp {config.pp}" if config.is_pipeline else config.strategy
    title = f"{config.model}, {findings.parameters:,} parameters, batch {config.batch}, {how}"
    return Analysis(title, findings.timing, verdict, findings, tuple(scalings))


def _show(analysis: Analysis, plot: Path | None, json: bool) -> None:
    from microparallel.analyze import table as analyze_table
    from microparallel.analyze.scaling import plot_scaling
    from microparallel.bench.chart import write_picture

    if plot is not None and analysis.scalings:
        write_picture(plot_scaling(analysis.scalings, analysis.title), plot)
    if json:
        print(json_format.dumps(analyze_table.as_json(analysis), indent=2))
    else:
        analyze_table.show(analysis)
    if plot is not None:
        what = (
            f"drawn in {plot}" if analysis.scalings else f"--plot {plot}: no scaling was measured, so nothing is drawn"
        )
        print(what, file=sys.stderr)
