"""Scaling efficiency, measured by really running 1, 2, 4, … ranks.

strong   the same batch, shared by more ranks: how much sooner is a step done?
weak     the same batch for each rank, so more samples in all: how many more are done in the same time?

Either way the speed-up is the ratio of samples a second, and the efficiency is the speed-up for each rank. Every rank
computes with equally many threads, however many ranks there are: those that the largest world leaves it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from microparallel.comms import Comms
from microparallel.errors import UsageError
from microparallel.performance.rounds import largest
from microparallel.performance.step_rounds import wait_for_gpu
from microparallel.text import count
from microparallel.topology import available_cores, threads_per_rank
from microparallel.world import Pool

Kind = Literal["strong", "weak"]
StepMaker = Callable[[Comms, int], Callable[[], Any]]  # (the ranks, samples of all of them) → what does a step

_WARM_UP = 2
_BAR = 32  # columns


@dataclass(frozen=True)
class ScalingPoint:
    """One world: how many ranks, how many samples they have together, and how long their steps took."""

    ranks: int
    batch: int
    seconds: tuple[float, ...]  # of each step, on the slowest rank

    @property
    def median(self) -> float:
        """The median step."""
        return statistics.median(self.seconds)

    @property
    def samples_per_second(self) -> float:
        """Of all ranks together."""
        return self.batch / self.median


@dataclass(frozen=True)
class Scaling:
    """Worlds of several sizes, the smallest first; the others are compared with that."""

    kind: Kind
    points: tuple[ScalingPoint, ...]
    cores: int
    device: str
    threads: int  # of each rank

    def speedup(self, point: ScalingPoint) -> float:
        """How many times as many samples a second as the smallest world."""
        return point.samples_per_second / self.points[0].samples_per_second

    def efficiency(self, point: ScalingPoint) -> float:
        """The speed-up as a share of the ideal."""
        return self.speedup(point) / self.ideal(point)

    def ideal(self, point: ScalingPoint) -> float:
        """The speed-up if ranks did not disturb each other at all."""
        return point.ranks / self.points[0].ranks

    @property
    def remark(self) -> str | None:
        """What must be said where ranks outnumber the cores."""
        most = self.points[-1].ranks
        if self.device != "cpu" or most <= self.cores:
            return None
        first = next(point.ranks for point in self.points if point.ranks > self.cores)
        cores = count(self.cores, "core")
        return (
            f"this machine has {cores}: from {first} ranks on they take turns, so no speed-up beyond {self.cores} is "
            "possible here, and what is lost is not the fault of communication alone"
        )


def rank_counts(most: int) -> list[int]:
    """1, 2, 4, … up to so many, which is always among them."""
    counts = [1]
    while counts[-1] * 2 <= most:
        counts.append(counts[-1] * 2)
    return counts if counts[-1] == most else [*counts, most]


def measure_scaling(
    pool: Pool,
    make_step: StepMaker,
    kind: Kind,
    counts: Sequence[int],
    batch: int,
    *,
    steps: int = 10,
    transport: str = "auto",
    device: str = "auto",
    progress: Callable[[int], None] = lambda _: None,
) -> Scaling:
    """Run worlds of several sizes, one after another.

    Args:
        pool: warm ranks.
        make_step: is called on every rank, with its Comms and the samples of all ranks together; what it returns does
            one step. It is sent to other processes, so it must not hold on to tensors of this one.
        kind: strong or weak.
        counts: how many ranks, from few to many.
        batch: samples a step in the smallest world; with weak scaling, larger worlds have more of them.
        steps: that are timed in each world.
        transport: how ranks talk.
        device: where they compute.
        progress: is told how many ranks come next.
    """
    if not counts or list(counts) != sorted(set(counts)) or counts[0] < 1:
        raise UsageError(f"counts={list(counts)}: name numbers of ranks, from few to many, as in [1, 2, 4]")
    threads = threads_per_rank(counts[-1])
    points = []
    where = device
    for ranks in counts:
        progress(ranks)
        samples = batch if kind == "strong" else batch * ranks // counts[0]
        found = pool.run(_time_steps, ranks, make_step, samples, steps, threads, transport=transport, device=device)
        seconds, where = found[0]
        points.append(ScalingPoint(ranks, samples, tuple(seconds)))
    return Scaling(kind, tuple(points), available_cores(), where, threads)


def _time_steps(comms: Comms, make_step: StepMaker, batch: int, steps: int, threads: int) -> tuple[list[float], str]:
    """What every rank does: the seconds of each step, of the slowest rank; and on what device."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        step = make_step(comms, batch)
        for _ in range(_WARM_UP):
            step()
        mine = []
        for _ in range(steps):
            wait_for_gpu(comms.device)
            comms.barrier()  # a step begins when all have ended the last: otherwise ranks would drift apart
            mine.append(_seconds_of(step, comms.device))
        return largest(comms, mine), comms.device.type
    finally:
        torch.set_num_threads(before)


def _seconds_of(step: Callable[[], Any], device: torch.device) -> float:
    begun = time.perf_counter()
    step()
    wait_for_gpu(device)
    return time.perf_counter() - begun


def scaling_bars(scaling: Scaling) -> str:
    """The speed-up as bars, each beside the ideal.

    ```
    1 rank   ████████████████                  1.00 of 1
    2 ranks  ██████████████████████████████··  1.88 of 2
    ```
    """
    most = scaling.ideal(scaling.points[-1])
    lines = []
    for point in scaling.points:
        ideal = max(1, round(_BAR * scaling.ideal(point) / most))
        reached = max(0, min(_BAR, round(_BAR * scaling.speedup(point) / most)))
        bar = "█" * reached + "·" * max(0, ideal - reached)
        name = count(point.ranks, "rank")
        lines.append(f"{name:<9}{bar:<{_BAR}}  {scaling.speedup(point):.2f} of {scaling.ideal(point):g}")
    return "\n".join(lines)
