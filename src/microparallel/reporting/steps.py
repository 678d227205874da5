"""The recorded steps of a run, as many of them as a page can hold, with the prediction beside them.

`Measured` is all of them; `StepView` is one, as the page shows it: what each rank did, where it waited and for which
rank, and when buckets arrived.

```
compute        forward ▒▒▒▒ backward ▒▒▒▒▒▒▒▒ waits ////▓▓▓▓ optimizer ▒▒
communication                     ░░░░░░░░░░░░░░░░░░████     ░ handed over, not every rank is there yet
                                                    │  └ back            █ under way
                                                    └ the last rank has come
```

Times are in microseconds from the step's first moment. A text that is needed more than once has a number in a `Table`.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import astuple, replace
from functools import cached_property
from typing import Any

from microparallel.drawing.memory import KINDS as memory_kinds
from microparallel.errors import UsageError
from microparallel.program import BackwardInput, BackwardWeight, Free
from microparallel.trace import Difference, Event, RankMemory, Trace
from microparallel.trace.intervals import Interval, outside, union
from microparallel.trace.meetings import meetings, needed
from microparallel.trace.memory import Kind as Held
from microparallel.trace.parts import Parts, parts

KINDS = ("forward", "backward", "optimizer", "collective", "send", "receive", "input half", "weight half")
WAITING, EXPOSED = 0, 1
_MOST_ROWS = 4  # of communication that runs at the same time; what is beyond shares the last
_MOST_ARRIVALS = 60
_LONGEST_TEXT = 200
# In characters: a page has to stay below 2 MB, and to open on a phone.
_ROOM = 1_300_000
_ROOM_FOR_PREDICTIONS = 300_000
_MOST_PREDICTED = 6000  # bars of one step
_MOST_MOMENTS, _MOST_MOMENTS_OF_ALL = 150, 4000  # of a rank's memory, and of all ranks'
_MOST_FOLLOWED = 4000  # events of a step: to find the program that a larger one has followed takes seconds


class Measured:
    """What was recorded of a run.

    Attributes:
        trace: all of it.
        steps: every recorded step.
        typical: the number of the step whose length is in the middle.
        parts: of every step, where each rank's time went.
    """

    def __init__(self, trace: Trace, predicted: Trace | None = None) -> None:
        self.trace = trace
        self.steps = by_step(trace)
        lengths = {number: step.makespan for number, step in self.steps.items()}
        self.typical = sorted(lengths, key=lambda number: (lengths[number], number))[(len(lengths) - 1) // 2]
        self.parts = {number: parts(step) for number, step in self.steps.items()}
        self._views = {number: StepView(step, trace.step(number)) for number, step in self.steps.items()}
        self._predicted = by_step(predicted) if predicted is not None else {}
        self._names, self._places = Table(), Table()

    @property
    def first_step(self) -> int:
        """How many steps the run had made before the trace's step 0."""
        first = self.trace.about.get("first step", 0)
        return first if isinstance(first, int) else 0

    def share(self, *names: str) -> float:
        """The share of all ranks' time in all steps that these parts took."""
        every = [rank for step in self.parts.values() for rank in step]
        whole = sum(rank.step for rank in every)
        return sum(getattr(rank, name) for rank in every for name in names) / whole if whole else 0.0

    @property
    def hidden_share(self) -> float | None:
        """How much of the communication was hidden; None if there was none."""
        hidden, exposed = self.share("hidden"), self.share("communicating")
        return hidden / (hidden + exposed) if hidden + exposed else None

    @property
    def length(self) -> float:
        """A typical step's length, in seconds."""
        return self.steps[self.typical].makespan

    @property
    def differences(self) -> list[Difference]:
        """What was predicted beside what was measured, of a typical step; nothing without a prediction."""
        if not self._predicted:
            return []
        predicted = self._predicted.get(self.typical, next(iter(self._predicted.values())))
        return predicted.compare(self.steps[self.typical])

    def waited_for(self) -> dict[int, float]:
        """For how many seconds other ranks waited for each rank, in all steps, the most first."""
        found: dict[int, float] = defaultdict(float)
        for view in self._views.values():
            for _, start, end, what, _, whom in view.blocked({}):
                if what == WAITING:
                    found[whom] += (end - start) / 1e6
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def written(self) -> dict[str, Any]:
        """Everything the page shows of the run."""
        steps = sorted(self._steps(), key=lambda step: int(step["step"]))
        return {
            "ranks": self.trace.ranks,
            "kinds": KINDS,
            "part_names": list(Parts.__dataclass_fields__),
            "steps": steps,
            "typical": self.typical,
            "first_step": self.first_step,
            "recorded_steps": len(self.steps),
            "mean_parts": self._mean_parts(),
            "predictions": self._predictions(steps),
            "held_kinds": [look.word for look in memory_kinds.values()],
            "names": self._names.texts,
            "places": self._places.texts,
        }

    def _steps(self) -> list[dict[str, Any]]:
        """The typical step, the slowest, and as many others as there is room for."""
        slowest = max(self.steps, key=lambda number: self.steps[number].makespan)
        found = [self._whole_or_pruned(self._views[self.typical])]
        room = _ROOM - _size(found)
        for number in dict.fromkeys([slowest, *self.steps]):
            if number == self.typical:
                continue
            step = self._views[number].written(self._names, self._places)
            room -= _size(step)
            if room < 0:
                break
            found.append(step)
        return found

    def _whole_or_pruned(self, view: StepView) -> dict[str, Any]:
        """A step without its shortest bars, if it would not fit with them."""
        most = min(len(view.trace.events), _ROOM // 50)
        while True:
            self._names, self._places = Table(), Table()
            step = view.written(self._names, self._places, most)
            if _size([step, self._names.texts, self._places.texts]) <= _ROOM or most <= 100:
                return step
            most = most * 2 // 3

    def _mean_parts(self) -> list[list[float]]:
        every = [[astuple(rank) for rank in step] for step in self.parts.values()]
        return [
            [round(1e6 * statistics.fmean(values), 1) for values in zip(*ranks, strict=True)]
            for ranks in zip(*every, strict=True)
        ]

    def _predictions(self, steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What was predicted, and in each step the number of its prediction; that of one step holds for all others."""
        if not self._predicted:
            return []
        first = next(iter(self._predicted))
        used: dict[int, int] = {}
        outlines: list[dict[str, Any]] = []
        for step in steps:
            number = step["step"] if step["step"] in self._predicted else first
            if number not in used:
                outline = StepView(self._predicted[number]).outline(self._names, _MOST_PREDICTED)
                if outlines and _size([*outlines, outline]) > _ROOM_FOR_PREDICTIONS:
                    continue
                used[number] = len(outlines)
                outlines.append(outline)
            step["predicted"] = used[number]
        return outlines


def by_step(trace: Trace) -> dict[int, Trace]:
    """Each step alone, in order, without those in which no rank computed: they belong to no training step.

    Many traces end with one: the ranks agree that they are done.
    """
    found: dict[int, list[Event]] = defaultdict(list)
    for event in trace.events:
        if not isinstance(event.op, Free):  # it takes no time that a page could show
            found[event.step].append(event)
    working = sorted(step for step, events in found.items() if any(event.computes for event in events))
    return {step: replace(trace, events=found[step]) for step in working or sorted(found)}


def _size(content: Any) -> int:
    return len(json.dumps(content, separators=(",", ":")))


# ── one step ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class StepView:
    """One step, ready to be written down.

    Attributes:
        trace: that step alone.
        start: when it began.
        end: when all ranks had ended it.
    """

    def __init__(self, trace: Trace, whole: Trace | None = None) -> None:
        self.trace = trace
        self._whole = whole or trace  # with the frees, which say when activations were let go
        self.start, self.end = trace.bounds
        self._meetings = meetings(trace.events)
        self._latest = {number: self._last_to_come(places) for number, places in enumerate(self._meetings)}
        self._meeting_of = {place: number for number, places in enumerate(self._meetings) for place in places}

    def written(self, names: Table, places: Table, most: int | None = None) -> dict[str, Any]:
        """Everything the page shows of this step, or only that many of the longest bars."""
        kept = self._kept(most)
        blocked = sorted(self.blocked(kept), key=lambda row: row[1] - row[2])[:most]
        return {
            "step": self.trace.events[0].step,
            "length": self._at(self.end),
            "bars": [self._row(place, names, places) for place in kept],
            "left_out": len(self.trace.events) - len(kept),
            "blocked": [list(row) for row in sorted(blocked)],
            "parts": self._parts,
            "held": self._held,
            **self._arrivals(names),
        }

    @cached_property
    def _parts(self) -> list[list[float]]:
        return [[round(1e6 * part, 1) for part in astuple(rank)] for rank in parts(self.trace)]

    @cached_property
    def _held(self) -> list[list[list[float]]] | None:
        """For each rank the moments at which what it holds changes, with the bytes of each kind; None if not known."""
        if len(self._whole.events) > _MOST_FOLLOWED:
            return None
        try:
            memory = self._whole.memory
        except UsageError:
            return None
        most = max(12, min(_MOST_MOMENTS, _MOST_MOMENTS_OF_ALL // len(memory)))
        return [
            [[self._at(time), *(round(sizes[kind]) for kind in memory_kinds)] for time, sizes in _highest(rank, most)]
            for rank in memory
        ]

    def outline(self, names: Table, most: int) -> dict[str, Any]:
        """Only which rank did what when: what the page shows of a prediction, in that many of the longest bars."""
        rows: dict[tuple[object, ...], list[Any]] = {}
        for place in self._kept(most):
            event = self.trace.events[place]
            row = [event.rank, KINDS.index(_look(event)), names.number(event.name)]
            # What was observed as a whole may be simulated in pieces, between which the rank waits.
            key = (*row,) if event.computes else (place,)
            known = rows.setdefault(key, [*row, self._at(event.asked), self._at(event.end)])
            known[-1] = self._at(event.end)
        return {"length": self._at(self.end), "bars": list(rows.values()), "held": self._held}

    def _at(self, time: float) -> float:
        return round(1e6 * (time - self.start), 1)

    def _kept(self, most: int | None) -> dict[int, int]:
        """Which events are shown, by their place in the trace: the longest, if there are too many."""
        events = self.trace.events
        wanted = sorted(range(len(events)), key=lambda place: events[place].asked - events[place].end)[:most]
        ordered = sorted(wanted, key=lambda place: (events[place].rank, events[place].asked, -events[place].end))
        return {place: number for number, place in enumerate(ordered)}

    def _row(self, place: int, names: Table, places: Table) -> list[Any]:
        event = self.trace.events[place]
        waited = self.trace.waits[place]
        meeting = self._meeting_of.get(place)
        return [
            event.rank,
            KINDS.index(_look(event)),
            names.number(event.name),
            self._at(event.asked),
            self._at(event.end),
            None if event.computes else self._at(event.start),
            None if waited is None else self._at(waited),
            event.bytes,
            meeting,
            None if meeting is None else self._latest[meeting],
            places.number(event.place) if event.place else None,
            self._rows[place],
        ]

    # ── rows: what happens at the same time stands below each other ────────────────────────────────────────────

    @cached_property
    def _rows(self) -> dict[int, int]:
        lanes = itertools.product(range(self.trace.ranks), (True, False))
        return dict(itertools.chain.from_iterable(self._rows_of(rank, computes) for rank, computes in lanes))

    def _rows_of(self, rank: int, computes: bool) -> Iterator[tuple[int, int]]:
        events = self.trace.events
        mine = [place for place, event in enumerate(events) if event.rank == rank and event.computes == computes]
        free = [-math.inf] * _MOST_ROWS
        for place in sorted(mine, key=lambda place: (events[place].asked, -events[place].end)):
            row = next((row for row, time in enumerate(free) if time <= events[place].asked), _MOST_ROWS - 1)
            free[row] = events[place].end
            yield place, row

    # ── who waited for whom ────────────────────────────────────────────────────────────────────────────────────

    def _last_to_come(self, places: list[int]) -> int | None:
        """The rank whose coming began it: the last of a collective, the sender of a message."""
        events = self.trace.events
        came = needed(events, places)
        return events[max(came, key=lambda place: events[place].asked)].rank if came else None

    def blocked(self, kept: dict[int, int]) -> Iterator[tuple[int, float, float, int, int | None, int]]:
        """When ranks had nothing to do: rank, from, to, waiting or exposed, the event that explains it, for which rank.

        These are the moments that `parts` counts as waiting and as exposed communication.
        """
        events, waits = self.trace.events, self.trace.waits
        last = max(events, key=lambda event: event.end).rank
        for rank in range(self.trace.ranks):
            talking = [place for place, event in enumerate(events) if event.rank == rank and not event.computes]
            waiting = outside(self.trace.blocked[rank], self.trace.communicating[rank])
            exposed = outside(self.trace.blocked[rank], waiting)
            before = [(since, events[place].start, place) for place in talking if (since := waits[place]) is not None]
            after = [(events[place].start, events[place].end, place) for place in talking]
            for what, times, candidates in ((WAITING, waiting, before), (EXPOSED, exposed, after)):
                for (start, end), place in zip(times, _explained(times, candidates), strict=True):
                    whom = self._latest.get(self._meeting_of.get(place, -1)) if place is not None else None
                    number = None if place is None else kept.get(place)
                    yield rank, self._at(start), self._at(end), what, number, last if whom is None else whom
            done = max((event.end for event in events if event.rank == rank), default=self.end)
            if done < self.end:
                yield rank, self._at(done), self._at(self.end), WAITING, None, last

    # ── collectives that were handed over while backward ran ───────────────────────────────────────────────────

    def _arrivals(self, names: Table) -> dict[str, Any]:
        events = self.trace.events
        backward = [
            union((event.start, event.end) for event in mine if event.kind == "backward") for mine in self.trace.by_rank
        ]
        found: list[list[Any]] = []
        for number, places in enumerate(self._meetings):
            members = [events[place] for place in places]
            if members[0].kind == "collective" and any(_inside(one.asked, backward[one.rank]) for one in members):
                handed = sorted([one.rank, self._at(one.asked)] for one in members)
                met = self._at(max(one.asked for one in members))
                back = self._at(max(one.end for one in members))
                sizes = max(one.bytes for one in members)
                name = names.number(members[0].name)
                found.append([number, name, sizes, handed, met, back, self._latest[number]])
        found.sort(key=lambda row: min(time for _, time in row[3]))
        times = [interval for intervals in backward for interval in intervals]
        window = [self._at(min(start for start, _ in times)), self._at(max(end for _, end in times))] if times else None
        return {"arrivals": found[:_MOST_ARRIVALS], "all_arrivals": len(found), "backward": window}


def _highest(memory: RankMemory, most: int) -> list[tuple[float, dict[Held, float]]]:
    """The moments of what a rank holds; of too many, those at which it is highest among their neighbours."""
    moments = memory.moments
    many = math.ceil(len(moments) / most)
    groups = (moments[at : at + many] for at in range(0, len(moments), many))
    return [max(group, key=lambda moment: sum(moment[1].values())) for group in groups]


def _look(event: Event) -> str:
    """The kind of bar of an event: the halves of a split backward have their own; to add belongs to receiving."""
    if isinstance(event.op, BackwardInput):
        return "input half"
    if isinstance(event.op, BackwardWeight):
        return "weight half"
    return "receive" if event.kind == "other" else event.kind


def _explained(times: Iterable[Interval], candidates: list[tuple[float, float, int]]) -> Iterator[int | None]:
    """For each of these times, which are in order, the candidate that covers most of it."""
    waiting = sorted(candidates)
    position, active = 0, list[tuple[float, float, int]]()
    for start, end in times:
        while position < len(waiting) and waiting[position][0] < end:
            active.append(waiting[position])
            position += 1
        active = [one for one in active if one[1] > start]
        best = max(((min(one[1], end) - max(one[0], start), one[2]) for one in active), default=None)
        yield None if best is None else best[1]


def _inside(time: float, intervals: list[Interval]) -> bool:
    place = bisect_right(intervals, (time, math.inf)) - 1
    return place >= 0 and time <= intervals[place][1]


class Table:
    """Numbers for texts, in the order in which they first came."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        """The number of a text, which is cut if it is very long."""
        text = text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"
        if text not in self._numbers:
            self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return self._numbers[text]
