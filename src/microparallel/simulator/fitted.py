"""A recorded step is its program with a cost for each operation: one can ask what it would take, changed.

The program is what the ranks reported, or were seen to do (`trace/recorded.py`). Simulated with the recorded costs it
takes as long as it took; with other costs, or another order, as long as it would.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from microparallel.errors import ProgramError, UsageError
from microparallel.program import Goal, Lane, MeetingOp, Op, Program, Send, halves, is_meeting, lane
from microparallel.simulator.costs import Costs
from microparallel.simulator.engine import simulate
from microparallel.trace import Trace
from microparallel.trace.memory import simulated_sizes
from microparallel.trace.recorded import recorded_step

PerOperation = Mapping[tuple[int, Op], float]  # by rank and operation, which a rank does once


@dataclass(frozen=True, kw_only=True)
class RecordedCosts(Costs):
    """Costs of single operations, each on its own rank.

    Attributes:
        seconds: how long each takes; of communication, once all ranks have come.
        exchanged: how many bytes are sent or reduced.
        counts: how many messages and bytes a rank sends for a collective; otherwise its algorithm says so.
    """

    seconds: PerOperation = field(default_factory=dict)
    exchanged: PerOperation = field(default_factory=dict)
    counts: Mapping[tuple[int, Op], tuple[int, float]] = field(default_factory=dict)

    def of(self, op: Op, rank: int = 0) -> float:
        """How long a computation takes on a rank."""
        return self.seconds.get((rank, op), 0.0)

    def transfer(self, send: Send, rank: int) -> float:
        """How long a message takes."""
        return self.seconds.get((rank, send), 0.0)

    def together(self, op: MeetingOp, rank: int) -> float:
        """How long a collective takes once all ranks have come."""
        return self.seconds.get((rank, op), 0.0)

    def traffic(self, op: MeetingOp, rank: int) -> tuple[int, float] | None:
        """What a rank sends for a collective."""
        return self.counts.get((rank, op))

    def bytes(self, op: Send | MeetingOp, goal: Goal, rank: int, shards: int = 1) -> float:
        """How many bytes a message has, or a collective: as they were measured, also of a part."""
        del goal, shards
        return self.exchanged.get((rank, op), 0.0)


@dataclass(frozen=True)
class Fitted:
    """A step that can be simulated, and changed.

    Attributes:
        program: what the ranks do; each of them does an operation once.
        costs: how long all of it takes.
    """

    program: Program
    costs: RecordedCosts

    def simulate(self) -> Trace:
        """Simulate the step."""
        return simulate(self.program, self.costs)

    @cached_property
    def makespan(self) -> float:
        """How long the simulated step takes."""
        return self.simulate().makespan

    def scaled(self, factor: Callable[[int, Op], float]) -> Fitted:
        """The same, where a rank takes so many times as long for an operation."""
        seconds = {(rank, op): known * factor(rank, op) for (rank, op), known in self.costs.seconds.items()}
        return replace(self, costs=replace(self.costs, seconds=seconds))

    def seconds(self, rank: int, op: Op) -> float:
        """How long a rank takes for an operation."""
        return self.costs.seconds.get((rank, op), 0.0)

    @property
    def work(self) -> list[float]:
        """How long each rank computes by itself; of a pipeline, its stages alone."""
        counts = halves if self.pipeline > 1 else computes
        return [sum(self.seconds(rank, op) for op in ops if counts(op)) for rank, ops in enumerate(self.program.ranks)]

    @property
    def collectives(self) -> dict[MeetingOp, tuple[float, float]]:
        """What ranks do together, in order: how long it takes, and how many bytes it has."""
        found: dict[MeetingOp, list[tuple[float, float]]] = {}
        for rank, ops in enumerate(self.program.ranks):
            for op in filter(is_meeting, ops):
                found.setdefault(op, []).append((self.seconds(rank, op), self.costs.exchanged.get((rank, op), 0.0)))
        return {
            op: (statistics.median(seconds for seconds, _ in each), max(size for _, size in each))
            for op, each in found.items()
        }

    @property
    def pipeline(self) -> int:
        """How many ranks have the stages of one pipeline: those up to the next that has stages of the first one's.

        It is 1 where every rank has all stages, or where no stages are known.
        """
        stages = [{half.stage for op in ops for half in halves(op)} for ops in self.program.ranks]
        size = next((rank for rank, mine in enumerate(stages[1:], 1) if mine & stages[0]), len(stages))
        return size if all(stages) and not len(stages) % size else 1

    @property
    def replicas(self) -> int:
        """How many pipelines, or whole models, there are side by side."""
        return self.program.world_size // self.pipeline


def computes(op: Op) -> bool:
    """Whether a rank does this operation by itself."""
    return lane(op) is Lane.COMPUTE


def fit_step(trace: Trace) -> Fitted:
    """Find the program and the costs of one step; of a simulated one, those it was simulated with."""
    if not trace.events:
        raise UsageError("the trace has no events, so there is no step to simulate")
    fitted = _fit(trace, reported=True)
    try:
        fitted.makespan  # noqa: B018
    except ProgramError:  # a part of it was not recorded, so what was reported does not come to its end
        return _fit(trace, reported=False)
    return fitted


def _fit(trace: Trace, *, reported: bool) -> Fitted:
    step = recorded_step(trace, reported=reported)
    costs = RecordedCosts(seconds=step.seconds, exchanged=step.bytes, counts=step.traffic, sizes=simulated_sizes(trace))
    return Fitted(step.program, costs)


def predicted(measured: Trace) -> Trace:
    """Simulate a step with the costs that are found in it, to be set beside it.

    Args:
        measured: one step alone.
    """
    return replace(fit_step(measured).simulate(), about=measured.about)
