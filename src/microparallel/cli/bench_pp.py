"""`microparallel bench pp`: a training step of every pipeline schedule, beside torch's own and the ideal."""

from __future__ import annotations

import json as json_format
from typing import TYPE_CHECKING, Any

from microparallel.cli import options
from microparallel.cli.bench_world import choose_ranks, measure_on_ranks
from microparallel.cli.flags import takes
from microparallel.errors import MicroparallelError
from microparallel.performance.bench_settings import PipelineSettings

if TYPE_CHECKING:
    from microparallel.performance.pipeline_bench import Measurements

EXAMPLES = options.examples(
    ("microparallel bench pp", "every schedule beside torch's, in under two minutes"),
    ("microparallel bench pp --schedules gpipe,1f1b,zb-h1 --steps 50", "some of it, thoroughly"),
    ("microparallel bench pp --ranks 4 --microbatches 32 --no-torch", "what 1f1b saves of gpipe's memory"),
    ("microparallel bench pp --model gpt", "stages of attention"),
    ("microparallel bench pp --json > pp.json", "every number, for scripts"),
    ("torchrun --nproc-per-node=4 -m microparallel bench pp", "between ranks that torchrun started"),
)


@takes(PipelineSettings)
def pipelines(given: dict[str, Any], *, quiet: options.Quiet = False, json: options.Json = False) -> int:
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
    settings = PipelineSettings(**given)
    ranks = choose_ranks(settings)
    from microparallel.performance.pipeline_bench import bench_pipelines
    from microparallel.performance.pipeline_bench_models import pipeline_subject, require_cuttable

    pipeline_subject(settings)  # says so if there is none
    require_cuttable(settings, settings.schedules, ranks, settings.microbatches)
    measurements: Measurements | None = measure_on_ranks(bench_pipelines, settings, quiet)
    if measurements is not None:  # torchrun's other ranks have nothing to say
        _show(measurements, json)
    return 0


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
