"""Time a training step of every kind of data parallelism, torch's own among them, in one run: they take turns."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from microparallel.comms import Comms
from microparallel.performance.bench_settings import DataParallelSettings, Progress
from microparallel.performance.case import transport_of
from microparallel.performance.caveats import count_ranks_here
from microparallel.performance.data_parallel_bench_check import WrongWeights, differences, find_wrong
from microparallel.performance.data_parallel_bench_methods import Contender, Method, methods_of
from microparallel.performance.data_parallel_bench_models import Subject, bytes_of, find_subject
from microparallel.performance.memory_budget import require_memory
from microparallel.performance.methods import gloo_for
from microparallel.performance.step_rounds import StepRounds, write_traces
from microparallel.performance.time_budget import TimeBudget
from microparallel.topology import available_cores, available_memory

_COPIES = 3  # what a method needs at most, in models: weights, gradients, and buckets beside these


@dataclass(frozen=True)
class Timing:
    """The counted steps of one method and model, each with the time of the slowest rank."""

    method: Method
    seconds: tuple[float, ...]
    apart: float  # from torch's DDP at the end, as a part of the way that one has come


@dataclass(frozen=True)
class Result:
    """Everything about one model."""

    model: str
    text: str
    batch: int
    gradient_bytes: int
    steps: int  # of each method, those that were not counted too
    timings: tuple[Timing, ...]


@dataclass(frozen=True)
class Measurements:
    """Everything one run measured; it ends at the first wrong result."""

    ranks: int
    ranks_here: int  # on this machine
    cores: int
    transport: str
    device: str
    results: tuple[Result, ...]
    wrong: WrongWeights | None = None


def bench_data_parallel(
    comms: Comms, settings: DataParallelSettings, progress: Progress = lambda *_: None
) -> Measurements:
    """Measure all methods on all models; every rank calls this, and all get the same numbers."""
    subjects = [find_subject(name, settings.batch) for name in settings.models]
    results: list[Result] = []
    wrong = None
    left = settings.seconds
    with gloo_for(comms) as gloo:
        for index, subject in enumerate(subjects):
            # What one model leaves over is for those after it; what it overdraws is not all taken from them.
            share = max(left / (len(subjects) - index), settings.seconds / len(subjects) / 2)
            budget = TimeBudget(share, 1, settings.steps)

            def tell(part: float, steps: int, index: int = index, name: str = subject.name) -> None:
                progress((index + part) / len(subjects), name, steps)

            bench = _Bench(comms, settings, subject, gloo)
            bench.fill(budget, tell)
            result, wrong = bench.result()
            if settings.trace is not None:
                bench.record(settings.trace)
            results.append(result)
            left -= bench.spent
            bench.close()
            del bench
            gc.collect()  # modules and their hooks hold each other; the next model shall have the memory
            if wrong is not None:
                break
    return Measurements(
        comms.world_size,
        count_ranks_here(),
        available_cores(),
        transport_of(comms),
        comms.device.type,
        tuple(results),
        wrong,
    )


class _Bench:
    """All methods on one model."""

    def __init__(self, comms: Comms, settings: DataParallelSettings, subject: Subject, gloo: dist.ProcessGroup) -> None:
        self._comms = comms
        self._subject = subject
        self._start = subject.model().to(comms.device)
        self._gradient_bytes = bytes_of(self._start)
        methods = methods_of(settings.methods, settings.buckets_mb, self._gradient_bytes)
        _require_memory(comms, subject.name, len(methods), self._gradient_bytes)
        inputs, targets = subject.on_rank(comms.rank)
        batch = inputs.to(comms.device), targets.to(comms.device)
        self._contenders = [Contender(method, self._start, batch, comms, gloo) for method in methods]
        self._rounds = StepRounds(comms, self._contenders)

    @property
    def spent(self) -> float:
        """The seconds that all rounds took."""
        return self._rounds.spent

    def fill(self, budget: TimeBudget, tell: Callable[[float, int], None]) -> None:
        """Do rounds for as long as the budget allows."""
        self._rounds.fill(budget, tell)

    def result(self) -> tuple[Result, WrongWeights | None]:
        """What was measured, and a method whose weights are wrong."""
        apart = differences(self._contenders, self._start, self._comms)
        seconds = self._rounds.seconds
        timings = [Timing(one.method, tuple(seconds[one]), apart[one.method]) for one in self._contenders]
        subject, steps = self._subject, 2 * self._rounds.rounds
        result = Result(subject.name, subject.text, subject.batch, self._gradient_bytes, steps, tuple(timings))
        return result, find_wrong(subject.name, self._contenders, apart, self._comms)

    def record(self, folder: str) -> None:
        """Write a recorded step of each method."""
        steppers = {f"{self._subject.name} {one.method.label}": one for one in self._contenders}
        write_traces(self._comms, steppers, folder)

    def close(self) -> None:
        """Take the hooks off."""
        for contender in self._contenders:
            contender.close()


def _require_memory(comms: Comms, name: str, methods: int, model_bytes: int) -> None:
    need = count_ranks_here() * methods * _COPIES * model_bytes
    what, advice = (
        f"{name}: {methods} copies of it on every rank",
        "choose fewer --methods or --buckets, or a smaller model",
    )
    require_memory(comms, available_memory(), need, what, advice)
