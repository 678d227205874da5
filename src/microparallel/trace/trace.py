"""Trace: what happened, or would happen, and everything one can measure on it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from microparallel.errors import DataError, UsageError
from microparallel.program import Program, peak_activations
from microparallel.trace.event import Event
from microparallel.trace.intervals import Interval, length, outside, union
from microparallel.trace.memory import RankMemory, Sizes, memory_of

_FILE = "trace.json"  # of a folder


@dataclass(frozen=True)
class Trace:
    """The events of one or several steps, on one clock.

    A simulation and a real run both give a Trace, so every number and picture is made in one place.

    Attributes:
        events: what the ranks did.
        program: what they followed; None if the trace was recorded: then `followed` finds it out for one step.
        ranks: how many there are; without it, as many as the program has.
        clock_error: how far apart the ranks' clocks may be, in seconds.
        about: what was run, in any words and numbers.
        simulated: whether a simulation made the events, not a run.
        sizes: how many bytes the parameters of a stage take, and what goes with them, for `memory`; of a recorded
            trace, for each step; None if that is not known.
    """

    events: list[Event]
    program: Program | None = None
    ranks: int = 0
    clock_error: float = 0.0
    about: dict[str, Any] = field(default_factory=dict)
    simulated: bool = False
    sizes: Sizes | Mapping[int, Sizes] | None = None

    def __post_init__(self) -> None:
        if not self.ranks and self.program is not None:
            object.__setattr__(self, "ranks", self.program.world_size)
        if self.ranks < 1:
            raise UsageError(f"ranks={self.ranks}: a trace of no program must say how many ranks there are")

    @cached_property
    def followed(self) -> Program:
        """The program; of one recorded step, the one its ranks reported, or were seen to follow (`recorded.py`)."""
        if self.program is not None:
            return self.program
        if len(self.steps) != 1:
            raise UsageError(f"this trace has {len(self.steps)} steps, and each follows its own program; use step(…)")
        from microparallel.trace.recorded import recorded_step

        return recorded_step(self).program

    @cached_property
    def by_rank(self) -> list[list[Event]]:
        """Each rank's events, in the order in which they began."""
        ranks: list[list[Event]] = [[] for _ in range(self.ranks)]
        for event in self.events:
            ranks[event.rank].append(event)
        for events in ranks:
            events.sort(key=lambda event: (event.start, event.end))
        return ranks

    @cached_property
    def compute(self) -> list[list[Event]]:
        """Each rank's computations, in order."""
        return [[event for event in events if event.computes] for events in self.by_rank]

    @cached_property
    def blocked(self) -> list[list[Interval]]:
        """When each rank had nothing to do but to wait for communication, or for the ranks it communicates with.

        A measured rank may do something that no event records. A simulated rank does not: if it does not compute, it
        waits.
        """
        if self.simulated:
            return [self._idle(events) for events in self.by_rank]
        return [
            union((event.waited, event.end) for event in events if event.waited is not None) for events in self.by_rank
        ]

    def _idle(self, events: list[Event]) -> list[Interval]:
        end = max((event.end for event in events), default=self.bounds[0])
        return outside([(self.bounds[0], end)], union((event.start, event.end) for event in events if event.computes))

    @cached_property
    def waits(self) -> list[float | None]:
        """For each event, since when its rank had nothing to do but to wait for it; None if it never waited."""
        if not self.simulated:
            return [event.waited for event in self.events]
        return [_waited(event, self.blocked[event.rank]) for event in self.events]

    @cached_property
    def computing(self) -> list[list[Interval]]:
        """When each rank computed; an observed backward is blocked inside of itself, and then it does not."""
        return [
            outside(union((event.start, event.end) for event in events), blocked)
            for events, blocked in zip(self.compute, self.blocked, strict=True)
        ]

    @cached_property
    def communicating(self) -> list[list[Interval]]:
        """When each rank's communication went on: all it needed had come, and it had not ended."""
        return [union((event.start, event.end) for event in events if not event.computes) for events in self.by_rank]

    # ── steps ───────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def steps(self) -> list[int]:
        """The numbers of the steps."""
        return sorted({event.step for event in self.events})

    def step(self, number: int) -> Trace:
        """One step alone."""
        return replace(self, events=[event for event in self.events if event.step == number])

    # ── measures ────────────────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def bounds(self) -> Interval:
        """When the first rank came to something, and when the last was done."""
        if not self.events:
            return 0.0, 0.0
        return min(event.asked for event in self.events), max(event.end for event in self.events)

    @property
    def makespan(self) -> float:
        """From the first operation's start to the last one's end."""
        start, end = self.bounds
        return end - start

    @property
    def work(self) -> list[float]:
        """How long each rank computes."""
        return [length(times) for times in self.computing]

    @property
    def bubble(self) -> float:
        """How long the busiest rank does not compute, when all ranks wait for each other before the next step."""
        return self.makespan - max(self.work)

    @property
    def bubble_async(self) -> float:
        """The same when each rank goes on to the next step by itself: the longest rank's own time counts."""
        lengths = [events[-1].end - events[0].start for events in self.compute if events]
        return max(lengths, default=0) - max(self.work)

    @property
    def bubble_fraction(self) -> float:
        """The share of the makespan that is bubble."""
        return self.bubble / self.makespan if self.makespan else 0

    @property
    def peak_activations(self) -> list[int]:
        """The most activations each rank holds at once; one is held until the backward of its weights has ended."""
        return [peak_activations(event.op for event in events) for events in self.compute]

    @cached_property
    def memory(self) -> list[RankMemory]:
        """What each rank holds over time in one step, in bytes, by kind (`memory.py` says what counts as what).

        Raises:
            UsageError: in one line, where a size is not known.
        """
        return memory_of(self)

    @property
    def peak_memory(self) -> list[float]:
        """The most bytes each rank holds at once."""
        return [rank.peak[1] for rank in self.memory]

    @property
    def messages_sent(self) -> list[int]:
        """How many messages each rank sends."""
        return [sum(event.messages for event in events) for events in self.by_rank]

    @property
    def bytes_sent(self) -> list[float]:
        """How many bytes each rank sends."""
        return [sum(event.sent for event in events) for events in self.by_rank]

    @property
    def exposed_communication(self) -> list[float]:
        """How long each rank communicates while it computes nothing: what overlap did not hide."""
        both = zip(self.communicating, self.computing, strict=True)
        return [length(outside(communicating, computing)) for communicating, computing in both]

    @property
    def hidden_share(self) -> float:
        """The share of all ranks' communication during which they computed: 1 if all of it was hidden, 0 if none."""
        communicating = sum(length(times) for times in self.communicating)
        return 1 - sum(self.exposed_communication) / communicating if communicating else 1.0

    @property
    def waiting(self) -> list[float]:
        """How long each rank neither computes nor communicates."""
        busy = zip(self.work, self.exposed_communication, strict=True)
        return [self.makespan - work - exposed for work, exposed in busy]

    def compare(self, other: Trace) -> list[Difference]:
        """The numbers that matter, of this trace and of another: of a prediction and of a measurement, for example."""
        return compare(self, other)

    # ── files ───────────────────────────────────────────────────────────────────────────────────────────────────

    def to_json(self) -> str:
        """Everything, as a text that `from_json` reads."""
        from microparallel.trace import files

        return files.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """Read a trace back; raises `ValueError`, in one line, where the text is none."""
        from microparallel.trace import files

        return files.from_json(text)

    def to_chrome(self, path: str | Path, seconds_per_unit: float = 1.0) -> None:
        """Write a file that chrome://tracing and Perfetto open: a process for each rank, arrows for messages.

        Args:
            path: the file to write.
            seconds_per_unit: how many seconds one unit of the trace's time is.
        """
        from microparallel.trace.files import write_chrome

        write_chrome(self, Path(path), seconds_per_unit)

    def save(self, folder: str | Path) -> None:
        """Write trace.json, of which `microparallel report FOLDER` makes a page, and trace-chrome.json for Perfetto."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        (path / _FILE).write_text(self.to_json(), encoding="utf-8")
        self.to_chrome(path / "trace-chrome.json")

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read the trace that was saved in a folder, or in a file of that kind.

        Raises:
            DataError: in one line, where there is none, or what is there is no trace.
        """
        place = Path(path)
        file = place / _FILE if place.is_dir() else place
        try:
            return cls.from_json(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            what = f"has no {_FILE}" if place.is_dir() else "is not there"
            raise DataError(f"{path} {what}: name a folder that Trace.save has written, or its {_FILE}") from None
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror or error}") from None
        except ValueError as error:
            raise DataError(f"{file} is no trace: {error}") from None


def _waited(event: Event, idle: list[Interval]) -> float | None:
    """Since when a simulated rank has waited for this: it is idle when the event ends.

    A rank waits for a message to leave only after its last computation: then there is nothing else to do.
    """
    almost = event.end - 1e-12 - 1e-9 * abs(event.end)
    place = bisect_left(idle, (almost,)) - 1
    if event.computes or place < 0 or idle[place][1] < almost:
        return None
    if event.kind == "send":
        return max(idle[place][0], event.start) if place == len(idle) - 1 else None
    return idle[place][0]


# ── two traces beside each other ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Difference:
    """One number in both traces: first what was predicted, then what was measured."""

    name: str
    one: float
    other: float

    @property
    def ratio(self) -> float:
        """How many times larger the other is."""
        return self.other / self.one if self.one else float("nan" if not self.other else "inf")

    @property
    def error(self) -> float:
        """How much too large the first is, as a share of the other; negative if it is too small."""
        return self.one / self.other - 1 if self.other else 0.0


def compare(one: Trace, other: Trace) -> list[Difference]:
    """The numbers that matter, from both traces."""
    pairs = {
        "makespan": (one.makespan, other.makespan),
        "work of the busiest rank": (max(one.work), max(other.work)),
        "bubble": (one.bubble, other.bubble),
        "bubble fraction": (one.bubble_fraction, other.bubble_fraction),
        "exposed communication": (max(one.exposed_communication), max(other.exposed_communication)),
        "peak activations": (max(one.peak_activations), max(other.peak_activations)),
        "messages sent": (sum(one.messages_sent), sum(other.messages_sent)),
        "bytes sent": (sum(one.bytes_sent), sum(other.bytes_sent)),
    }
    return [Difference(name, first, second) for name, (first, second) in pairs.items()]
