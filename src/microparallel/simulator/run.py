"""Find out what a program would cost."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from microparallel.program import Program
from microparallel.simulator.costs import Costs
from microparallel.simulator.engine import Simulation
from microparallel.trace import Trace


def simulate(program: Program, costs: Costs | None = None) -> Trace:
    """Find out what a program would cost, without running it.

    Args:
        program: what to simulate; one that `mp.verify` accepts. One that does not come to its end is refused.
        costs: how long operations and messages take; without it a forward and each half of a backward take 1.

    Example:
        ```python
        trace = mp.simulate(mp.schedules.build("1f1b", 4, 8), mp.Costs(forward=1, backward_input=1, backward_weight=1))
        print(trace.makespan, trace.bubble_fraction, trace.peak_activations)  # 33 0.2727… [4, 3, 2, 1]
        ```
    """
    costs = costs or Costs()
    costs.check(program)
    with _no_garbage_collection():
        return Trace(Simulation(program, costs).run(), program, simulated=True)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Events stay, and there are millions: the collector would look through all of them again and again for nothing."""
    wanted = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if wanted:
            gc.enable()
