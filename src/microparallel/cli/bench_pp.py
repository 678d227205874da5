"""`microparallel bench pp`: a training step of every pipeline schedule, beside torch's own and the ideal."""

from __future__ import annotations

import json as json_format
from typing import TYPE_CHECKING, Annotated

import typer

from microparallel.cli import options
from microparallel.cli.bench_options import Trace, parse_names, require_known, require_time
from microparallel.cli.bench_world import choose_ranks, measure_on_ranks
from microparallel.errors import ConfigError, MicroparallelError
from microparallel.schedules import PIPELINES

if TYPE_CHECKING:
    from microparallel.comms import Comms
    from microparallel.performance.pipeline_bench import Measurements, Settings

EXAMPLES = options.examples(
    ("microparallel bench pp", "every schedule beside torch's, in under two minutes"),
    ("microparallel bench pp --schedules gpipe,1f1b,zb-h1 --steps 50", "some of it, thoroughly"),
    ("microparallel bench pp --ranks 4 --microbatches 32 --no-torch", "what 1f1b saves of gpipe's memory"),
    ("microparallel bench pp --model gpt", "stages of attention"),
    ("microparallel bench pp --json > pp.json", "every number, for scripts"),
    ("torchrun --nproc-per-node=4 -m microparallel bench pp", "between ranks that torchrun started"),
)
_SECONDS = 75.0


def pipelines(
    ranks: Annotated[int | None, typer.Option(help="How many processes.", show_default="2")] = None,
    model: Annotated[str, typer.Option(help="mlp or gpt.")] = "mlp",
    depth: Annotated[
        int | None, typer.Option(help="Layers of mlp, blocks of gpt.", show_default="mlp 16, gpt 8")
    ] = None,
    width: Annotated[int | None, typer.Option(help="Width of a layer.", show_default="mlp 512, gpt 128")] = None,
    batch: Annotated[
        int | None, typer.Option(help="Samples, of all micro-batches together.", show_default="mlp 256, gpt 16")
    ] = None,
    microbatches: Annotated[int, typer.Option(help="Into how many micro-batches a batch is cut.")] = 8,
    schedules: Annotated[
        str | None, typer.Option(metavar="NAMES", help=f"Some of {', '.join(PIPELINES)}.", show_default="all")
    ] = None,
    with_torch: Annotated[bool, typer.Option("--torch/--no-torch", help="Measure torch's schedules, too.")] = True,
    seconds: Annotated[float, typer.Option(help="Time to spend on measuring, in all.")] = _SECONDS,
    steps: Annotated[
        int | None,
        typer.Option(help="Steps of each schedule, however long they take.", show_default="as time allows"),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    transport: Annotated[str, typer.Option(help="auto, shm, gloo or nccl.")] = "auto",
    trace: Trace = None,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> int:
    """Time a step (forward and backward, no optimizer) of every pipeline schedule, beside torch's own and the ideal.

    torch's is torch.distributed.pipelining's schedule of the same kind, with the same layers on the same ranks; naive
    and zb-h2 it does not have. Where ranks share memory, it runs on gloo in the same processes.

    The ideal is what the simulator makes of the stages' computations if messages take no time. Those are measured in
    the same run: all ranks compute at the same time, and send nothing.

    All schedules take turns step by step, so that whatever else the machine does disturbs all of them alike. A step
    takes as long as its slowest rank; shown is the median with its quartiles. Bubbles, activations and memory come from
    other steps, which are not timed. Loss and gradients of every schedule, torch's too, are compared with those of a
    single process on the whole batch; if one is wrong, the exit code is 1.
    """
    names = tuple(PIPELINES) if schedules is None else parse_names(schedules, "--schedules")
    for name in names:
        require_known(name, tuple(PIPELINES), f"--schedules {schedules}: there is no schedule {name!r}")
    if microbatches < 1:
        raise ConfigError(f"--microbatches {microbatches}: must be at least 1; try 8")
    require_time(seconds, steps, usual=_SECONDS)
    count = choose_ranks(ranks, default=2)
    from microparallel.performance.pipeline_bench import Settings
    from microparallel.performance.pipeline_bench_models import Size, pipeline_subject, require_cuttable

    size = Size(model, depth, width, batch)
    pipeline_subject(size)  # says so if there is none
    require_cuttable(size, names, count, microbatches)
    settings = Settings(names, with_torch, size, microbatches, seconds, steps, trace)
    measurements: Measurements | None = measure_on_ranks(
        _measure, count, settings, transport=transport, device=device, quiet=quiet
    )
    if measurements is not None:  # torchrun's other ranks have nothing to say
        _show(measurements, json)
    return 0


def _measure(comms: Comms, settings: Settings, quiet: bool) -> Measurements:
    """What every rank does; the first one shows how it goes."""
    from microparallel.cli.bench_progress import progress_on_standard_error
    from microparallel.performance.pipeline_bench import bench_pipelines

    with progress_on_standard_error(comms.rank == 0 and not quiet, "steps") as progress:
        return bench_pipelines(comms, settings, progress)


def _show(measurements: Measurements, json: bool) -> None:
    from microparallel.cli import bench_pp_table
    from microparallel.performance.pipeline_bench_report import report_on

    if (wrong := measurements.wrong) is not None:
        raise MicroparallelError(f"{wrong.method} computed something wrong: {wrong.problem}")
    report = report_on(measurements)
    if json:
        print(json_format.dumps(bench_pp_table.as_json(report), indent=2))
    else:
        bench_pp_table.show(report)
