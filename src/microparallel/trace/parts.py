"""Where did a step's time go? Every moment of every rank belongs to exactly one part.

```
rank 0  forward ▒▒▒▒ backward ▒▒▒▒▒▒▒▒▒▒▒▒ waits ····▓▓▓▓ optimizer ▒▒
                       all_reduce ─────────────────┤    │
rank 1  forward ▒▒▒▒▒▒▒▒ backward ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▓▓▓▓ optimizer ▒▒
                                                   └ only now has everybody come: what is before it is waiting
```

Communication that runs while the rank computes is hidden; it costs nothing that could be seen here, and is told apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from microparallel.trace.intervals import Span as Interval
from microparallel.trace.intervals import length, outside, union
from microparallel.trace.recording import Recording, Span


@dataclass(frozen=True, slots=True)
class Parts:
    """One rank's step, in seconds; all but `hidden` add up to `step`.

    Attributes:
        step: from its first span's start to the end of all ranks' last.
        forward: computing forward.
        backward: computing backward.
        optimizer: updating the weights.
        communicating: nothing but communication went on: it was exposed.
        waiting: for other ranks.
        other: between the spans: data, logging, Python.
        hidden: communication that ran while the rank computed.
    """

    step: float
    forward: float
    backward: float
    optimizer: float
    communicating: float
    waiting: float
    other: float
    hidden: float

    @property
    def computing(self) -> float:
        """All that is computed."""
        return self.forward + self.backward + self.optimizer


def parts(recording: Recording) -> list[Parts]:
    """For each rank, where the time between the first span's start and the last span's end went."""
    start = min((span.start for span in recording.spans), default=0.0)
    end = max((span.end for span in recording.spans), default=0.0)
    begun = {id(recording.spans[place]): time for place, time in recording.begun.items()}
    return [_parts_of(spans, begun, (start, end)) for spans in recording.by_rank]


def _parts_of(spans: list[Span], begun: dict[int, float], whole: Interval) -> Parts:
    talking = [span for span in spans if not span.computes]
    blocked = union((span.waited, span.end) for span in talking if not math.isnan(span.waited))
    under_way = union((begun.get(id(span), span.start), span.end) for span in talking)
    exposed = _both(blocked, under_way)
    computing = outside(_of(spans, "forward", "backward", "optimizer"), blocked)
    waiting = outside(blocked, under_way)
    # A forward inside a backward is a recomputation, and counts to the backward it is part of.
    optimizer = outside(_of(spans, "optimizer"), blocked)
    backward = outside(outside(_of(spans, "backward"), blocked), optimizer)
    forward = outside(computing, union([*optimizer, *backward]))
    busy = length(union([*computing, *blocked]))
    step = whole[1] - whole[0]
    # At the end of a step, ranks that are done wait for the last one.
    last = max((span.end for span in spans), default=whole[1])
    at_the_end = whole[1] - last
    return Parts(
        step=step,
        forward=length(forward),
        backward=length(backward),
        optimizer=length(optimizer),
        communicating=length(exposed),
        waiting=length(waiting) + at_the_end,
        other=step - busy - at_the_end,
        hidden=length(_both(under_way, computing)),
    )


def _of(spans: Iterable[Span], *kinds: str) -> list[Interval]:
    return union((span.start, span.end) for span in spans if span.kind in kinds)


def _both(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """Where both are."""
    return outside(one, outside(one, other))
