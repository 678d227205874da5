"""A recorded step as a program with costs, so that one can ask what it would take if something were different.

What a rank does by itself is measured on its own clock, which stands still while the rank is blocked: so Python, data
and logging are part of it. Between two collectives lies one piece of such work:

    recorded    ▒▒▒▒▒▒▒▒▒▒▒┤issue 0▒▒▒▒▒▒▒▒▒┤issue 1▒▒▒·····│▒▒▒▒        · blocked
    program     F0 B4 *U0 B3 B2 *U1 B1 = B0
                 before   after before  after  last                        = waits for all that was issued

That is a step of `mp.schedules.ddp`, but for pieces of work in place of layers, and for ranks that may differ. A
recorded pipeline is a program already: its spans are named after operations.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from microparallel.errors import UsageError
from microparallel.performance.fitted_pipeline import FittedPipeline, fit_pipeline
from microparallel.performance.recorded_costs import OwnClock, recorded_costs
from microparallel.program import AllReduce, Backward, Bucket, Forward, Join, Op, Program, TrainingStep, Value
from microparallel.simulator import Costs, simulate
from microparallel.trace import Trace
from microparallel.trace.recording import Recording, Span


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
        """What the ranks do."""
        count = len(self.seconds)
        last = 2 * count
        orders = []
        for rank, work in enumerate(self.work):
            ops: list[Op] = [Forward(stage, rank) for stage in range(last + 1)]
            for index in range(count):
                stage = last - 2 * index
                ops += [Backward(stage, rank), AllReduce(Bucket(index), "dp"), Backward(stage - 1, rank)]
                ops += [Join()] if work.waits[index] or index == count - 1 else []
            orders.append((*ops, Backward(0, rank)))
        buckets = tuple((last - 2 * index, last - 2 * index + 1) for index in range(count))
        return Program("recorded", TrainingStep(last + 1, len(self.work), buckets), tuple(orders))

    @property
    def costs(self) -> Costs:
        """How long all of it takes."""
        last = 2 * len(self.seconds)
        times: dict[Op, float] = {}
        for rank, work in enumerate(self.work):
            times[Forward(0, rank)] = work.forward
            for index, (before, after) in enumerate(zip(work.before, work.after, strict=True)):
                stage = last - 2 * index
                times[Backward(stage, rank)] = before
                times[Backward(stage - 1, rank)] = after
            times[Backward(0, rank)] = work.last
        reductions: dict[Value, float] = {Bucket(index): seconds for index, seconds in enumerate(self.seconds)}
        return recorded_costs(times, reductions)

    def simulate(self) -> Trace:
        """What the simulator makes of it."""
        return simulate(self.program, self.costs)

    @property
    def makespan(self) -> float:
        """How long the simulated step takes."""
        return self.simulate().makespan


Fitted = FittedStep | FittedPipeline


def fit_step(recording: Recording) -> Fitted:
    """Find the program and the costs of one recorded step."""
    if not recording.spans:
        raise UsageError("the recording has no spans, so there is no step to simulate")
    return fit_pipeline(recording) or _collectives(recording)


# ── data parallelism ────────────────────────────────────────────────────────────────────────────────────────────────


def _collectives(recording: Recording) -> FittedStep:
    if recording.ranks == 1:
        return _alone(recording.by_rank[0])
    everybody = tuple(range(recording.ranks))
    meetings = [
        {span.number: span for span in spans if span.kind == "collective" and span.group == everybody}
        for spans in recording.by_rank
    ]
    numbers = sorted(set.intersection(*(set(mine) for mine in meetings)))
    start = min(span.start for span in recording.spans)
    work = tuple(
        _rank_work(spans, [mine[number] for number in numbers], start)
        for spans, mine in zip(recording.by_rank, meetings, strict=True)
    )
    together = [[mine[number] for mine in meetings] for number in numbers]
    return FittedStep(work, _durations(together), tuple(max(span.bytes for span in spans) for spans in together))


def _alone(spans: Sequence[Span]) -> FittedStep:
    """One rank's step: what it calls communication is work of its own, as there is nobody to wait for."""
    start, end = spans[0].start, max(span.end for span in spans)
    update = min((span.start for span in spans if span.kind == "optimizer"), default=end)
    forward = min(_backward_begins(spans, start), update)
    # A collective that takes no time tells the optimizer from what is before it.
    work = RankWork(forward - start, (update - forward,), (0.0,), (False,), end - update)
    return FittedStep((work,), (0.0,), (0,))


def _durations(together: Sequence[Sequence[Span]]) -> tuple[float, ...]:
    """How long each collective took: since the last rank had come, and the one before it had ended."""
    found = []
    ended = -math.inf
    for spans in together:
        begun = max(ended, *(span.start for span in spans))
        end = statistics.median(span.end for span in spans)
        found.append(max(0.0, end - begun))
        ended = max(begun, end)
    return tuple(found)


def _rank_work(spans: Sequence[Span], collectives: Sequence[Span], start: float) -> RankWork:
    clock = OwnClock(spans, start)
    end = clock.at(max((span.end for span in spans), default=start))
    issued = [clock.at(span.start) for span in collectives]
    waited = [math.inf if math.isnan(span.waited) else clock.at(span.waited) for span in collectives]
    before, after, waits = [], [], []
    at = forward = min(clock.at(_backward_begins(spans, start)), *issued, end)
    for index, moment in enumerate(issued):
        before.append(max(0.0, moment - at))
        following = issued[index + 1] if index + 1 < len(issued) else end
        # All that is waited for in this gap counts as one wait, where the last of them is.
        latest = max((one for one in waited[: index + 1] if moment <= one <= following), default=None)
        waits.append(latest is not None)
        after.append(0.0 if latest is None else latest - moment)
        at = moment + after[-1]
    return RankWork(forward, tuple(before), tuple(after), tuple(waits), max(0.0, end - at))


def _backward_begins(spans: Sequence[Span], start: float) -> float:
    backwards = [span.start for span in spans if span.kind == "backward"]
    forwards = [span.end for span in spans if span.kind == "forward"]
    return min(backwards) if backwards else max(forwards, default=start)
