"""Time every all-reduce algorithm and torch's own, side by side, from small tensors to large ones."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from microparallel.collectives import all_reduce_program
from microparallel.comms import Comms
from microparallel.performance.memory_budget import MemoryBudget
from microparallel.performance.rounds import ADD, TORCH, Case, Rounds, largest
from microparallel.performance.time_budget import TimeBudget
from microparallel.topology import available_cores, available_memory, find_placement

_TENSORS_OF_A_CASE = 3  # what a rank contributes, what it expects, and what is reduced

Progress = Callable[[float, int, int], None]  # is told the fraction done, the size, and its repeats so far


@dataclass(frozen=True)
class Settings:
    """What to measure, and for how long."""

    algorithms: tuple[str, ...]
    sizes: tuple[int, ...]  # bytes
    dtype: str = "float32"
    seconds: float = 60.0  # in all
    repeats: int | None = None  # instead of seconds: so many at every size


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


def bench_all_reduce(comms: Comms, settings: Settings, progress: Progress = lambda *_: None) -> Measurements:
    """Measure all methods at all sizes; every rank calls this, and all get the same numbers."""
    sizes = sorted(set(settings.sizes))
    programs = [all_reduce_program(name, comms.world_size) for name in settings.algorithms]
    time_budget = TimeBudget(settings.seconds, len(sizes), settings.repeats)
    memory_budget = _memory_budget(comms)
    memory_budget.require(sizes[-1])
    dtype: torch.dtype = getattr(torch, settings.dtype)
    # The very first calls make connections, which may take seconds: let no size pay for that.
    Rounds(comms, (TORCH, *settings.algorithms), Case(comms, dtype.itemsize, dtype)).warm_up()
    timings: list[Timing] = []
    wrong = None
    for size in sizes:
        left_out = memory_budget.too_large(programs, size)
        methods = [method for method in (TORCH, *settings.algorithms) if method not in left_out]
        rounds = Rounds(comms, methods, Case(comms, size, dtype))
        _measure(rounds, size, time_budget, progress)
        for method in (TORCH, *settings.algorithms, ADD):
            timings.append(Timing(method, size, tuple(rounds.seconds.get(method, ())), left_out.get(method)))
        if rounds.wrong is not None:
            wrong = WrongSum(rounds.wrong[0], size, rounds.wrong[1])
            break
    return Measurements(
        comms.world_size,
        _ranks_here(),
        available_cores(),
        "nccl" if "nccl" in str(dist.get_backend_config(comms.process_group)) else "gloo",
        comms.device.type,
        settings.dtype,
        tuple(timings),
        wrong,
    )


def _measure(rounds: Rounds, size: int, budget: TimeBudget, progress: Progress) -> None:
    """Measure one size for as long as the budget allows; a wrong result ends it."""
    progress(budget.fraction(0, 0), size, 0)
    rounds.warm_up()
    while rounds.wrong is None and budget.goes_on(rounds.counted, rounds.spent, rounds.last_round):
        calls = rounds.one_more()
        algorithms = {method: seconds for method, seconds in calls.items() if method not in (TORCH, ADD)}
        for method in budget.too_slow(algorithms, rounds.counted, rounds.spent):
            rounds.end(method)
        progress(budget.fraction(rounds.counted, rounds.spent), size, rounds.counted)
    budget.end_size(rounds.spent)


def _memory_budget(comms: Comms) -> MemoryBudget:
    """What the ranks of this machine may take, or of the machine that has least."""
    free = available_memory()
    [shortage, ranks] = largest(comms, [-math.inf if free is None else -free, _ranks_here()])
    return MemoryBudget(None if math.isinf(shortage) else -shortage, int(ranks), _TENSORS_OF_A_CASE)


def _ranks_here() -> int:
    return find_placement(os.environ).local_world_size
