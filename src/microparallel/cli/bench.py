"""`microparallel bench`: measure this machine, side by side with torch. Each thing to be measured is a command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from microparallel.bench.ranks import choose_ranks, run_benchmark
from microparallel.bench.settings import (
    PREDICTED_REPLICAS,
    TORCH_DDP_ON_OURS,
    AllReduceSettings,
    CompressSettings,
    DataParallelSettings,
    PipelineSettings,
    PredictSettings,
    ShardSettings,
    with_usual,
)
from microparallel.cli import flags
from microparallel.cli.flags import require_writable, takes
from microparallel.errors import ConfigError

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Measure this machine, side by side with torch.",
    epilog=flags.examples(
        ("microparallel bench allreduce", "every all-reduce algorithm; see its own `--help`"),
        ("microparallel bench dp", "every kind of data parallelism"),
        ("microparallel bench shard", "optimizer, gradients and parameters in parts: time, memory, bytes sent"),
        ("microparallel bench compress", "compressed gradients over fast and slow links: bytes, time, loss"),
        ("microparallel bench pp", "every pipeline schedule"),
        ("microparallel bench predict", "predicted step times beside measured ones"),
    ),
)

# ── bench allreduce ─────────────────────────────────────────────────────────────────────────────────────────────────

ALL_REDUCE_EXAMPLES = flags.examples(
    ("microparallel bench allreduce", "every algorithm, 4 KB to 100 MB, in about a minute"),
    ("microparallel bench allreduce --algorithms none", "shared memory beside gloo, and what memory allows"),
    ("microparallel bench allreduce --device cuda --ranks 2", "on one GPU, beside gloo and NCCL"),
    ("microparallel bench allreduce --ranks 4 --plot allreduce.svg", "and as a picture"),
    ("microparallel bench allreduce --algorithms ring,tree --sizes 64KB,1MB --repeats 50", "some of it, thoroughly"),
    ("microparallel bench allreduce --json > allreduce.json", "every number, for scripts"),
    ("torchrun --nproc-per-node=4 -m microparallel bench allreduce", "between ranks that torchrun started"),
)


@app.command(name="allreduce", epilog=ALL_REDUCE_EXAMPLES)
@takes(AllReduceSettings)
def all_reduce(
    given: dict[str, Any],
    *,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw time and bandwidth over size, as .svg or .png.")
    ] = None,
    quiet: flags.Quiet = False,
    json: flags.Json = False,
) -> int:
    """Time every all-reduce algorithm and torch's own, and predict the times from a fitted latency and bandwidth.

    Where ranks share memory, the algorithms go through it, and torch's own runs on gloo in the same processes. Beside
    them stand comms.all_reduce by itself, of an ordinary tensor and of one in shared memory, and
    torch.distributed.all_reduce on our backend, each with the share of the memory's bandwidth that it reaches. That
    bound, which is the time to add and copy the same bytes, is measured in the same run.

    Where ranks share a GPU (--device cuda), torch's own runs on gloo and on NCCL in the same processes: NCCL takes two
    ranks on one GPU if each says that it is on another host (NCCL_HOSTID). torch's on gloo and ours run twice there:
    how far the same method is from itself says what chance does to a ratio.

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
    settings = AllReduceSettings(**with_usual(AllReduceSettings, given))
    choose_ranks(settings)  # refuses --ranks that cannot be had
    from microparallel.bench.all_reduce import bench_all_reduce
    from microparallel.bench.all_reduce_report import plot_all_reduce, report_on
    from microparallel.bench.chart import require_drawable, write_picture

    if plot is not None:
        require_drawable(plot, "--plot")
        require_writable(plot, "--plot")
    report: Any = run_benchmark(settings, bench_all_reduce, report_on, quiet=quiet, json=json, unit="repeats")
    if plot is not None and report is not None:
        write_picture(plot_all_reduce(report), plot)
        print(f"drawn in {plot}", file=sys.stderr)
    return 0


# ── bench dp ────────────────────────────────────────────────────────────────────────────────────────────────────────

DATA_PARALLEL_EXAMPLES = flags.examples(
    ("microparallel bench dp", "four models, every method, in about two minutes"),
    ("microparallel bench dp --models mlp-1024 --buckets 0.5,1,2,4,8,16,32", "which bucket size is best?"),
    ("microparallel bench dp --models gpt --methods naive,ddp --steps 30", "some of it, thoroughly"),
    ("microparallel bench dp --device cuda --ranks 2", "a GPT of 85 M parameters in bfloat16, ranks on one GPU"),
    ("microparallel bench dp --json > dp.json", "every number, for scripts"),
    ("torchrun --nproc-per-node=4 -m microparallel bench dp", "between ranks that torchrun started"),
)


@app.command(name="dp", epilog=DATA_PARALLEL_EXAMPLES)
@takes(DataParallelSettings)
def data_parallel(given: dict[str, Any], *, quiet: flags.Quiet = False, json: flags.Json = False) -> int:
    """Time a training step (forward, backward, optimizer) of every kind of data parallelism, torch's own among them.

    The methods are: none (no synchronisation at all), naive (an all-reduce for each gradient after backward), hooks
    (each as soon as it is there), buckets (the course's), ddp (mp.DataParallel with its default,
    gradient_as_bucket_view=False, and buckets of each of the sizes) and torch-ddp (torch's DistributedDataParallel with
    gradient_as_bucket_view=True, its faster way, on gloo in the same processes where ranks share memory; "torch-ddp on
    shm" has our backend beneath).

    With --device cuda the model is a GPT of 85 million parameters in bfloat16, unless others are named. Where ranks
    share the GPU, ddp and torch-ddp run twice, for what chance does; memory and how busy the GPU is come from other
    steps, in which each method is alone.

    All methods take turns step by step, so that whatever else the machine does disturbs all of them alike. A step takes
    as long as its slowest rank; shown is the median with its quartiles. Each method trains a copy of its own from the
    same weights. At the end all that synchronise must have the same weights as torch-ddp but for rounding, and the
    same on all ranks bit for bit; if not, the exit code is 1.
    """
    settings = DataParallelSettings(**with_usual(DataParallelSettings, given))
    choose_ranks(settings)  # refuses --ranks that cannot be had
    for name, needed in zip(TORCH_DDP_ON_OURS, ("shm", "cuda"), strict=True):
        if settings.transport not in ("auto", needed) and name in settings.methods:
            what = "shared memory" if needed == "shm" else "a GPU that ranks share"
            raise ConfigError(f"--transport {settings.transport}: {name} needs {what}; leave one of them out")
    from microparallel.bench.data_parallel import bench_data_parallel
    from microparallel.bench.data_parallel_report import report_on
    from microparallel.bench.subjects import find_subject

    for name in settings.models:
        find_subject(name, settings.batch)  # refuses a name that no model has
    run_benchmark(settings, bench_data_parallel, report_on, quiet=quiet, json=json)
    return 0


# ── bench shard ─────────────────────────────────────────────────────────────────────────────────────────────────────

SHARD_EXAMPLES = flags.examples(
    ("microparallel bench shard", "two models beside torch's ZeroRedundancyOptimizer and FSDP2, in three minutes"),
    ("microparallel bench shard --quick", "does it run? small models, three steps of each"),
    ("microparallel bench shard --models gpt-256 --accumulate 4 --bucket-cap-mb 4", "micro-batches, small buckets"),
    ("microparallel bench shard --device cuda --ranks 2", "a GPT of 85 M parameters in bfloat16, ranks on one GPU"),
    ("microparallel bench shard --json > shard.json", "every number, for scripts"),
    ("torchrun --nproc-per-node=4 -m microparallel bench shard", "between ranks that torchrun started"),
)
_QUICK_SHARD: dict[str, Any] = {"models": ("mlp-64", "gpt-32"), "steps": 3}


@app.command(name="shard", epilog=SHARD_EXAMPLES)
@takes(ShardSettings)
def shard(
    given: dict[str, Any],
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Small models, and three steps of each.")] = False,
    quiet: flags.Quiet = False,
    json: flags.Json = False,
) -> int:
    """Time a training step whose ranks keep parts (ZeRO), beside torch's, and count the memory and the bytes sent.

    The methods are: none (each rank trains alone, so no method can be faster), ddp (mp.DataParallel, which keeps
    everything on every rank), shard optimizer and shard gradients (mp.DataParallel(shard=…) with mp.ShardedOptimizer),
    shard parameters (mp.FullyShardedDataParallel; "kept" with reshard_after_forward=False), torch-zero (torch's
    DistributedDataParallel with ZeroRedundancyOptimizer, both with bucket views) and torch-fsdp (torch's fully_shard,
    which is FSDP2, with the units of shard parameters). Where ranks share memory, torch's own run on gloo in the same
    processes; "on shm" (on a GPU: "on cuda") they have our backend beneath. The optimizer is AdamW. With --device cuda
    the model is a GPT of 85 million parameters in bfloat16, unless others are named.

    All methods take turns step by step, so that whatever else the machine does disturbs all of them alike. A step takes
    as long as its slowest rank; shown is the median with its quartiles. none, torch-zero and torch-fsdp run twice: how
    far apart the same method is from itself says what chance does to a ratio.

    Memory, bytes and the parts of a step come from other steps, which are not timed: memory is counted from the tensors
    of a rank whenever something changes, without what torch's own collectives copy to and from; bytes sent and parts
    are those of a recorded step. Memory and bytes stand beside their formula. After three steps all methods that
    synchronise must have the weights of torch-zero but for rounding, and at the end the same on all ranks bit for bit;
    if not, the exit code is 1.
    """
    settings = ShardSettings(**(_QUICK_SHARD | given if quick else with_usual(ShardSettings, given)))
    ranks = choose_ranks(settings)
    if ranks < 2:
        raise ConfigError(f"--ranks {ranks}: one rank has no other rank to share with; try --ranks 2")
    from microparallel.bench.shard import bench_shard
    from microparallel.bench.shard_report import report_on
    from microparallel.bench.subjects import find_subject

    for name in settings.models:
        batch = find_subject(name, settings.batch).batch  # refuses a name that no model has
        if settings.accumulate > batch:
            raise ConfigError(
                f"--accumulate {settings.accumulate}: {name} has {batch} samples a rank; try --accumulate {batch}, or "
                f"--batch {settings.accumulate}"
            )
    run_benchmark(settings, bench_shard, report_on, quiet=quiet, json=json)
    return 0


# ── bench compress ──────────────────────────────────────────────────────────────────────────────────────────────────

COMPRESS_EXAMPLES = flags.examples(
    ("microparallel bench compress", "every method, from shared memory to 100 Mbit/s, in about five minutes"),
    ("microparallel bench compress --quick", "does it run? a small model, three steps of each"),
    ("microparallel bench compress --links 100mbit --methods sign,topk:0.01", "does it pay over a slow link?"),
    ("microparallel bench compress --links 5ms+50Mbit,1gbit --models gpt", "another link, another model"),
    ("microparallel bench compress --methods topk:0.001,topk:0.1+int8 --links transport --train-steps 500", "the loss"),
    ("microparallel bench compress --json > compress.json", "every number, for scripts"),
    ("torchrun --nproc-per-node=4 -m microparallel bench compress --links transport", "between ranks of torchrun"),
)
_QUICK_COMPRESS: dict[str, Any] = {
    "models": ("mlp-64",),
    "steps": 3,
    "train_steps": 10,
    "links": ("transport", "gloo", "1gbit"),
}


@app.command(name="compress", epilog=COMPRESS_EXAMPLES)
@takes(CompressSettings)
def compress(
    given: dict[str, Any],
    *,
    quick: Annotated[bool, typer.Option("--quick", help="A small model, and three steps of each.")] = False,
    quiet: flags.Quiet = False,
    json: flags.Json = False,
) -> int:
    """Time a training step with compressed gradients over fast and slow links; see what it sends and what it learns.

    The methods are those of mp.compression, with mp.DataParallel(compress=…) and AdamW; none sends float32 gradients as
    they are. The links are the transport itself, gloo beside it in the same processes, and injected ones: every message
    of every collective is held up for a latency and a time for each byte, as the collective's program sends them.
    100mbit has 1 ms of latency, 1gbit 0.2 ms, 10gbit 0.05 ms.

    All methods take turns step by step, so that whatever else the machine does disturbs all of them alike. A step takes
    as long as its slowest rank; shown is the median with its quartiles. none runs twice: how far apart it is from
    itself says what chance does to a ratio.

    The prediction records steps over the same links without delay, with all that ranks compute, encode and decode, and
    adds what the simulator makes of each sum's program on the link.

    The loss is taken on samples that were not trained on, after as many steps of each method, with the same samples and
    seeds. It does not depend on the link. Bytes are counted message by message. After training, all ranks must have the
    same weights bit for bit; if not, the exit code is 1.
    """
    settings = CompressSettings(**(_QUICK_COMPRESS if quick else {}) | given)
    ranks = choose_ranks(settings)
    if ranks < 2:
        raise ConfigError(f"--ranks {ranks}: one rank sends no gradients; try --ranks 2")
    from microparallel.bench.compress import bench_compress, compressor_of
    from microparallel.bench.compress_report import report_on
    from microparallel.bench.subjects import find_subject

    for name in settings.models:
        find_subject(name, settings.batch)  # refuses a name that no model has
    for name in settings.methods:
        compressor_of(name)  # refuses a name that no method has
    run_benchmark(settings, bench_compress, report_on, quiet=quiet, json=json)
    return 0


# ── bench pp ────────────────────────────────────────────────────────────────────────────────────────────────────────

PIPELINE_EXAMPLES = flags.examples(
    ("microparallel bench pp", "every schedule beside torch's, in under two minutes"),
    ("microparallel bench pp --schedules gpipe,1f1b,zb-h1 --steps 50", "some of it, thoroughly"),
    ("microparallel bench pp --ranks 4 --microbatches 32 --no-torch", "what 1f1b saves of gpipe's memory"),
    ("microparallel bench pp --model gpt", "stages of attention"),
    ("microparallel bench pp --device cuda --ranks 4", "a GPT of 85 M parameters in bfloat16, stages on one GPU"),
    ("microparallel bench pp --json > pp.json", "every number, for scripts"),
    ("torchrun --nproc-per-node=4 -m microparallel bench pp", "between ranks that torchrun started"),
)


@app.command(name="pp", epilog=PIPELINE_EXAMPLES)
@takes(PipelineSettings)
def pipelines(given: dict[str, Any], *, quiet: flags.Quiet = False, json: flags.Json = False) -> int:
    """Time a step (forward and backward, no optimizer) of every pipeline schedule, beside torch's own and the ideal.

    torch's is torch.distributed.pipelining's schedule of the same kind, with the same layers on the same ranks; naive
    and zb-h2 it does not have. Where ranks share memory, it runs on gloo in the same processes; on a GPU that ranks
    share, its messages go through pinned main memory. With --device cuda the model is a GPT of 85 million parameters
    in bfloat16, unless another is named.

    The ideal is what the simulator makes of the stages' computations if messages take no time. Those are measured in
    the same run: all ranks compute at the same time, and send nothing.

    All schedules take turns step by step, so that whatever else the machine does disturbs all of them alike. A step
    takes as long as its slowest rank; shown is the median with its quartiles. Bubbles, activations and memory come from
    other steps, which are not timed. Loss and gradients of every schedule, torch's too, are compared with those of a
    single process on the whole batch; if one is wrong, the exit code is 1.
    """
    settings = PipelineSettings(**with_usual(PipelineSettings, given))
    ranks = choose_ranks(settings)
    from microparallel.bench.pipeline import bench_pipelines
    from microparallel.bench.pipeline_report import report_on
    from microparallel.bench.subjects import pipeline_subject, require_cuttable

    pipeline_subject(settings)  # refuses a size that no model has
    require_cuttable(settings, settings.schedules, ranks, settings.microbatches)
    run_benchmark(settings, bench_pipelines, report_on, quiet=quiet, json=json)
    return 0


# ── bench predict ───────────────────────────────────────────────────────────────────────────────────────────────────

PREDICT_EXAMPLES = flags.examples(
    ("microparallel bench predict", "naive, ddp, gpipe and 1f1b on 2 ranks, in about a minute"),
    ("microparallel bench predict --methods ddp,1f1b,zb-h1 --ranks 4 --steps 30", "others, thoroughly"),
    ("microparallel bench predict --model gpt", "stages of attention"),
    ("microparallel bench predict --json > predict.json", "every number, for scripts"),
)


@app.command(name="predict", epilog=PREDICT_EXAMPLES)
@takes(PredictSettings)
def predict(given: dict[str, Any], *, quiet: flags.Quiet = False, json: flags.Json = False) -> int:
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
    from microparallel.bench.predict import bench_predictions
    from microparallel.bench.predict_report import report_on
    from microparallel.bench.subjects import pipeline_subject, require_cuttable

    if pipeline_subject(settings).batch < ranks:
        raise ConfigError(f"--batch {settings.batch}: {ranks} ranks need at least a sample each; try --batch {ranks}")
    schedules = [name for name in settings.methods if name not in PREDICTED_REPLICAS]
    require_cuttable(settings, schedules, ranks, settings.microbatches)
    run_benchmark(settings, bench_predictions, report_on, quiet=quiet, json=json)
    return 0
