"""Time every all-reduce algorithm and torch's own, side by side, from small tensors to large ones."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from microparallel.collectives import all_reduce_program
from microparallel.comms import Comms
from microparallel.performance.bench_settings import AllReduceSettings, Progress
from microparallel.performance.case import Case, tensors_of_a_case, transport_of
from microparallel.performance.memory_budget import MemoryBudget
from microparallel.performance.methods import Method, methods_for
from microparallel.performance.rounds import Rounds, largest
from microparallel.performance.time_budget import TimeBudget
from microparallel.program import Program
from microparallel.text import show_size
from microparallel.topology import available_cores, available_memory, find_placement


@dataclass(frozen=True)
class Timing:
    """The calls of one method at one size, each with the time of the slowest rank; or why there are none."""

    method: str
    size: int
    seconds: tuple[float, ...]
    left_out: str | None = None


@dataclass(frozen=True)
class WrongSum:
    """A method that did not give the sum."""

    method: str
    size: int
    rank: int


@dataclass(frozen=True)
class Measurements:
    """Everything one run measured; it ends at the first wrong result."""

    ranks: int
    ranks_here: int  # on this machine
    cores: int
    transport: str
    device: str
    dtype: str
    timings: tuple[Timing, ...]
    wrong: WrongSum | None = None


def bench_all_reduce(comms: Comms, settings: AllReduceSettings, progress: Progress = lambda *_: None) -> Measurements:
    """Measure all methods at all sizes; every rank calls this, and all get the same numbers."""
    sizes = sorted(set(settings.sizes))
    memory_budget = _memory_budget(comms)
    memory_budget.require(sizes[-1])
    time_budget = TimeBudget(settings.seconds, len(sizes), settings.repeats)
    timings: list[Timing] = []
    wrong = None
    with methods_for(comms, settings.algorithms) as methods:
        bench = _Bench(comms, methods, settings, memory_budget)
        bench.connect()
        for size in sizes:
            measured, wrong = bench.measure(size, time_budget, progress)
            timings += measured
            if wrong is not None:
                break
    return Measurements(
        comms.world_size,
        _ranks_here(),
        available_cores(),
        transport_of(comms),
        comms.device.type,
        settings.dtype,
        tuple(timings),
        wrong,
    )


class _Bench:
    """What stays the same from size to size."""

    def __init__(
        self, comms: Comms, methods: Sequence[Method], settings: AllReduceSettings, memory: MemoryBudget
    ) -> None:
        self._comms = comms
        self._methods = methods
        self._dtype: torch.dtype = getattr(torch, settings.dtype)
        self._programs: list[Program] = [all_reduce_program(name, comms.world_size) for name in settings.algorithms]
        self._memory = memory

    def connect(self) -> None:
        """Make all connections, by the smallest of calls: that may take seconds, and no size shall pay for it."""
        Rounds(self._comms, self._methods, Case(self._comms, self._dtype.itemsize, self._dtype)).warm_up()

    def measure(self, size: int, budget: TimeBudget, progress: Progress) -> tuple[list[Timing], WrongSum | None]:
        """Measure one size for as long as the budget allows; a wrong result ends it."""
        left_out = self._memory.too_large(self._programs, size)
        methods = [method for method in self._methods if method.name not in left_out]
        rounds = Rounds(self._comms, methods, Case(self._comms, size, self._dtype))
        self._fill(rounds, size, budget, progress)
        timings = [
            Timing(method.name, size, tuple(rounds.seconds.get(method.name, ())), left_out.get(method.name))
            for method in self._methods
        ]
        wrong = None if rounds.wrong is None else WrongSum(rounds.wrong[0], size, rounds.wrong[1])
        return timings, wrong

    def _fill(self, rounds: Rounds, size: int, budget: TimeBudget, progress: Progress) -> None:
        may_end_early = {program.name for program in self._programs}
        progress(budget.fraction(0, 0), show_size(size), 0)
        rounds.warm_up()
        while rounds.wrong is None and budget.goes_on(rounds.counted, rounds.spent, rounds.last_round):
            calls = rounds.one_more()
            algorithms = {name: seconds for name, seconds in calls.items() if name in may_end_early}
            for name in budget.too_slow(algorithms, rounds.counted, rounds.spent):
                rounds.end(name)
            progress(budget.fraction(rounds.counted, rounds.spent), show_size(size), rounds.counted)
        budget.end_size(rounds.spent)


def _memory_budget(comms: Comms) -> MemoryBudget:
    """What the ranks of this machine may take, or of the machine that has least."""
    free = available_memory()
    [shortage, ranks] = largest(comms, [-math.inf if free is None else -free, _ranks_here()])
    return MemoryBudget(None if math.isinf(shortage) else -shortage, int(ranks), tensors_of_a_case(comms))


def _ranks_here() -> int:
    return find_placement(os.environ).local_world_size
