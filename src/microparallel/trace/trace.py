"""Trace: what happened, or would happen, when a program ran; and everything one can measure on it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from microparallel.program import Lane, Program, peak_activations
from microparallel.trace.chrome import write_chrome
from microparallel.trace.event import Event
from microparallel.trace.intervals import length, outside, union


@dataclass(frozen=True)
class Trace:
    """The events of one run of a program, in the order in which they began on each rank.

    A simulation and a real run both give a Trace, so every number and picture is made in one place.
    """

    program: Program
    events: list[Event]

    @cached_property
    def by_rank(self) -> list[list[Event]]:
        """Each rank's events, in the order in which they began."""
        ranks: list[list[Event]] = [[] for _ in self.program.ranks]
        for event in self.events:
            ranks[event.rank].append(event)
        for events in ranks:
            events.sort(key=lambda event: (event.start, event.end))
        return ranks

    @cached_property
    def compute(self) -> list[list[Event]]:
        """Each rank's computations, in order."""
        return [[event for event in events if event.lane is Lane.COMPUTE] for events in self.by_rank]

    @property
    def makespan(self) -> float:
        """From the first operation's start to the last one's end."""
        if not self.events:
            return 0
        return max(event.end for event in self.events) - min(event.start for event in self.events)

    @property
    def work(self) -> list[float]:
        """How long each rank computes."""
        return [sum(event.duration for event in events) for events in self.compute]

    @property
    def bubble(self) -> float:
        """The time even the busiest rank does not compute, when all ranks wait for each other before the next step."""
        return self.makespan - max(self.work)

    @property
    def bubble_async(self) -> float:
        """The same when each rank goes on to the next step by itself: the longest rank's own time counts."""
        spans = [events[-1].end - events[0].start for events in self.compute if events]
        return max(spans, default=0) - max(self.work)

    @property
    def bubble_fraction(self) -> float:
        """The share of the makespan that is bubble."""
        return self.bubble / self.makespan if self.makespan else 0

    @property
    def peak_activations(self) -> list[int]:
        """The most activations each rank holds at once; one is held until the backward of its weights has ended."""
        return [peak_activations(event.op for event in events) for events in self.compute]

    @property
    def messages_sent(self) -> list[int]:
        """How many messages each rank sends."""
        return [sum(event.messages for event in events) for events in self.by_rank]

    @property
    def bytes_sent(self) -> list[float]:
        """How many bytes each rank sends."""
        return [sum(event.bytes for event in events) for events in self.by_rank]

    @property
    def exposed_communication(self) -> list[float]:
        """How long each rank communicates while it computes nothing: what overlap did not hide."""
        exposed = []
        for events, computing in zip(self.by_rank, self.compute, strict=True):
            talking = union((event.start, event.end) for event in events if event.lane is Lane.COMM)
            exposed.append(length(outside(talking, union((event.start, event.end) for event in computing))))
        return exposed

    @property
    def waiting(self) -> list[float]:
        """How long each rank neither computes nor communicates."""
        busy = zip(self.work, self.exposed_communication, strict=True)
        return [self.makespan - work - exposed for work, exposed in busy]

    def to_chrome(self, path: str | Path, seconds_per_unit: float = 1.0) -> None:
        """Write a file that chrome://tracing and Perfetto open, with one process for each rank.

        Args:
            path: the file to write.
            seconds_per_unit: how many seconds one unit of the trace's time is.
        """
        write_chrome(self.events, self.program.world_size, Path(path), seconds_per_unit)
