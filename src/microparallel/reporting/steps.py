"""One step as the page shows it: what each rank did, where it waited and for whom, and when buckets arrived.

```
compute        forward ▒▒▒▒ backward ▒▒▒▒▒▒▒▒ waits ////▓▓▓▓ optimizer ▒▒
communication                     ░░░░░░░░░░░░░░░░░░████     ░ handed over, not everybody is there yet
                                                    │  └ back            █ under way
                                                    └ the last rank has come
```

Times are in microseconds from the step's first moment; whatever is told more than once has a number in a table.
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import astuple, replace
from functools import cached_property
from typing import Any

from microparallel.trace.intervals import Span as Interval
from microparallel.trace.intervals import outside, union
from microparallel.trace.parts import parts
from microparallel.trace.recording import Recording, Span

KINDS = ("forward", "backward", "optimizer", "collective", "send", "receive", "input half", "weight half")
WAITING, EXPOSED = 0, 1
_HALF = re.compile(r"([IW])\d+\.\d+")
_MOST_ROWS = 4  # of communication that runs at the same time; what is beyond shares the last
_MOST_ARRIVALS = 60
_LONGEST_TEXT = 200


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


def by_step(recording: Recording) -> dict[int, Recording]:
    """Each step alone, in order; those in which nobody computed anything belong to no training step.

    Such a one is at the end of many recordings: ranks agree that they are done.
    """
    found: dict[int, list[Span]] = defaultdict(list)
    for span in recording.spans:
        found[span.step].append(span)
    working = sorted(step for step, spans in found.items() if any(span.computes for span in spans))
    return {step: replace(recording, spans=found[step]) for step in working or sorted(found)}


class StepView:
    """One step, ready to be written down.

    Attributes:
        recording: that step alone.
        start: when it began.
        end: when all ranks had ended it.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.start = min(span.start for span in recording.spans)
        self.end = max(span.end for span in recording.spans)
        self._meetings = _meetings(recording)
        self._latest = {number: self._last_to_come(places) for number, places in enumerate(self._meetings)}
        self._meeting_of = {place: number for number, places in enumerate(self._meetings) for place in places}

    def written(self, names: Table, places: Table, most: int | None = None) -> dict[str, Any]:
        """Everything the page shows of it, or only that many of the longest bars."""
        kept = self._kept(most)
        blocked = sorted(self.blocked(kept), key=lambda row: row[1] - row[2])[:most]
        return {
            "step": self.recording.spans[0].step,
            "length": self._at(self.end),
            "spans": [self._row(place, names, places) for place in kept],
            "left_out": len(self.recording.spans) - len(kept),
            "blocked": [list(row) for row in sorted(blocked)],
            "parts": [[round(1e6 * part, 1) for part in astuple(rank)] for rank in parts(self.recording)],
            **self._arrivals(names),
        }

    def outline(self, names: Table, most: int) -> dict[str, Any]:
        """Only who did what when: what the page shows of a prediction, in that many of the longest bars."""
        rows = [
            [span.rank, KINDS.index(_look(span)), names.number(span.name), self._at(span.start), self._at(span.end)]
            for span in (self.recording.spans[place] for place in self._kept(most))
        ]
        return {"length": self._at(self.end), "spans": rows}

    def _at(self, time: float) -> float:
        return round(1e6 * (time - self.start), 1)

    def _kept(self, most: int | None) -> dict[int, int]:
        """Which spans are shown, by their place in the recording: the longest, if there are too many."""
        spans = self.recording.spans
        wanted = sorted(range(len(spans)), key=lambda place: -spans[place].duration)[:most]
        ordered = sorted(wanted, key=lambda place: (spans[place].rank, spans[place].start, -spans[place].end))
        return {place: number for number, place in enumerate(ordered)}

    def _row(self, place: int, names: Table, places: Table) -> list[Any]:
        span = self.recording.spans[place]
        begun = self.recording.begun.get(place)
        meeting = self._meeting_of.get(place)
        return [
            span.rank,
            KINDS.index(_look(span)),
            names.number(span.name),
            self._at(span.start),
            self._at(span.end),
            None if begun is None else self._at(begun),
            None if math.isnan(span.waited) else self._at(span.waited),
            span.bytes,
            meeting,
            None if meeting is None else self._latest[meeting],
            places.number(span.place) if span.place else None,
            self._rows[place],
        ]

    # ── rows: what happens at the same time stands below each other ────────────────────────────────────────────

    @cached_property
    def _rows(self) -> dict[int, int]:
        lanes = itertools.product(range(self.recording.ranks), (True, False))
        return dict(itertools.chain.from_iterable(self._rows_of(rank, computes) for rank, computes in lanes))

    def _rows_of(self, rank: int, computes: bool) -> Iterator[tuple[int, int]]:
        spans = self.recording.spans
        mine = [place for place, span in enumerate(spans) if span.rank == rank and span.computes == computes]
        free = [-math.inf] * _MOST_ROWS
        for place in sorted(mine, key=lambda place: (spans[place].start, -spans[place].end)):
            row = next((row for row, time in enumerate(free) if time <= spans[place].start), _MOST_ROWS - 1)
            free[row] = spans[place].end
            yield place, row

    # ── who waited for whom ────────────────────────────────────────────────────────────────────────────────────

    def _last_to_come(self, places: list[int]) -> int | None:
        """The rank whose coming began it: the last of a collective, the sender of a message."""
        spans = self.recording.spans
        needed = [place for place in places if spans[place].kind in ("collective", "send")]
        return spans[max(needed, key=lambda place: spans[place].start)].rank if needed else None

    def blocked(self, kept: dict[int, int]) -> Iterator[tuple[int, float, float, int, int | None, int]]:
        """When ranks had nothing to do: rank, from, to, what it was, the span that explains it, and for whom it was.

        These are the moments that `parts` counts as waiting and as exposed communication.
        """
        spans, begun = self.recording.spans, self.recording.begun
        last = max(spans, key=lambda span: span.end).rank
        for rank in range(self.recording.ranks):
            talking = [place for place, span in enumerate(spans) if span.rank == rank and not span.computes]
            waits = [place for place in talking if not math.isnan(spans[place].waited)]
            nothing_else = union((spans[place].waited, spans[place].end) for place in waits)
            under_way = union((begun[place], spans[place].end) for place in talking)
            waiting = outside(nothing_else, under_way)
            exposed = outside(nothing_else, waiting)
            before = [(spans[place].waited, begun[place], place) for place in waits]
            after = [(begun[place], spans[place].end, place) for place in talking]
            for what, times, candidates in ((WAITING, waiting, before), (EXPOSED, exposed, after)):
                for (start, end), place in zip(times, _explained(times, candidates), strict=True):
                    whom = self._latest.get(self._meeting_of.get(place, -1)) if place is not None else None
                    number = None if place is None else kept.get(place)
                    yield rank, self._at(start), self._at(end), what, number, last if whom is None else whom
            done = max((span.end for span in spans if span.rank == rank), default=self.end)
            if done < self.end:
                yield rank, self._at(done), self._at(self.end), WAITING, None, last

    # ── collectives that were handed over while backward ran ───────────────────────────────────────────────────

    def _arrivals(self, names: Table) -> dict[str, Any]:
        spans = self.recording.spans
        backward = [
            union((span.start, span.end) for span in spans if span.rank == rank and span.kind == "backward")
            for rank in range(self.recording.ranks)
        ]
        found: list[list[Any]] = []
        for number, places in enumerate(self._meetings):
            members = [spans[place] for place in places]
            if members[0].kind == "collective" and any(_inside(one.start, backward[one.rank]) for one in members):
                met = max(one.start for one in members)
                handed = sorted([one.rank, self._at(one.start)] for one in members)
                back = self._at(max(one.end for one in members))
                sizes = max(one.bytes for one in members)
                name = names.number(members[0].name)
                found.append([number, name, sizes, handed, self._at(met), back, self._latest[number]])
        found.sort(key=lambda row: min(time for _, time in row[3]))
        times = [interval for intervals in backward for interval in intervals]
        window = [self._at(min(start for start, _ in times)), self._at(max(end for _, end in times))] if times else None
        return {"arrivals": found[:_MOST_ARRIVALS], "all_arrivals": len(found), "backward": window}


def _look(span: Span) -> str:
    """What it is shown as: the halves of a split backward have colours of their own."""
    half = _HALF.match(span.name) if span.kind == "backward" else None
    return span.kind if half is None else {"I": "input half", "W": "weight half"}[half[1]]


def _meetings(recording: Recording) -> list[list[int]]:
    """The spans that belong together: of one collective, or the send and the receive of one message."""
    found: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for place, span in enumerate(recording.spans):
        if span.kind == "collective":
            found["collective", span.group, span.number].append(place)
        elif not span.computes:
            ends = (span.rank, span.peer) if span.kind == "send" else (span.peer, span.rank)
            found["message", ends, span.number].append(place)
    return list(found.values())


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
