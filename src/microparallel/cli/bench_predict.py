"""`microparallel bench predict`: how well does the simulator know how long a step takes?"""

from __future__ import annotations

import json as json_format
import math
from typing import TYPE_CHECKING, Annotated

import typer

from microparallel.cli import options
from microparallel.cli.bench_options import parse_names, require_known, require_time
from microparallel.cli.bench_world import choose_ranks, measure_on_ranks
from microparallel.errors import ConfigError
from microparallel.schedules import PIPELINES

if TYPE_CHECKING:
    from microparallel.comms import Comms
    from microparallel.performance.predict_bench import Predictions, Settings

EXAMPLES = options.examples(
    ("microparallel bench predict", "naive, ddp, gpipe and 1f1b on 2 ranks, in about a minute"),
    ("microparallel bench predict --methods ddp,1f1b,zb-h1 --ranks 4 --steps 30", "others, thoroughly"),
    ("microparallel bench predict --model gpt", "stages of attention"),
    ("microparallel bench predict --json > predict.json", "every number, for scripts"),
)
_METHODS = ("naive", "ddp", *(name for name in PIPELINES if name != "naive"))
_SECONDS = 45.0


def predict(
    ranks: Annotated[int | None, typer.Option(help="How many processes.", show_default="2")] = None,
    methods: Annotated[
        str, typer.Option(metavar="NAMES", help=f"Some of {', '.join(_METHODS)}.")
    ] = "naive,ddp,gpipe,1f1b",
    model: Annotated[str, typer.Option(help="mlp or gpt.")] = "mlp",
    depth: Annotated[
        int | None, typer.Option(help="Layers of mlp, blocks of gpt.", show_default="mlp 16, gpt 8")
    ] = None,
    width: Annotated[int | None, typer.Option(help="Width of a layer.", show_default="mlp 512, gpt 128")] = None,
    batch: Annotated[
        int | None, typer.Option(help="Samples of all ranks together.", show_default="mlp 256, gpt 16")
    ] = None,
    microbatches: Annotated[int, typer.Option(help="Into how many micro-batches a pipeline cuts the batch.")] = 8,
    bucket_mb: Annotated[float, typer.Option(help="Size of ddp's buckets, in megabytes.")] = 4.0,
    seconds: Annotated[float, typer.Option(help="Time to spend on measuring, in all.")] = _SECONDS,
    steps: Annotated[
        int | None, typer.Option(help="Steps of each method, however long they take.", show_default="as time allows")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    transport: Annotated[str, typer.Option(help="auto, shm, gloo or nccl.")] = "auto",
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> int:
    """Predict the time of a step from a short calibration, and measure it.

    The calibration times a rank's own work without messages (forward, each gradient's arrival in backward, the stages
    of a pipeline, the optimizer) and messages without work. The simulator then runs each method's program with these
    times. naive is data parallelism with an all-reduce for each gradient after backward; ddp has buckets; the others
    are pipeline schedules, whose steps have no optimizer here.

    What is calibrated takes turns with the steps that are measured, so that whatever else the machine does disturbs
    both alike. A step takes as long as its slowest rank; shown is the median with its quartiles.
    """
    names = parse_names(methods, "--methods")
    for name in names:
        require_known(name, _METHODS, f"--methods {methods}: there is no method {name!r}")
    if microbatches < 1:
        raise ConfigError(f"--microbatches {microbatches}: must be at least 1; try 8")
    if not 0 < bucket_mb < math.inf:
        raise ConfigError(f"--bucket-mb {bucket_mb}: must be a number of megabytes above 0; try 4")
    require_time(seconds, steps, usual=_SECONDS)
    count = choose_ranks(ranks, default=2)
    if count < 2:
        raise ConfigError(f"--ranks {count}: one rank sends nothing, so there is little to predict; try --ranks 2")
    from microparallel.performance.pipeline_bench_models import Size, pipeline_subject, require_cuttable
    from microparallel.performance.predict_bench import Settings

    size = Size(model, depth, width, batch)
    if pipeline_subject(size).batch < count:
        raise ConfigError(f"--batch {batch}: {count} ranks need at least a sample each; try --batch {count}")
    require_cuttable(size, [name for name in names if name not in ("naive", "ddp")], count, microbatches)
    settings = Settings(names, size, microbatches, bucket_mb, seconds, steps)
    found: Predictions | None = measure_on_ranks(
        _measure, count, settings, transport=transport, device=device, quiet=quiet
    )
    if found is not None:  # torchrun's other ranks have nothing to say
        from microparallel.cli import bench_predict_table

        if json:
            print(json_format.dumps(bench_predict_table.as_json(found), indent=2))
        else:
            bench_predict_table.show(found)
    return 0


def _measure(comms: Comms, settings: Settings, quiet: bool) -> Predictions:
    """What every rank does; the first one shows how it goes."""
    from microparallel.cli.bench_progress import progress_on_standard_error
    from microparallel.performance.predict_bench import bench_predictions

    with progress_on_standard_error(comms.rank == 0 and not quiet, "steps") as progress:
        return bench_predictions(comms, settings, progress)
