"""`microparallel bench`: measure this machine. Each thing to be measured is a command of its own."""

from __future__ import annotations

import json as json_format
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from microparallel.cli import bench_dp, bench_pp, bench_predict, options
from microparallel.cli.bench_world import choose_ranks, measure_on_ranks
from microparallel.cli.flags import takes
from microparallel.cli.output import require_writable
from microparallel.errors import MicroparallelError
from microparallel.performance.bench_settings import AllReduceSettings
from microparallel.text import show_size

if TYPE_CHECKING:
    from microparallel.performance.all_reduce_bench import Measurements

ALL_REDUCE_EXAMPLES = options.examples(
    ("microparallel bench allreduce", "every algorithm, 4 KB to 100 MB, in about a minute"),
    ("microparallel bench allreduce --algorithms none", "shared memory beside gloo, and what memory allows"),
    ("microparallel bench allreduce --ranks 4 --plot allreduce.svg", "and as a picture"),
    ("microparallel bench allreduce --algorithms ring,tree --sizes 64KB,1MB --repeats 50", "some of it, thoroughly"),
    ("microparallel bench allreduce --json > allreduce.json", "every number, for scripts"),
    ("torchrun --nproc-per-node=4 -m microparallel bench allreduce", "between ranks that torchrun started"),
)

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
@takes(AllReduceSettings)
def all_reduce(
    given: dict[str, Any],
    *,
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
    settings = AllReduceSettings(**given)
    choose_ranks(settings)  # says so if they cannot be had
    from microparallel.performance.all_reduce_bench import bench_all_reduce
    from microparallel.performance.picture import require_drawable

    if plot is not None:
        require_drawable(plot, "--plot")
        require_writable(plot, "--plot")
    measurements = measure_on_ranks(bench_all_reduce, settings, quiet, unit="repeats")
    if measurements is not None:  # torchrun's other ranks have nothing to say
        _show(measurements, plot, json)
    return 0


def _show(measurements: Measurements, plot: Path | None, json: bool) -> None:
    from microparallel.cli import all_reduce_table
    from microparallel.performance.all_reduce_plot import plot_all_reduce
    from microparallel.performance.all_reduce_report import report_on
    from microparallel.performance.picture import write_picture

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
