"""The recorded steps of a run, as many of them as a page can hold, with the prediction beside them."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from dataclasses import astuple
from typing import Any

from microparallel.reporting.steps import KINDS, WAITING, StepView, Table, by_step
from microparallel.trace import Difference, Trace
from microparallel.trace.parts import Parts, parts

# In characters: a page has to stay below 2 MB, and to open on a phone.
_ROOM = 1_300_000
_ROOM_FOR_PREDICTIONS = 300_000
_MOST_PREDICTED = 6000  # bars of one step


class Measured:
    """What was recorded.

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
        self._views = {number: StepView(step) for number, step in self.steps.items()}
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
        """For how many seconds others waited for each rank, in all steps, the most first."""
        found: dict[int, float] = defaultdict(float)
        for view in self._views.values():
            for _, start, end, what, _, whom in view.blocked({}):
                if what == WAITING:
                    found[whom] += (end - start) / 1e6
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def written(self) -> dict[str, Any]:
        """Everything the page shows of it."""
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


def _size(content: Any) -> int:
    return len(json.dumps(content, separators=(",", ":")))
