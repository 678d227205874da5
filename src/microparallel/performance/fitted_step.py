"""A recorded step as a program with costs, so that one can ask what it would take if something were different.

What a rank does by itself is measured on its own clock, which stands still while the rank is blocked: so Python, data
and logging are part of it. Between two collectives lies one piece of such work:

    recorded    ▒▒▒▒▒▒▒▒▒▒▒┤issue 0▒▒▒▒▒▒▒▒▒┤issue 1▒▒▒·····│▒▒▒▒        · blocked
    program     F0 B3 *U0 B2 B1 *U1 B0 step
                 before   after before after last

That is a step of `mp.schedules.ddp`, but for pieces of work in place of layers, and for ranks that may differ. Where a
rank waited for what it had issued before it went on, a Join stands; OptimizerStep waits for all of it, and stands for
what the rank does then. A recorded pipeline is a program already: its events are operations.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from microparallel.errors import UsageError
from microparallel.performance.fitted_pipeline import FittedPipeline, fit_pipeline
from microparallel.performance.recorded_costs import OwnClock, RecordedCosts, as_recorded
from microparallel.program import AllReduce, Backward, Bucket, Forward, Join, Op, OptimizerStep, Program, TrainingStep
from microparallel.simulator import Costs, simulate
from microparallel.trace import Event, Trace
from microparallel.trace.meetings import meetings


@dataclass(frozen=True)
class RankWork:
    """What one rank does by itself, in seconds: around each collective, and after all of them.

    Attributes:
        forward: until the first backward begins.
        before: until each collective is issued, since the one before it was (or was waited for).
        after: since then, until it is waited for; 0 where the next one is issued first.
        waits: whether it is waited for before the next one is issued.
        last: since the last was waited for.
    """

    forward: float
    before: tuple[float, ...]
    after: tuple[float, ...]
    waits: tuple[bool, ...]
    last: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.forward + sum(self.before) + sum(self.after) + self.last

    def times(self, factor: float) -> RankWork:
        """The same, done so many times as long."""
        return replace(
            self,
            forward=self.forward * factor,
            before=tuple(one * factor for one in self.before),
            after=tuple(one * factor for one in self.after),
            last=self.last * factor,
        )


@dataclass(frozen=True)
class FittedStep:
    """A step in which all ranks take part in the same collectives, one after another.

    Attributes:
        work: of each rank.
        seconds: how long each collective takes, once everybody has come.
        bytes: of each collective's tensor.
    """

    work: tuple[RankWork, ...]
    seconds: tuple[float, ...]
    bytes: tuple[int, ...]

    @property
    def program(self) -> Program:
        """What the ranks do; one that is alone has nobody to reduce with."""
        count = len(self.seconds)
        buckets = tuple((before, before + 1) for before, _ in map(self._stages, range(count)))
        goal = TrainingStep(max(1, 2 * count), len(self.work), buckets if len(self.work) > 1 else ())
        return Program("recorded", goal, tuple(tuple(self._ops(rank)) for rank in range(len(self.work))))

    def _stages(self, index: int) -> tuple[int, int]:
        """The pieces of work before and after a collective, as stages: the backward of the last comes first."""
        before = 2 * (len(self.seconds) - index) - 1
        return before, before - 1

    def piece(self, stage: int) -> tuple[int, bool]:
        """Which collective a piece of work belongs to, and whether it comes after it."""
        return len(self.seconds) - 1 - stage // 2, stage % 2 == 0

    def _ops(self, rank: int) -> Iterator[Op]:
        count = len(self.seconds)
        yield from (Forward(stage, rank) for stage in range(max(1, 2 * count)))
        for index in range(count):
            before, after = self._stages(index)
            yield Backward(before, rank)
            if len(self.work) > 1:
                yield AllReduce(Bucket(index), "dp")
            yield Backward(after, rank)
            if self.work[rank].waits[index] and index < count - 1:
                yield Join()
        yield OptimizerStep()

    @property
    def costs(self) -> Costs:
        """How long all of it takes."""
        times: dict[tuple[int, Op], float] = {}
        for rank, work in enumerate(self.work):
            times[rank, Forward(0, rank)] = work.forward
            for index, pieces in enumerate(zip(work.before, work.after, strict=True)):
                for stage, seconds in zip(self._stages(index), pieces, strict=True):
                    times[rank, Backward(stage, rank)] = seconds
            times[rank, OptimizerStep()] = work.last
        return RecordedCosts(
            times=times,
            transfers={Bucket(index): seconds for index, seconds in enumerate(self.seconds)},
            sizes={Bucket(index): size for index, size in enumerate(self.bytes)},
        )

    def simulate(self) -> Trace:
        """What the simulator makes of it."""
        return simulate(self.program, self.costs)

    @property
    def makespan(self) -> float:
        """How long the simulated step takes."""
        return self.simulate().makespan


Fitted = FittedStep | FittedPipeline


def fit_step(trace: Trace) -> Fitted:
    """Find the program and the costs of one step; of a simulated one, those it was simulated with."""
    if not trace.events:
        raise UsageError("the trace has no events, so there is no step to simulate")
    noted = as_recorded(trace)
    return fit_pipeline(noted) or _collectives(noted)


# ── data parallelism ────────────────────────────────────────────────────────────────────────────────────────────────


def _collectives(trace: Trace) -> FittedStep:
    if trace.ranks == 1:
        return _alone(trace.by_rank[0])
    together = collectives_of(trace)
    work = tuple(
        _rank_work(events, [one[rank] for one in together], trace.bounds[0])
        for rank, events in enumerate(trace.by_rank)
    )
    return FittedStep(work, _durations(together), tuple(max(int(event.bytes) for event in one) for one in together))


def collectives_of(trace: Trace) -> list[list[Event]]:
    """What all ranks took part in, in order: of each, the event of every rank."""
    found = []
    for places in meetings(trace.events):
        together = sorted((trace.events[place] for place in places), key=lambda event: event.rank)
        if together[0].kind == "collective" and [event.rank for event in together] == [*range(trace.ranks)]:
            found.append(together)
    return sorted(found, key=lambda together: together[0].asked)


def _alone(events: Sequence[Event]) -> FittedStep:
    """One rank's step: what it calls communication is work of its own, as there is nobody to wait for."""
    start, end = min(event.asked for event in events), max(event.end for event in events)
    update = min((event.start for event in events if event.kind == "optimizer"), default=end)
    forward = min(_backward_begins(events, start), update)
    # A collective that takes no time tells the optimizer from what is before it.
    work = RankWork(forward - start, (update - forward,), (0.0,), (False,), end - update)
    return FittedStep((work,), (0.0,), (0,))


def _durations(together: Sequence[Sequence[Event]]) -> tuple[float, ...]:
    """How long each collective took: since the last rank had come, and the one before it had ended."""
    found = []
    ended = -math.inf
    for events in together:
        begun = max(ended, *(event.start for event in events))
        end = statistics.median(event.end for event in events)
        found.append(max(0.0, end - begun))
        ended = max(begun, end)
    return tuple(found)


def _rank_work(events: Sequence[Event], collectives: Sequence[Event], start: float) -> RankWork:
    clock = OwnClock(events, start)
    end = clock.at(max((event.end for event in events), default=start))
    issued = [clock.at(event.asked) for event in collectives]
    waited = [math.inf if event.waited is None else clock.at(event.waited) for event in collectives]
    before, after, waits = [], [], []
    at = forward = min(clock.at(_backward_begins(events, start)), *issued, end)
    for index, moment in enumerate(issued):
        before.append(max(0.0, moment - at))
        following = issued[index + 1] if index + 1 < len(issued) else end
        # All that is waited for in this gap counts as one wait, where the last of them is.
        latest = max((one for one in waited[: index + 1] if moment <= one <= following), default=None)
        waits.append(latest is not None)
        after.append(0.0 if latest is None else latest - moment)
        at = moment + after[-1]
    return RankWork(forward, tuple(before), tuple(after), tuple(waits), max(0.0, end - at))


def _backward_begins(events: Sequence[Event], start: float) -> float:
    backwards = [event.start for event in events if event.kind == "backward"]
    forwards = [event.end for event in events if event.kind == "forward"]
    return min(backwards) if backwards else max(forwards, default=start)
