"""What operations cost when nobody says: round numbers, so that a drawing can be counted by eye."""

from __future__ import annotations

from microparallel.program import Collective, Program
from microparallel.simulator import Costs


def default_costs(program: Program) -> Costs:
    """A forward and each half of a backward take 1, and so does what the program is about, if that is communication.

    - In a collective every message takes 1, so each hop is one tick.
    - In a pipeline messages are free: the bubbles that are left are those of the schedule itself.
    - In a data-parallel step one layer's gradients take 1 over one link: an all-reduce takes 2(p−1)/p for each layer.
    """
    if isinstance(program.goal, Collective):
        return Costs(latency=1)
    return Costs(seconds_per_byte=1) if program.goal.buckets else Costs()
