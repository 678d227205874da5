"""Do the same job with several strategies: do they learn the same thing as one process?"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from microparallel.comms import Comms
from microparallel.comms.record import Recorder
from microparallel.course.replicas import Replicas
from microparallel.course.shortcuts import accumulate
from microparallel.errors import UsageError
from microparallel.models.loss import LossFunction
from microparallel.schedules import PIPELINES
from microparallel.text import count
from microparallel.trace import Trace
from microparallel.train.batch import Batch
from microparallel.train.build import build
from microparallel.train.config import OF_PARAMETERS, SHARDED, TrainConfig
from microparallel.train.optimizer import build_optimizer
from microparallel.train.strategies import Step
from microparallel.train.training import Training
from microparallel.world import Pool, connect
from microparallel.world.given_ranks import GivenRanks

# How far apart two ways of adding the same numbers may end, relative to the largest: rounding, and nothing else.
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
_REFERENCE = "single"  # the row that all others are compared with
_PIPELINE = "pp "  # begins the name of a row with a schedule
_SHARD = "shard "  # begins the name of a row in which ranks keep their parts
_RECORDED = 5  # steps

Progress = Callable[[str], None]
Keep = Callable[[str, Trace], None]


@dataclass(frozen=True)
class Outcome:
    """What one strategy made of the job."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    seconds_a_step: float
    trace: Trace | None = None  # of the last steps, if that was wanted


@dataclass(frozen=True)
class Comparison:
    """One strategy beside the single process."""

    strategy: str
    ranks: int  # or replicas in one process
    final_loss: float
    loss_difference: float  # the largest over all steps, relative to the single process's loss
    weight_difference: float  # the largest over all weights, relative to the largest weight of its tensor
    seconds_a_step: float
    agrees: bool
    losses: list[float]  # of every step


def compare(
    config: TrainConfig,
    strategies: Sequence[str],
    pool: Pool | GivenRanks,
    progress: Progress = lambda _: None,
    keep: Keep = lambda _name, _trace: None,
) -> list[Comparison]:
    """Do a job as a single process, then with each strategy, and measure how far apart they end.

    Where torchrun or Slurm has started the ranks, all of them call this; rank 0 has the result, the others nothing.

    Args:
        config: the job; with `trace`, its last steps are recorded.
        strategies: how else to do it.
        pool: ranks to do it on, or those that are there.
        progress: called with what is being done, in words.
        keep: called with each strategy's name and trace.
    """

    def do(strategy: str, ranks: int) -> Any:
        job = _job(config, strategy, ranks)
        return pool.run(outcome, ranks, job, transport=config.transport, device=config.device, mps=config.mps)[0]

    def run(strategy: str, ranks: int) -> Outcome:
        progress(f"{strategy} on {count(ranks, 'rank')}")
        result: Outcome = do(strategy, ranks)
        if result.trace is not None:
            keep(strategy, result.trace)
        return result

    ways = dict.fromkeys(strategies, config.ranks)
    if isinstance(pool, GivenRanks) and not pool.leads:
        for strategy, ranks in ({_REFERENCE: 1} | ways).items():  # in the order in which rank 0 does them
            do(strategy, ranks)
        return []
    return _side_by_side(run, ways, config.precision)


def _job(config: TrainConfig, strategy: str, ranks: int) -> TrainConfig:
    """The same job done in another way: with a strategy, or as a pipeline with a schedule."""
    if strategy.startswith(_SHARD):
        shard = strategy.removeprefix(_SHARD)
        others: dict[str, Any] = {} if shard == "parameters" else dict.fromkeys(OF_PARAMETERS)
        return replace(config, strategy="ddp", ranks=ranks, shard=shard, **others)
    if strategy not in pipeline_rows():
        not_plain: dict[str, Any] = dict.fromkeys(
            ("dp", "pp", "schedule", "microbatches", "balance", "shard", *OF_PARAMETERS)
        )
        plain = replace(config, **not_plain)
        return replace(plain, strategy=strategy, ranks=ranks)
    schedule = strategy.removeprefix(_PIPELINE)
    return replace(config, strategy="pipeline", ranks=ranks, pp=ranks, schedule=schedule).resolved()


def pipeline_rows() -> list[str]:
    """Every schedule of a pipeline, as a row is called."""
    return [f"{_PIPELINE}{name}" for name in PIPELINES]


def sharded_rows(most: str) -> list[str]:
    """Data parallelism, then all that keeps ever more in parts, up to `most`, as rows are called."""
    return ["ddp", *(f"{_SHARD}{name}" for name in SHARDED[: SHARDED.index(most) + 1])]


def outcome(comms: Comms, config: TrainConfig) -> Outcome | None:
    """Do the job on one rank; rank 0 returns what came of it, all others None."""
    training = build(replace(config, on_nan="ignore"), comms)  # what differs is compared, however it ends
    result = _carry_out(training, config, training.model_state)
    return result if comms.rank == 0 else None


# ── in one process ──────────────────────────────────────────────────────────────────────────────────────────────────


def compare_in_process(config: TrainConfig, progress: Progress = lambda _: None) -> list[Comparison]:
    """Do a job on one device, then with `config.ranks` replicas in this process, and measure how far apart they end.

    Replicas average through the CPU, then by the ring. torch's nn.DataParallel is beside them where there are GPUs.
    """
    devices = replica_devices(config.device, config.ranks)
    gpus = sorted({device.index for device in devices if device.type == "cuda"})
    job = replace(config, strategy="single", ranks=1, on_nan="ignore")

    def run(strategy: str, replicas: int) -> Outcome:
        progress(f"{strategy} with {count(replicas, 'replica')}")
        training = build(job, comms)
        result: Callable[[], dict[str, torch.Tensor]] = training.model_state
        if strategy == "torch-dp":
            training.strategy = _torch_data_parallel(training, gpus)
        elif strategy != "single":
            replicated = _replicated(training, job, devices, averaging=strategy.removeprefix("replicas-"))
            result = replicated.state_dict
        return _carry_out(training, job, result)

    ours = dict.fromkeys(["replicas-cpu", "replicas-ring"], len(devices))
    torchs = {"torch-dp": len(gpus)} if gpus else {}
    with connect("gloo", device=devices[0].type) as comms:  # a world of one: nothing is sent
        return _side_by_side(run, ours | torchs, config.precision)


def replica_devices(device: str, replicas: int) -> list[torch.device]:
    """Where so many replicas go: over the GPUs in turn, or all of them to the CPU."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return [torch.device("cpu")] * replicas
    if not torch.cuda.is_available():
        raise UsageError(f"--device {device}: torch sees no GPU here; try --device cpu")
    return [torch.device("cuda", replica % torch.cuda.device_count()) for replica in range(replicas)]


def _replicated(training: Training, config: TrainConfig, devices: list[torch.device], averaging: str) -> Replicas:
    """Let replicas do a training's steps in place of its model."""
    replicas = Replicas(training.model, devices, averaging)
    training.optimizer = build_optimizer(config, nn.ModuleList(replicas.models))

    def step(batches: Sequence[Batch], _samples: int) -> torch.Tensor:
        inputs, targets, loss_fn = _pair(training, batches)
        return replicas.step(inputs, targets, loss_fn)

    training.strategy = step
    return replicas


def _torch_data_parallel(training: Training, gpus: list[int]) -> Step:
    """torch's own: outputs are gathered on the first GPU, and the loss of the whole batch is computed there."""
    wrapped = nn.DataParallel(training.model, device_ids=gpus)

    def step(batches: Sequence[Batch], samples: int) -> torch.Tensor:
        inputs, targets, loss_fn = _pair(training, batches)
        if loss_fn is not None:
            return accumulate(wrapped, [(inputs, targets)], loss_fn, samples=samples)
        losses = wrapped(inputs, targets).view(-1)  # the model computes its own: a mean from each GPU,
        shares = [len(share) / samples for share in targets.chunk(len(gpus))]  # which saw a share of this size
        loss: torch.Tensor = (losses * losses.new_tensor(shares)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return step


def _pair(training: Training, batches: Sequence[Batch]) -> tuple[Any, torch.Tensor, LossFunction | None]:
    """A batch of pairs as inputs, targets, and the loss function; None where the model computes its own loss."""
    [batch] = batches
    if batch.named or len(batch.arguments) > 1 + batch.own_loss or not isinstance(batch.targets, torch.Tensor):
        raise UsageError("--in-process cuts batches of pairs (input, target), and this data has other samples")
    return batch.arguments[0], batch.targets, None if batch.own_loss else training.with_loss.loss_fn


# ── what both have in common ────────────────────────────────────────────────────────────────────────────────────────


def _carry_out(training: Training, config: TrainConfig, state: Callable[[], dict[str, torch.Tensor]]) -> Outcome:
    """Do every step of a job; `state` returns what has been learnt."""
    losses, seconds = [], []
    steps = config.steps or training.loader.length or 1
    recorder = Recorder(training.comms) if config.trace else None
    for number in range(steps):
        if recorder is not None and number == max(0, steps - _RECORDED):
            recorder.start()
        begun = time.perf_counter()
        losses.append(training.step())
        seconds.append(time.perf_counter() - begun)
    trace = None
    if recorder is not None:
        recorder.stop()
        trace = recorder.gather({"strategy": config.strategy, "schedule": config.schedule})
    weights = {name: tensor.cpu() for name, tensor in state().items()}
    # the first steps warm up
    return Outcome(losses, weights, statistics.median(seconds[2:] or seconds), trace)


def _side_by_side(run: Callable[[str, int], Outcome], strategies: dict[str, int], precision: str) -> list[Comparison]:
    """Run the job as it is, then with each strategy on its number of ranks or replicas."""
    reference = run(_REFERENCE, 1)
    rows = [_beside(_REFERENCE, 1, reference, reference, precision)]
    return rows + [_beside(name, ranks, run(name, ranks), reference, precision) for name, ranks in strategies.items()]


def _beside(strategy: str, ranks: int, ours: Outcome, reference: Outcome, precision: str) -> Comparison:
    loss_difference = largest(
        abs(mine - theirs) / max(abs(theirs), 1e-30) for mine, theirs in zip(ours.losses, reference.losses, strict=True)
    )
    weight_difference = largest(
        ((ours.weights[name] - weight).abs().max() / weight.abs().max().clamp_min(1e-30)).item()
        for name, weight in reference.weights.items()
        if weight.is_floating_point() and weight.numel()
    )
    return Comparison(
        strategy=strategy,
        ranks=ranks,
        final_loss=ours.losses[-1],
        loss_difference=loss_difference,
        weight_difference=weight_difference,
        seconds_a_step=ours.seconds_a_step,
        agrees=max(loss_difference, weight_difference) <= TOLERANCE[precision],
        losses=ours.losses,
    )


def largest(differences: Iterable[float]) -> float:
    """The largest difference; infinite when one of them is not a number, which `max` would pass over."""
    return max(difference if math.isfinite(difference) else math.inf for difference in differences)
