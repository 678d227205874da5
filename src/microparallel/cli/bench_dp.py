"""`microparallel bench dp`: a training step of every kind of data parallelism, beside torch's own."""

from __future__ import annotations

import json as json_format
import math
from typing import TYPE_CHECKING, Annotated

import typer

from microparallel.cli import options
from microparallel.cli.bench_options import Trace, parse_names, require_known, require_time
from microparallel.cli.bench_world import choose_ranks, measure_on_ranks
from microparallel.errors import ConfigError, MicroparallelError

if TYPE_CHECKING:
    from microparallel.comms import Comms
    from microparallel.performance.data_parallel_bench import Measurements, Settings

EXAMPLES = options.examples(
    ("microparallel bench dp", "four models, every method, in about two minutes"),
    ("microparallel bench dp --models mlp-1024 --buckets 0.5,1,2,4,8,16,32", "which bucket size is best?"),
    ("microparallel bench dp --models gpt --methods naive,ddp --steps 30", "some of it, thoroughly"),
    ("microparallel bench dp --json > dp.json", "every number, for scripts"),
    ("torchrun --nproc-per-node=4 -m microparallel bench dp", "between ranks that torchrun started"),
)
_METHODS = ("naive", "hooks", "buckets", "ddp", "torch-ddp on shm")
_USUAL = "naive,hooks,buckets,ddp"


def data_parallel(
    ranks: Annotated[int | None, typer.Option(help="How many processes.", show_default="2")] = None,
    models: Annotated[
        str, typer.Option(metavar="NAMES", help="mlp-WIDTH (16 layers), gpt, or gpt-WIDTH.")
    ] = "mlp-1024,mlp-512,mlp-128,gpt",
    batch: Annotated[int | None, typer.Option(help="Samples a rank.", show_default="32; mlp-512 64, gpt 8")] = None,
    methods: Annotated[
        str, typer.Option(metavar="NAMES", help=f"Some of {', '.join(_METHODS)}; none and torch-ddp are always there.")
    ] = _USUAL,
    buckets: Annotated[
        str, typer.Option(metavar="SIZES", help="Bucket sizes to try for ddp, as its bucket_mb.")
    ] = "1,4,25,100",
    seconds: Annotated[float, typer.Option(help="Time to spend on measuring, in all.")] = 120.0,
    steps: Annotated[
        int | None,
        typer.Option(help="Steps of each method and model, however long they take.", show_default="as time allows"),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    transport: Annotated[str, typer.Option(help="auto, shm, gloo or nccl.")] = "auto",
    trace: Trace = None,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> int:
    """Time a training step (forward, backward, optimizer) of every kind of data parallelism, torch's own among them.

    The methods are: none (no synchronisation at all), naive (an all-reduce for each gradient after backward), hooks
    (each as soon as it is there), buckets (the course's), ddp (mp.DataParallel, with buckets of each of the sizes) and
    torch-ddp (torch's DistributedDataParallel with gradient_as_bucket_view=True, on gloo in the same processes where
    ranks share memory; "torch-ddp on shm" has our backend beneath).

    All methods take turns step by step, so that whatever else the machine does disturbs all of them alike. A step takes
    as long as its slowest rank; shown is the median with its quartiles. Each method trains a copy of its own from the
    same weights. At the end all that synchronise must have the same weights as torch-ddp but for rounding, and the
    same on all ranks bit for bit; if not, the exit code is 1.
    """
    chosen = parse_names(models, "--models")
    names = _methods(methods)
    sizes = tuple(_bucket(part, buckets) for part in parse_names(buckets, "--buckets"))
    _check(batch, seconds, steps)
    count = choose_ranks(ranks, default=2)
    from microparallel.performance.data_parallel_bench import Settings
    from microparallel.performance.data_parallel_bench_models import find_subject

    for name in chosen:
        find_subject(name, batch)  # says so if there is none
    if transport not in ("auto", "shm") and "torch-ddp on shm" in names:
        raise ConfigError(f"--transport {transport}: torch-ddp on shm needs shared memory; leave one of them out")
    settings = Settings(chosen, names, sizes, batch, seconds, steps, trace)
    measurements: Measurements | None = measure_on_ranks(
        _measure, count, settings, transport=transport, device=device, quiet=quiet
    )
    if measurements is not None:  # torchrun's other ranks have nothing to say
        _show(measurements, json)
    return 0


def _methods(text: str) -> tuple[str, ...]:
    always = ("none", "torch-ddp")
    names = parse_names(text, "--methods")
    for name in names:
        if name not in always:
            require_known(name, _METHODS, f"--methods {text}: there is no method {name!r}")
    return tuple(name for name in names if name not in always)


def _bucket(part: str, text: str) -> float:
    try:
        size = float(part)
    except ValueError:
        size = math.nan
    if not 0 < size < math.inf:
        raise ConfigError(f"--buckets {text}: {part!r} is no number of megabytes above 0; write them as in 1,4,25")
    return size


def _check(batch: int | None, seconds: float, steps: int | None) -> None:
    if batch is not None and batch < 1:
        raise ConfigError(f"--batch {batch}: must be at least 1; try 32")
    require_time(seconds, steps, usual=120)


def _measure(comms: Comms, settings: Settings, quiet: bool) -> Measurements:
    """What every rank does; the first one shows how it goes."""
    from microparallel.cli.bench_progress import progress_on_standard_error
    from microparallel.performance.data_parallel_bench import bench_data_parallel

    with progress_on_standard_error(comms.rank == 0 and not quiet, "steps") as progress:
        return bench_data_parallel(comms, settings, progress)


def _show(measurements: Measurements, json: bool) -> None:
    from microparallel.cli import bench_dp_table
    from microparallel.performance.data_parallel_bench_report import report_on

    if (wrong := measurements.wrong) is not None:
        raise MicroparallelError(f"{wrong.method} trained {wrong.subject} wrongly: {wrong.problem}")
    report = report_on(measurements)
    if json:
        print(json_format.dumps(bench_dp_table.as_json(report), indent=2))
    else:
        bench_dp_table.show(report)
