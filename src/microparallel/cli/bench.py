"""`microparallel bench`: measure this machine. Each thing to be measured is a command of its own."""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from microparallel.cli import bench_dp, bench_pp, bench_predict, options
from microparallel.cli.bench_options import require_known
from microparallel.cli.bench_world import choose_ranks, measure_on_ranks
from microparallel.cli.output import require_writable
from microparallel.collectives import ALL_REDUCES
from microparallel.errors import ConfigError, MicroparallelError
from microparallel.text import parse_sizes
from microparallel.topology import available_cores

if TYPE_CHECKING:
    from microparallel.comms import Comms
    from microparallel.performance.all_reduce_bench import Measurements, Settings

ALL_REDUCE_EXAMPLES = options.examples(
    ("microparallel bench allreduce", "every algorithm, 4 KB to 100 MB, in about a minute"),
    ("microparallel bench allreduce --algorithms none", "shared memory beside gloo, and what memory allows"),
    ("microparallel bench allreduce --ranks 4 --plot allreduce.svg", "and as a picture"),
    ("microparallel bench allreduce --algorithms ring,tree --sizes 64KB,1MB --repeats 50", "some of it, thoroughly"),
    ("microparallel bench allreduce --json > allreduce.json", "every number, for scripts"),
    ("torchrun --nproc-per-node=4 -m microparallel bench allreduce", "between ranks that torchrun started"),
)
_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Measure this machine, side by side with torch.",
    epilog=options.examples(
        ("microparallel bench allreduce", "every all-reduce algorithm; see its own `--help`"),
        ("microparallel bench dp", "every kind of data parallelism"),
        ("microparallel bench pp", "every pipeline schedule"),
        ("microparallel bench predict", "predicted step times beside measured ones"),
    ),
)


app.command(name="dp", epilog=bench_dp.EXAMPLES)(bench_dp.data_parallel)
app.command(name="pp", epilog=bench_pp.EXAMPLES)(bench_pp.pipelines)
app.command(name="predict", epilog=bench_predict.EXAMPLES)(bench_predict.predict)


@app.command(name="allreduce", epilog=ALL_REDUCE_EXAMPLES)
def all_reduce(
    ranks: Annotated[
        int | None, typer.Option(help="How many processes.", show_default="one a core, from 2 to 4")
    ] = None,
    sizes: Annotated[
        str, typer.Option(metavar="SIZES", help="Sizes of the tensor: KB is 1000 bytes, KiB 1024.")
    ] = "4KB,64KB,1MB,4MB,25MB,100MB",
    algorithms: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help=f"Some of {', '.join(ALL_REDUCES)}; or none.", show_default="all"),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time to spend on measuring, in all.")] = 60.0,
    repeats: Annotated[
        int | None, typer.Option(help="Calls at each size, however long they take.", show_default="as time allows")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(_BYTES)}.")] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    transport: Annotated[str, typer.Option(help="auto, shm, gloo or nccl.")] = "auto",
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw time and bandwidth over size, as .svg or .png.")
    ] = None,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> int:
    """Time every all-reduce algorithm and torch's own, and predict the times from a fitted latency and bandwidth.

    Where ranks share memory, the algorithms go through it, and torch's own runs on gloo in the same processes. Beside
    them stand comms.all_reduce by itself, of an ordinary tensor and of one in shared memory, and
    torch.distributed.all_reduce on our backend, each with the share of the memory's bandwidth that it reaches. That
    bound, which is the time to add and copy the same bytes, is measured in the same run.

    All methods take turns within each size, so that whatever else the machine does disturbs all of them alike. A call
    takes as long as its slowest rank; shown is the median with its quartiles. Up to 64 KiB, ten calls in a row count as
    one, with their mean. Every result is compared with the exact sum, and a wrong one makes the exit code 1. What is
    left out for lack of memory, or called only a few times for lack of time, is listed.

    The prediction knows two costs of a message, its latency and its bytes, and one of adding. They are fitted to the
    algorithms' measured times, and then the simulator runs each algorithm with them. In its world each rank has a core
    of its own, sends and receives at once at full speed, and takes one message after another. Where ranks share cores,
    where moving bytes is itself work for a core, or where several messages arrive at once, it is off, and shows by how
    much.
    """
    chosen_algorithms = _algorithms(algorithms)
    chosen_ranks = choose_ranks(ranks, default=max(2, min(4, available_cores())))
    chosen_sizes = parse_sizes(sizes, "--sizes")
    _check(chosen_sizes, dtype, seconds, repeats)
    from microparallel.performance.all_reduce_bench import Settings
    from microparallel.performance.picture import require_drawable

    if plot is not None:
        require_drawable(plot, "--plot")
        require_writable(plot, "--plot")
    settings = Settings(chosen_algorithms, chosen_sizes, dtype, seconds, repeats)
    measurements = measure_on_ranks(_measure, chosen_ranks, settings, transport=transport, device=device, quiet=quiet)
    if measurements is not None:  # torchrun's other ranks have nothing to say
        _show(measurements, plot, json)
    return 0


def _algorithms(text: str | None) -> tuple[str, ...]:
    if text is None:
        return tuple(ALL_REDUCES)
    if text == "none":
        return ()
    names = [name.strip() for name in text.split(",")]
    for name in names:
        require_known(name, (*ALL_REDUCES, "torch"), f"--algorithms {text}: there is no all-reduce {name!r}")
    return tuple(dict.fromkeys(name for name in names if name != "torch"))  # torch's own is always measured


def _check(sizes: Iterable[int], dtype: str, seconds: float, repeats: int | None) -> None:
    require_known(dtype, tuple(_BYTES), f"--dtype {dtype}: there is no such dtype here")
    for size in sizes:
        if size % _BYTES[dtype]:
            nearest = max(1, round(size / _BYTES[dtype])) * _BYTES[dtype]
            raise ConfigError(f"--sizes: {size} bytes are no whole number of {dtype}s; try {nearest}")
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"--seconds {seconds}: must be above 0; try 60")
    if repeats is not None and repeats < 1:
        raise ConfigError(f"--repeats {repeats}: must be at least 1; try 10, or leave it out")


def _measure(comms: Comms, settings: Settings, quiet: bool) -> Measurements:
    """What every rank does; the first one shows how it goes."""
    from microparallel.cli.bench_progress import progress_on_standard_error
    from microparallel.performance.all_reduce_bench import bench_all_reduce
    from microparallel.text import show_size

    with progress_on_standard_error(comms.rank == 0 and not quiet, "repeats") as progress:
        return bench_all_reduce(comms, settings, lambda done, size, times: progress(done, show_size(size), times))


def _show(measurements: Measurements, plot: Path | None, json: bool) -> None:
    from microparallel.cli import all_reduce_table
    from microparallel.performance.all_reduce_plot import plot_all_reduce
    from microparallel.performance.all_reduce_report import report_on
    from microparallel.performance.picture import write_picture
    from microparallel.text import show_size

    if (wrong := measurements.wrong) is not None:
        raise MicroparallelError(f"{wrong.method} gave a wrong sum on rank {wrong.rank}, at {show_size(wrong.size)}")
    report = report_on(measurements)
    if plot is not None:
        write_picture(plot_all_reduce(report), plot)
    if json:
        print(json_format.dumps(all_reduce_table.as_json(report), indent=2))
    else:
        all_reduce_table.show(report)
    if plot is not None:
        print(f"drawn in {plot}", file=sys.stderr)
