"""Name the rank that the others wait for, while the run goes on.

```
a step of rank 0    │ own work     │ waits                  │
          rank 1    │ own work      │ waits                 │
          rank 2    │ own work                           │ ▏│    ◀ rank 2 is slow
```

A rank's own work in a step is the time in which it does not wait for others. The ranks tell each other theirs with the
question that they ask each other anyway (`agreement.py`), so nothing more is sent than some numbers in that.

A rank is named if it is clear and lasts: in the median of all questions of some seconds it takes half as long again as
the others' median, in all and for each of its samples (one that was given more samples is not slow), and a part of each
step is lost by that. Only ranks that do the same are compared: those with the same stage of a pipeline. Where there are
more ranks than cores, all are slow alike, and none is named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from microparallel.text import show_seconds

_SECONDS, _QUESTIONS = 5.0, 3  # the least that a finding is made of
_CLEARLY, _STILL = 1.5, 1.25  # times as long as the others: to be named, and to remain so
_LOST = 0.1  # the part of a step that the others lose at the least


@dataclass(frozen=True)
class Work:
    """One rank's own work since the last question, in whole numbers, as they are sent.

    Attributes:
        microseconds: a step.
        samples: in all these steps.
    """

    microseconds: int
    samples: int


@dataclass(frozen=True)
class Slow:
    """A rank for which others wait.

    Attributes:
        rank: which it is.
        others: with which it was compared.
        work: its own, in seconds a step.
        usual: the median of the others'.
        lost: the part of a step for which the others wait.
    """

    rank: int
    others: tuple[int, ...]
    work: float
    usual: float
    lost: float

    def __str__(self) -> str:
        own, usual = show_seconds(self.work), show_seconds(self.usual)
        theirs, they = f"the others' {usual} (median)", "the others wait"
        if len(self.others) == 1:
            theirs, they = f"rank {self.others[0]}'s {usual}", f"rank {self.others[0]} waits"
        return (
            f"rank {self.rank} is slow: its own work takes {own} a step, {theirs}; {they} for it "
            f"{self.lost:.0%} of the time"
        )


class Stragglers:
    """What all ranks know of each other's work; every rank counts its own, and rank 0 speaks.

    Args:
        columns: the ranks that do the same, for each stage of a pipeline; without one, all of them.
        found: called when other ranks are slow than before: with those that are slow now, those that were, and each
            rank's own work in seconds a step.
        clock: seconds.
    """

    def __init__(
        self,
        columns: Sequence[Sequence[int]],
        found: Callable[[list[Slow], list[int], list[float]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._columns = columns
        self._found = found
        self._clock = clock
        self._steps, self._work, self._samples = 0, 0.0, 0  # since the last question
        self._begun = clock()
        self._all_steps = 0
        self._heard: list[list[Work]] = []  # each question's answers, by rank
        self._named: list[int] = []

    def after_step(self, seconds: float, waited: float, samples: int) -> None:
        """Count a step of this rank, in which it has waited for so many of these seconds."""
        self._steps += 1
        self._work += max(0.0, seconds - waited)
        self._samples += samples

    def answer(self) -> list[int]:
        """What this rank tells the others."""
        own = [round(self._work / max(1, self._steps) * 1e6), self._samples]
        self._all_steps += self._steps
        self._steps, self._work, self._samples = 0, 0.0, 0
        return own

    def hear(self, answers: Sequence[Sequence[int]]) -> None:
        """Take in what all ranks have told, and say who is slow if that has changed."""
        self._heard.append([Work(*answer) for answer in answers])
        seconds = self._clock() - self._begun
        if len(self._heard) < _QUESTIONS or seconds < _SECONDS:
            return
        by_rank = [*zip(*self._heard, strict=True)]
        work = [median(one.microseconds for one in row) / 1e6 for row in by_rank]
        samples = [sum(one.samples for one in row) for row in by_rank]
        slow = self._slow(work, samples, seconds / max(1, self._all_steps))
        before, self._named = self._named, [one.rank for one in slow]
        if self._named != before:
            self._found(slow, before, work)
        self._begun, self._all_steps, self._heard = self._clock(), 0, []

    def _slow(self, work: Sequence[float], samples: Sequence[int], step: float) -> list[Slow]:
        for_each = [one / max(1, many) for one, many in zip(work, samples, strict=True)]
        found = []
        for column in self._columns:
            for rank in column if len(column) > 1 else ():
                others = tuple(other for other in column if other != rank)
                usual = median(work[other] for other in others)
                least = (_STILL if rank in self._named else _CLEARLY) * usual
                least_for_each = least / usual * median(for_each[other] for other in others) if usual else 0.0
                lost = (work[rank] - usual) / max(step, work[rank])
                if work[rank] > least and for_each[rank] > least_for_each and lost >= _LOST:
                    found.append(Slow(rank, others, work[rank], usual, lost))
        return found


def columns_of(world_size: int, stages: int) -> list[range]:
    """The ranks that hold the same stage of a pipeline; with one stage, all ranks."""
    return [range(stage, world_size, stages) for stage in range(stages)]
