"""Is it computing, or memory, that bounds a rank's own work? Operations a byte, beside what the machine can do.

A rank that does many operations on each byte it touches keeps its cores busy; one that does few waits for memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from microparallel.performance.pipeline_bench_memory import SavedBytes
from microparallel.performance.step_rounds import wait_for_gpu

_WIDTH = 512  # of the matrices that are multiplied
_COPIED = 32 * 2**20  # bytes, more than caches hold
_REPEATS = 5
# Of each weight: read in forward and in backward, its gradient written; and what optimizers read and write of it.
_TOUCHED = 3
_TOUCHED_BY_OPTIMIZER = {"SGD": 3, "Adam": 7, "AdamW": 7}
_USUAL_OPTIMIZER = 5


@dataclass(frozen=True)
class Machine:
    """What one rank can do at most, measured while all ranks are at it."""

    operations_per_second: float
    bytes_per_second: float

    @property
    def balance(self) -> float:
        """How many operations it can do in the time that a byte takes."""
        return self.operations_per_second / self.bytes_per_second


@dataclass(frozen=True)
class Demand:
    """What a step asks of one rank: operations of matrix products, and bytes that go through memory at least."""

    operations: float
    bytes: float

    @property
    def intensity(self) -> float:
        """Operations on each byte."""
        return self.operations / self.bytes if self.bytes else float("inf")


def measure_machine(device: torch.device) -> Machine:
    """Multiply matrices, and copy memory; all ranks do it at once, as they do in training."""
    matrix = torch.randn(_WIDTH, _WIDTH, device=device)
    numbers = torch.zeros(_COPIED // 4, device=device)
    target = torch.empty_like(numbers)
    multiplying = _median(lambda: matrix @ matrix, device)
    copying = _median(lambda: target.copy_(numbers), device)
    return Machine(2 * _WIDTH**3 / multiplying, 2 * _COPIED / copying)


def demand_of(step: Callable[[], Any], parameters: list[nn.Parameter], optimizer: str) -> Demand:
    """Count what a step asks for; the step is done.

    Args:
        step: forward and backward.
        parameters: of the model, as far as this rank has it.
        optimizer: the name of its class, which says how often each weight is touched.
    """
    with FlopCounterMode(display=False) as counter, SavedBytes(parameters) as saved:
        step()
    weights = sum(parameter.nbytes for parameter in parameters)
    touched = _TOUCHED + _TOUCHED_BY_OPTIMIZER.get(optimizer, _USUAL_OPTIMIZER)
    return Demand(float(counter.get_total_flops()), float(touched * weights + 2 * saved.most))


def _median(work: Callable[[], Any], device: torch.device) -> float:
    times = []
    for _ in range(_REPEATS + 1):
        begun = time.perf_counter()
        work()
        wait_for_gpu(device)
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])
