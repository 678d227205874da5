"""`microparallel train`: train a model on one rank or many, and keep what came of it."""

from __future__ import annotations

import json as json_format
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from microparallel.cli import flags
from microparallel.cli.flags import takes
from microparallel.errors import ConfigError, Interrupted, LaunchError, MicroparallelError, RankFailed
from microparallel.observe.processes import start_ticks
from microparallel.settings import declared
from microparallel.text import count, show_seconds, without_nan
from microparallel.topology import ALONE, find_placement, ranks_of_the_world
from microparallel.topology.limits import require_addresses
from microparallel.train.checkpoint_folder import checkpoints
from microparallel.train.config import OF_PARAMETERS, OF_PIPELINES, TrainConfig, merge, read_config
from microparallel.train.run_folder import AUTO, RunFolder, check_new

if TYPE_CHECKING:
    from microparallel.comms import Comms

EXAMPLES = flags.examples(
    ("microparallel train --ranks 4", "a 16-layer MLP on handwritten digits, the batch shared by 4 processes"),
    ("microparallel train --model gpt --data notes/ --steps 500 --ranks 2", "a small GPT on your own text"),
    ("microparallel train --model my_module:make_model --data my_module:make_dataset", "your own model and data"),
    ("microparallel train --optimizer radam --schedule-lr cosine --warmup 0.05 --clip 1", "optimizer and schedule"),
    ("microparallel train --ranks 2 --batch 512 --accumulate 8", "a large batch, computed in 8 micro-batches a rank"),
    ("microparallel train --ranks 2 --shard gradients", "each rank keeps half of the optimizer's state and gradients"),
    (
        "microparallel train --ranks 4 --shard parameters",
        "and a quarter of the model, gathered layer by layer",
    ),
    ("microparallel train --dp 2 --pp 2 --schedule 1f1b --microbatches 8", "two pipelines of two ranks each"),
    ("microparallel train --ranks 4 --trace --out runs/mine; microparallel report runs/mine", "see where time went"),
    ("microparallel train --resume runs/20260131-093000-mlp", "go on where an earlier run stopped"),
    ("microparallel train --ranks 4 --restarts 10", "go on by itself when a rank dies"),
    ("torchrun --nproc-per-node=4 -m microparallel train", "the same, started by torchrun"),
)
_AGENTS_APART = 5.0  # seconds within which torchrun's agents on all hosts have noticed that a host joins
# A resumed run goes on bit for bit, so only what does not change its course may be changed.
_CHANGEABLE = [name for name, one in declared(TrainConfig).items() if one.setting.may_change]


@takes(TrainConfig)
def train(
    given: dict[str, Any],
    *,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Go on with an earlier run's folder; auto: with that of --out if it holds a run, or else begin.",
        ),
    ] = None,
    config: flags.ConfigFile = None,
    quiet: flags.Quiet = False,
    json: flags.Json = False,
) -> int:
    """Train a model on one rank or many.

    The global batch is split between the ranks, so any number of ranks computes the same thing, but for
    --average-every. Each run keeps its configuration, metrics, checkpoints and summary in a folder.
    """
    resume = resume or _under_an_agent()
    chosen = _choose(given, config, None if resume == Path(AUTO) else resume)
    if resume == Path(AUTO):
        chosen = _with_folder(chosen)
    summary = _run(chosen, AUTO if resume == Path(AUTO) else resume, quiet)
    told_to_stop = summary.pop("told_to_stop", False)
    if find_placement(os.environ).rank == 0:  # of torchrun's world, one rank speaks
        print(json_format.dumps(without_nan(summary), indent=2) if json else _report(summary), flush=True)
    if summary["stopped_early"] and not told_to_stop:
        _let_agent_end_this()
    return 130 if summary["stopped_early"] else 0


def _under_an_agent() -> Path | None:
    """Under torchrun with --max-restarts, a run goes on by itself: each attempt is this same command."""
    return Path(AUTO) if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0 else None


def _let_agent_end_this() -> None:
    """Let torchrun end this process, which has stopped, and saved, because another rank was told to.

    When a host joins, the agents of all hosts stop their ranks, one a moment after the other, to start them anew. An
    agent whose ranks had ended before its own turn would count that as a failure, or take it for the end of the run.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(_AGENTS_APART)


def _with_folder(config: TrainConfig) -> TrainConfig:
    """Name the folder that all attempts of this command have: that of --out, or one named after torchrun's agent."""
    if config.out is not None:
        return config
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if run is None:
        raise ConfigError("--resume auto needs to know where the run is kept; add --out FOLDER")
    # The agent starts all attempts; its number alone may be another process's after the machine has been started anew.
    return replace(config, out=f"runs/torchrun-{run}-{os.getppid()}-{start_ticks(os.getppid())}")


def _choose(given: dict[str, Any], file: Path | None, resume: Path | None) -> TrainConfig:
    """Put the flags over the configuration file's values, or over those of the run that goes on."""
    if resume is None:
        values = merge(read_config(file) if file is not None else {}, given)
    else:
        values = merge(_values_of_run(resume, file, given), given)
    ranks = ranks_of_the_world(os.environ, given.get("ranks"))
    if ranks is not None:  # torchrun or Slurm has decided how many there are
        values["ranks"] = ranks
    return TrainConfig(**values).resolved()


def _values_of_run(resume: Path, file: Path | None, given: dict[str, Any]) -> dict[str, Any]:
    if file is not None:
        raise ConfigError(
            f"--config {file} and --resume {resume}: a run goes on with its own settings; give one of them"
        )
    values = read_config(RunFolder.open(resume).config_file)
    for name, value in given.items():
        if name not in _CHANGEABLE and value != values.get(name):
            raise ConfigError(
                f"{declared(TrainConfig)[name].given(value)} would change a run that began with {values.get(name)}; "
                f"leave it out, or start a new run (--resume allows: {', '.join(_CHANGEABLE).replace('_', '-')})"
            )
    left_out = _no_longer_true(values, given)
    return {name: value for name, value in values.items() if name not in left_out}


def _no_longer_true(values: dict[str, Any], given: dict[str, Any]) -> set[str]:
    """Name the settings of a run that mean nothing any more when it goes on with other ranks, or other parts."""
    left_out = {"strategy"} if values.get("strategy") == "single" else set()
    if given.get("shard", "parameters") != "parameters":
        left_out |= set(OF_PARAMETERS)
    if not given.keys() & {"ranks", "dp", "pp", "strategy"}:
        return left_out
    if given.keys() & {"dp", "pp"}:
        left_out |= {"ranks", "strategy"}
    if values.get("strategy") == "pipeline" and "dp" in given and not given.keys() & {"ranks", "pp", "strategy"}:
        return left_out  # more replicas of the same pipeline, or fewer
    if "pp" not in given and given.get("strategy") != "pipeline":
        left_out |= set(OF_PIPELINES)
        if values.get("strategy") == "pipeline":
            left_out.add("strategy")
    return left_out | {"dp", "pp", "replicas"}


def _run(config: TrainConfig, resume: Path | str | None, quiet: bool) -> dict[str, Any]:
    if resume is None and config.out is not None:
        check_new(Path(config.out))
    if resume == AUTO and config.out is not None and not (Path(config.out) / "config.toml").exists():
        check_new(Path(config.out))
    require_addresses()  # before torch takes them
    from microparallel.train.build import check
    from microparallel.train.loop import train_on_rank
    from microparallel.world.connect import DEFAULT_TIMEOUT, connect
    from microparallel.world.mps.choice import require_as_given

    check(config)
    under_an_agent = find_placement(os.environ) != ALONE
    if under_an_agent and config.restarts:
        raise ConfigError(
            f"--restarts {config.restarts}: torchrun or Slurm has started this rank, and starts it again: "
            "torchrun --max-restarts"
        )
    if under_an_agent:  # which says what has failed
        require_as_given(config.mps)
        with connect(config.transport, device=config.device, timeout=config.timeout or DEFAULT_TIMEOUT) as comms:
            return _in_this_process(train_on_rank, comms, config, resume, quiet)
    if resume is None:
        config = replace(config, out=config.out or str(RunFolder.default_path(config, datetime.now())))
    if config.ranks == 1 and not config.restarts:
        require_as_given(config.mps)
        run = _folder_of(config, resume)
        with connect(config.transport, device=config.device, timeout=config.timeout or DEFAULT_TIMEOUT) as comms:
            try:
                return _in_this_process(train_on_rank, comms, config, resume, quiet)
            except MicroparallelError as error:
                _note_how_to_go_on(error, run)
                raise
            except KeyboardInterrupt:
                _say_what_is_lost(run)
                raise
    if not quiet:
        print(f"starting {count(config.ranks, 'rank')} …", file=sys.stderr)
    return _in_processes(config, resume, quiet)


def _in_processes(config: TrainConfig, resume: Path | str | None, quiet: bool) -> dict[str, Any]:
    """Start ranks, and start them again if need be; Ctrl-C, SIGTERM and SIGHUP let them save first."""
    from microparallel.train.loop import train_on_rank
    from microparallel.world import Pool
    from microparallel.world.fork_server import NEEDED, ForkServer, can_fork

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    if resume is None and config.restarts:  # each attempt finds in this folder what there is to go on from
        resume = AUTO
    run = _folder_of(config, resume)
    options: dict[str, Any] = {"transport": config.transport, "device": config.device, "call_timeout": config.timeout}
    options |= {"restarts": config.restarts, "min_ranks": config.min_ranks, "mps": config.mps}
    if config.is_pipeline:
        options |= {"in_groups_of": config.layout[1]}
    with ExitStack() as stack:
        quick = None
        if config.restarts and can_fork():  # ranks that are there at once
            quick = stack.enter_context(ForkServer([*NEEDED, "microparallel.train.loop"]))
        pool = stack.enter_context(Pool(quick))
        try:
            results = pool.run(train_on_rank, config.ranks, config, resume, quiet, **options)
        except Interrupted as interrupt:
            results = interrupt.results
        except LaunchError as error:
            RunFolder.clear_if_nothing_happened(run)  # rank 0 may have been ended before it could do so
            _note_how_to_go_on(error, run)
            raise
        except KeyboardInterrupt as interrupt:
            if isinstance(interrupt.__cause__, LaunchError):  # the first Ctrl-C, and a rank could not save
                _note_how_to_go_on(interrupt.__cause__, run)
                raise interrupt.__cause__ from None
            _say_what_is_lost(run)
            raise
    first: dict[str, Any] = results[0]
    return first


def _folder_of(config: TrainConfig, resume: Path | str | None) -> Path:
    return Path(config.out) if resume in (None, AUTO) and config.out else Path(resume or "")


def _note_how_to_go_on(error: MicroparallelError, run: Path) -> None:
    """Let an error end with what is saved of the run, if anything is that was learnt."""
    if newest := max(checkpoints(run / "checkpoints"), default=0):
        error.add_note(f"step {newest} is saved; go on with: microparallel train --resume {run}")


def _say_what_is_lost(run: Path) -> None:
    """After a second Ctrl-C, which has ended the ranks at once: what was done, and what is saved of it."""
    folder = RunFolder(run)
    if folder.config_file.exists():  # otherwise it had not begun
        steps = checkpoints(folder.checkpoints)
        lost = f"what was done after step {max(steps)} is lost" if steps else "everything is lost"
        if steps and max(steps) == folder.last_step():
            lost = f"step {max(steps)} is saved, and nothing is lost"
        print(f"ended at once; {lost}; go on with: microparallel train --resume {run}", file=sys.stderr)


def _in_this_process(train_on_rank: Callable[..., Any], comms: Comms, *arguments: Any) -> dict[str, Any]:
    """Run the one rank here, and report what it raises as that of a rank elsewhere would be."""
    try:
        summary: dict[str, Any] = train_on_rank(comms, *arguments)
    except MicroparallelError:
        raise
    except Exception as error:
        raise RankFailed(comms.rank, f"raised {type(error).__name__}: {error}", traceback.format_exc()) from None
    return summary


def _report(summary: dict[str, Any]) -> str:
    """What came of the run, in a few short lines."""
    lines = []
    measured = {
        name.removeprefix("validation_"): f"{value:.1%}" if name == "validation_accuracy" else f"{value:.4f}"
        for name, value in summary.items()
        if name.startswith("validation_") and value is not None
    }
    if measured:
        order = sorted(measured, key=lambda name: name != "accuracy")  # the rest stays in its order
        lines.append("validation " + ", ".join(f"{name} {measured[name]}" for name in order))
    loss = f", training loss {summary['loss']:.4f}" if summary["loss"] is not None else ""
    speed = f", {summary['samples_per_second']:,.0f} samples/s" if summary["samples_per_second"] else ""
    lines.append(f"{summary['steps']} steps{loss}; {summary['seconds']:.1f} s{speed}")
    lines.append(f"kept in {summary['folder']}")
    if (Path(summary["folder"]) / "trace.json").exists():
        error = summary.get("clock_error")
        clocks = f", all ranks on one clock to within {show_seconds(error)}" if error else ""
        lines.append(f"recorded{clocks}; see it with: microparallel report {summary['folder']}")
    return "\n".join(lines)
