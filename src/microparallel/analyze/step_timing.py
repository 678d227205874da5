"""Where a training step's time went: the numbers that `DDPPerformanceAnalyzer` and `microparallel analyze` give.

They come from what was recorded (`mp.record`), and every moment of every rank is in exactly one part:

    forward + backward + optimizer + exposed communication + waiting + other = the step
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from microparallel.errors import UsageError
from microparallel.text import count, show_seconds, show_size
from microparallel.trace import Trace
from microparallel.trace.parts import Parts, parts


@dataclass(frozen=True)
class Phases:
    """What clocks show if all ranks meet at a barrier before and after each phase; means over the ranks, in seconds.

    Waiting for the slowest rank of each phase is in the phase's own time, so it looks like work.
    """

    forward: float
    backward: float  # with the communication
    optimizer: float

    @property
    def total(self) -> float:
        """The step, as these clocks show it."""
        return self.forward + self.backward + self.optimizer


@dataclass(frozen=True)
class StepTiming:
    """One training step of all ranks, in seconds.

    Attributes:
        ranks: the parts of each rank's step.
        samples: of all ranks together.
        trace: what every rank did, of this step alone.
        loss: of the step; None where it is not known.
        every: how long each step took, of those that this one is the median of.
        phases: with `barriers=True`, what clocks between barriers would have shown of another step.
        with_barriers: the parts of that other step.
    """

    ranks: tuple[Parts, ...]
    samples: int
    trace: Trace = field(repr=False)
    loss: float | None = None
    every: tuple[float, ...] = ()
    phases: Phases | None = None
    with_barriers: StepTiming | None = None

    @property
    def total(self) -> float:
        """How long the step took."""
        return self.ranks[0].step

    @property
    def samples_per_second(self) -> float:
        """Samples of all ranks together."""
        return self.samples / self.total if self.total else 0.0

    @property
    def forward(self) -> float:
        """Computing forward; like all that follow, the mean over the ranks."""
        return self._mean("forward")

    @property
    def backward(self) -> float:
        """Computing backward."""
        return self._mean("backward")

    @property
    def optimizer(self) -> float:
        """Updating the weights."""
        return self._mean("optimizer")

    @property
    def communication_exposed(self) -> float:
        """Communication that nothing else went on beside."""
        return self._mean("communicating")

    @property
    def communication_hidden(self) -> float:
        """Communication behind computation: it costs nothing, and is in no sum."""
        return self._mean("hidden")

    @property
    def waiting(self) -> float:
        """Waiting for other ranks, which is not communication."""
        return self._mean("waiting")

    @property
    def other(self) -> float:
        """The rest: data, Python, logging."""
        return self._mean("other")

    def _mean(self, part: str) -> float:
        return statistics.fmean(getattr(one, part) for one in self.ranks)

    def __str__(self) -> str:
        """The parts in one line, as means over the ranks."""
        named = {
            "forward": self.forward,
            "backward": self.backward,
            "exposed communication": self.communication_exposed,
            "waiting": self.waiting,
            "optimizer": self.optimizer,
            "other": self.other,
        }
        words = ", ".join(f"{name} {show_seconds(seconds)}" for name, seconds in named.items())
        return f"{show_seconds(self.total)}: {words} (hidden: {show_seconds(self.communication_hidden)})"

    @property
    def overhead(self) -> CommunicationOverhead:
        """What communication costs."""
        return overhead_of(self)


@dataclass(frozen=True)
class CommunicationOverhead:
    """What communication costs a step; means over the ranks.

    Attributes:
        step: how long it took, in seconds.
        exposed: communication that nothing else went on beside.
        hidden: communication behind computation.
        waiting: for other ranks.
        bytes: of the tensors that a rank gave to collectives, and sent.
        calls: how many such calls a rank made.
    """

    step: float
    exposed: float
    hidden: float
    waiting: float
    bytes: float
    calls: float

    @property
    def exposed_share(self) -> float:
        """The share of the step that is exposed communication."""
        return self.exposed / self.step if self.step else 0.0

    @property
    def waiting_share(self) -> float:
        """The share of the step that ranks wait for each other."""
        return self.waiting / self.step if self.step else 0.0

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second while communication was under way, hidden or not; None if there was none."""
        under_way = self.exposed + self.hidden
        return self.bytes / under_way if under_way and self.bytes else None

    def __str__(self) -> str:
        """In one line."""
        text = (
            f"on average, {self.exposed_share:.1%} of a rank's step is exposed communication and "
            f"{self.waiting_share:.1%} waiting; "
            f"{show_size(self.bytes)} a rank in {count(round(self.calls), 'call')}"
        )
        return text if self.bandwidth is None else f"{text}, {show_size(self.bandwidth)}/s"


def overhead_of(timing: StepTiming) -> CommunicationOverhead:
    """What communication costs in a step."""
    talking = [event for event in timing.trace.events if not event.computes and event.kind != "receive"]
    count = len(timing.ranks)
    return CommunicationOverhead(
        timing.total,
        timing.communication_exposed,
        timing.communication_hidden,
        timing.waiting,
        sum(event.bytes for event in talking) / count,
        len(talking) / count,
    )


def time_of_step(trace: Trace, samples: int, took: float = 0.0, loss: float | None = None) -> StepTiming:
    """Sort the time of one recorded step.

    Args:
        trace: of one step alone.
        samples: of all ranks together.
        took: how long the step took by a clock of its own. What was before the first event and after the last, such as
            fetching the data, is in no event: it counts as other.
        loss: of the step.
    """
    if not trace.events:
        raise UsageError("the trace has no events: nothing was computed or sent while it was recorded")
    found = parts(trace)
    whole = max(took, found[0].step)
    ranks = tuple(replace(one, step=whole, other=one.other + whole - one.step) for one in found)
    return StepTiming(ranks, samples, trace, loss, (whole,))


def median_of(timings: Sequence[StepTiming]) -> StepTiming:
    """The step that took the median time, as it was: parts of different steps would not add up.

    Only full batches count: the last of an epoch may have fewer samples.
    """
    most = max(timing.samples for timing in timings)
    ordered = sorted((timing for timing in timings if timing.samples == most), key=lambda timing: timing.total)
    middle = ordered[(len(ordered) - 1) // 2]
    return replace(middle, every=tuple(timing.total for timing in timings))


def time_steps(trace: Trace, samples: int) -> list[StepTiming]:
    """Each step of a trace; it lasts from the end of the step before it, where that was recorded.

    What ranks say to each other after the last step, before the recorder stops, is no step.
    """
    timings: list[StepTiming] = []
    before: float | None = None
    for number in trace.steps:
        step = trace.step(number)
        if timings and not any(event.computes for event in step.events):
            continue
        end = step.bounds[1]
        timings.append(time_of_step(step, samples, end - before if before is not None else 0.0))
        before = end
    return timings
