"""`microparallel bench dp`: a training step of every kind of data parallelism, beside torch's own."""

from __future__ import annotations

import json as json_format
from typing import TYPE_CHECKING, Any

from microparallel.cli import options
from microparallel.cli.bench_world import choose_ranks, measure_on_ranks
from microparallel.cli.flags import takes
from microparallel.errors import ConfigError, MicroparallelError
from microparallel.performance.bench_settings import DataParallelSettings

if TYPE_CHECKING:
    from microparallel.performance.data_parallel_bench import Measurements

EXAMPLES = options.examples(
    ("microparallel bench dp", "four models, every method, in about two minutes"),
    ("microparallel bench dp --models mlp-1024 --buckets 0.5,1,2,4,8,16,32", "which bucket size is best?"),
    ("microparallel bench dp --models gpt --methods naive,ddp --steps 30", "some of it, thoroughly"),
    ("microparallel bench dp --json > dp.json", "every number, for scripts"),
    ("torchrun --nproc-per-node=4 -m microparallel bench dp", "between ranks that torchrun started"),
)


@takes(DataParallelSettings)
def data_parallel(given: dict[str, Any], *, quiet: options.Quiet = False, json: options.Json = False) -> int:
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
    settings = DataParallelSettings(**given)
    choose_ranks(settings)  # says so if they cannot be had
    from microparallel.performance.data_parallel_bench import bench_data_parallel
    from microparallel.performance.data_parallel_bench_models import find_subject

    for name in settings.models:
        find_subject(name, settings.batch)  # says so if there is none
    if settings.transport not in ("auto", "shm") and "torch-ddp on shm" in settings.methods:
        raise ConfigError(
            f"--transport {settings.transport}: torch-ddp on shm needs shared memory; leave one of them out"
        )
    measurements: Measurements | None = measure_on_ranks(bench_data_parallel, settings, quiet)
    if measurements is not None:  # torchrun's other ranks have nothing to say
        _show(measurements, json)
    return 0


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
