"""What the benchmarks of training steps have in common: medians and quartiles, and what a reader must know of them."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence

from microparallel.performance.time_budget import FEWEST_REPEATS
from microparallel.text import count
from microparallel.topology import find_placement


def quartiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile."""
    median = statistics.median(seconds)
    if len(seconds) == 1:
        return median, median, median
    lower, _, upper = statistics.quantiles(seconds, n=4, method="inclusive")
    return lower, median, upper


def chance_speaks(model: str, counted: int) -> list[str]:
    """Say so where there were few steps."""
    if counted >= FEWEST_REPEATS:
        return []
    steps = count(counted, "step")
    return [f"{model}: {steps} of each method, so chance speaks loudly; more --seconds or --steps would help"]


def cores_are_shared(ranks_here: int, cores: int, device: str) -> list[str]:
    """Say so where ranks take turns on the cores."""
    if ranks_here <= cores or device != "cpu":
        return []
    available = count(cores, "core")
    return [
        f"{ranks_here} ranks share {available} and take turns: times say more about that than about the methods",
    ]


def count_ranks_here() -> int:
    """How many ranks there are on this machine."""
    return find_placement(os.environ).local_world_size
