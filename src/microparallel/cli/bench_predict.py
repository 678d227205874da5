"""`microparallel bench predict`: how well does the simulator know how long a step takes?"""

from __future__ import annotations

import json as json_format
from typing import TYPE_CHECKING, Any

from microparallel.cli import options
from microparallel.cli.bench_world import choose_ranks, measure_on_ranks
from microparallel.cli.flags import takes
from microparallel.errors import ConfigError
from microparallel.performance.bench_settings import PREDICTED_REPLICAS, PredictSettings

if TYPE_CHECKING:
    from microparallel.performance.predict_bench import Predictions

EXAMPLES = options.examples(
    ("microparallel bench predict", "naive, ddp, gpipe and 1f1b on 2 ranks, in about a minute"),
    ("microparallel bench predict --methods ddp,1f1b,zb-h1 --ranks 4 --steps 30", "others, thoroughly"),
    ("microparallel bench predict --model gpt", "stages of attention"),
    ("microparallel bench predict --json > predict.json", "every number, for scripts"),
)


@takes(PredictSettings)
def predict(given: dict[str, Any], *, quiet: options.Quiet = False, json: options.Json = False) -> int:
    """Predict the time of a step from a short calibration, and measure it.

    The calibration times a rank's own work without messages (forward, each gradient's arrival in backward, the stages
    of a pipeline, the optimizer) and messages without work. The simulator then runs each method's program with these
    times. naive is data parallelism with an all-reduce for each gradient after backward; ddp has buckets; the others
    are pipeline schedules, whose steps have no optimizer here.

    What is calibrated takes turns with the steps that are measured, so that whatever else the machine does disturbs
    both alike. A step takes as long as its slowest rank; shown is the median with its quartiles.
    """
    settings = PredictSettings(**given)
    ranks = choose_ranks(settings)
    if ranks < 2:
        raise ConfigError(f"--ranks {ranks}: one rank sends nothing, so there is little to predict; try --ranks 2")
    from microparallel.performance.pipeline_bench_models import pipeline_subject, require_cuttable
    from microparallel.performance.predict_bench import bench_predictions

    if pipeline_subject(settings).batch < ranks:
        raise ConfigError(f"--batch {settings.batch}: {ranks} ranks need at least a sample each; try --batch {ranks}")
    pipelines = [name for name in settings.methods if name not in PREDICTED_REPLICAS]
    require_cuttable(settings, pipelines, ranks, settings.microbatches)
    found: Predictions | None = measure_on_ranks(bench_predictions, settings, quiet)
    if found is not None:  # torchrun's other ranks have nothing to say
        from microparallel.cli import bench_predict_table

        if json:
            print(json_format.dumps(bench_predict_table.as_json(found), indent=2))
        else:
            bench_predict_table.show(found)
    return 0
