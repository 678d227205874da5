"""Time a training step of every kind of data parallelism, torch's own among them, in one run.

A shared machine has good moments and bad ones. So the methods take turns, step by step, and each round begins with
another one. Between its turns a method's weights have left the caches and its threads have gone to sleep, which is not
so in a training that does nothing else: each turn therefore begins with a step that is not counted.

    round 1   none ○●   naive ○●   ddp ○●   torch-ddp ○●      ○ not counted
    round 2   naive ○●   ddp ○●   torch-ddp ○●   none ○●      ● counted, as long as on the slowest rank
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from microparallel.comms import Comms
from microparallel.errors import UsageError
from microparallel.performance.case import transport_of
from microparallel.performance.data_parallel_bench_check import WrongWeights, differences, find_wrong
from microparallel.performance.data_parallel_bench_methods import Contender, Method, methods_of
from microparallel.performance.data_parallel_bench_models import Subject, find_subject
from microparallel.performance.methods import gloo_beside
from microparallel.performance.rounds import largest, total
from microparallel.performance.time_budget import TimeBudget
from microparallel.topology import available_cores, available_memory, find_placement

Progress = Callable[[float, str, int], None]  # is told the fraction done, the model, and its counted steps so far

_WARM_UP = 2  # rounds: buckets are arranged anew after the first step
_COPIES = 3  # what a method needs at most, in models: weights, gradients, and buckets beside these


@dataclass(frozen=True)
class Settings:
    """What to measure, and for how long."""

    models: tuple[str, ...]
    methods: tuple[str, ...] = ("naive", "hooks", "buckets", "ddp")  # beside those that they are compared with
    buckets_mb: tuple[float, ...] = (1, 4, 25, 100)  # for ddp
    batch: int | None = None  # samples a rank; each model has its own
    seconds: float = 120.0  # in all
    steps: int | None = None  # instead of seconds: so many of each method and model


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


def bench_data_parallel(comms: Comms, settings: Settings, progress: Progress = lambda *_: None) -> Measurements:
    """Measure all methods on all models; every rank calls this, and all get the same numbers."""
    subjects = [find_subject(name, settings.batch) for name in settings.models]
    results: list[Result] = []
    wrong = None
    left = settings.seconds
    with _gloo_for(comms) as gloo:
        for index, subject in enumerate(subjects):
            # What one model leaves over is for those after it; what it overdraws is not all taken from them.
            share = max(left / (len(subjects) - index), settings.seconds / len(subjects) / 2)
            budget = TimeBudget(share, 1, settings.steps)

            def tell(part: float, steps: int, index: int = index, name: str = subject.name) -> None:
                progress((index + part) / len(subjects), name, steps)

            bench = _Bench(comms, settings, subject, gloo)
            bench.fill(budget, tell)
            result, wrong = bench.result()
            results.append(result)
            left -= bench.spent
            bench.close()
            del bench
            gc.collect()  # modules and their hooks hold each other; the next model shall have the memory
            if wrong is not None:
                break
    return Measurements(
        comms.world_size,
        _ranks_here(),
        available_cores(),
        transport_of(comms),
        comms.device.type,
        tuple(results),
        wrong,
    )


class _Bench:
    """All methods on one model."""

    def __init__(self, comms: Comms, settings: Settings, subject: Subject, gloo: dist.ProcessGroup) -> None:
        self.spent = 0.0
        self._comms = comms
        self._subject = subject
        self._start = subject.model().to(comms.device)
        self._gradient_bytes = _bytes_of(self._start)
        methods = methods_of(settings.methods, settings.buckets_mb, self._gradient_bytes)
        _require_memory(comms, subject.name, len(methods), self._gradient_bytes)
        inputs, targets = subject.on_rank(comms.rank)
        batch = inputs.to(comms.device), targets.to(comms.device)
        self._contenders = [Contender(method, self._start, batch, comms, gloo) for method in methods]
        self._seconds: dict[Method, list[float]] = {method: [] for method in methods}
        self._order = list(self._contenders)
        self._rounds = 0
        self._cores = min(available_cores(), comms.world_size)

    def fill(self, budget: TimeBudget, tell: Callable[[float, int], None]) -> None:
        """Do rounds for as long as the budget allows."""
        tell(0.0, 0)
        for _ in range(_WARM_UP):
            took = self._round(counts=False)
        counted = 0
        while budget.goes_on(counted, self.spent, took):
            took = self._round(counts=True)
            counted += 1
            tell(budget.fraction(counted, self.spent), counted)

    def result(self) -> tuple[Result, WrongWeights | None]:
        """What was measured, and a method whose weights are wrong."""
        apart = differences(self._contenders, self._start, self._comms)
        timings = [Timing(method, tuple(seconds), apart[method]) for method, seconds in self._seconds.items()]
        subject, steps = self._subject, 2 * self._rounds
        result = Result(subject.name, subject.text, subject.batch, self._gradient_bytes, steps, tuple(timings))
        return result, find_wrong(subject.name, self._contenders, apart, self._comms)

    def close(self) -> None:
        """Take the hooks off."""
        for contender in self._contenders:
            contender.close()

    def _round(self, *, counts: bool) -> float:
        """One turn of each method; returns how long all of them took."""
        begun = time.perf_counter()
        mine = [self._turn(contender) for contender in self._order]
        slowest = largest(self._comms, [seconds for seconds, _ in mine])
        work = total(self._comms, [busy for _, busy in mine])
        for contender, seconds, busy in zip(self._order, slowest, work, strict=True):
            # Ranks that outnumber the cores take turns on them. Where none waits for another, the slowest one's time
            # leaves that out; all of them together keep the cores busy for longer.
            alone = not contender.method.synchronises
            self._seconds[contender.method] += [max(seconds, busy / self._cores) if alone else seconds] * counts
        self._order = self._order[1:] + self._order[:1]
        self._rounds += 1
        [took] = largest(self._comms, [time.perf_counter() - begun])
        self.spent += took
        return took

    def _turn(self, contender: Contender) -> tuple[float, float]:
        """A step that does not count and one that does: how long it took, and how long it kept a core busy."""
        contender.step()
        self._wait_for_gpu()
        self._comms.barrier()  # waiting for a late rank is nobody's cost
        begun, busy_before = time.perf_counter(), time.process_time()
        contender.step()
        self._wait_for_gpu()
        return time.perf_counter() - begun, time.process_time() - busy_before

    def _wait_for_gpu(self) -> None:
        if self._comms.device.type == "cuda":  # it works in the background
            torch.cuda.synchronize(self._comms.device)


@contextmanager
def _gloo_for(comms: Comms) -> Iterator[dist.ProcessGroup]:
    """The group that torch's own DDP talks through: beside shared memory one of gloo, elsewhere the world's."""
    if transport_of(comms) == "shm":
        with gloo_beside(comms) as group:
            yield group
    else:
        yield comms.process_group


def _bytes_of(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _require_memory(comms: Comms, name: str, methods: int, model_bytes: int) -> None:
    """Refuse, on all ranks alike, what would not fit into this machine's memory."""
    free = available_memory()
    [shortage] = largest(comms, [-math.inf if free is None else -free])
    need = _ranks_here() * methods * _COPIES * model_bytes
    if comms.device.type == "cpu" and need > -shortage:
        raise UsageError(
            f"{name}: {methods} copies of it on every rank need {need / 1e9:.1f} GB of memory, and "
            f"{-shortage / 1e9:.1f} GB are free; choose fewer --methods or --buckets, or a smaller model"
        )


def _ranks_here() -> int:
    return find_placement(os.environ).local_world_size
