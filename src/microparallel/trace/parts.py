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
    whole = _whole(recording)
    found = []
    for spans, pieces in zip(recording.by_rank, pieces_of(recording), strict=True):
        lengths = {name: length(times) for name, times in pieces.items()}
        under_way = _under_way(spans, _begun(recording))
        computing = union([*pieces["forward"], *pieces["backward"], *pieces["optimizer"]])
        step = whole[1] - whole[0]
        other = step - sum(lengths.values())
        found.append(Parts(step=step, other=other, hidden=length(_both(under_way, computing)), **lengths))
    return found


def pieces_of(recording: Recording) -> list[dict[str, list[Interval]]]:
    """For each rank, the times in which it computed forward, backward and the optimizer, communicated, and waited.

    They are apart from each other; what is in none of them is other.
    """
    begun, whole = _begun(recording), _whole(recording)
    return [_pieces(spans, begun, whole) for spans in recording.by_rank]


def _pieces(spans: list[Span], begun: dict[int, float], whole: Interval) -> dict[str, list[Interval]]:
    talking = [span for span in spans if not span.computes]
    blocked = union((span.waited, span.end) for span in talking if not math.isnan(span.waited))
    under_way = _under_way(spans, begun)
    # A forward inside a backward is a recomputation, and counts to the backward it is part of.
    optimizer = outside(_of(spans, "optimizer"), blocked)
    backward = outside(outside(_of(spans, "backward"), blocked), optimizer)
    forward = outside(outside(_of(spans, "forward"), blocked), union([*optimizer, *backward]))
    # At the end of a step, ranks that are done wait for the last one.
    last = max((span.end for span in spans), default=whole[1])
    return {
        "forward": forward,
        "backward": backward,
        "optimizer": optimizer,
        "communicating": _both(blocked, under_way),
        "waiting": union([*outside(blocked, under_way), (last, whole[1])]),
    }


def _whole(recording: Recording) -> Interval:
    start = min((span.start for span in recording.spans), default=0.0)
    return start, max((span.end for span in recording.spans), default=0.0)


def _begun(recording: Recording) -> dict[int, float]:
    return {id(recording.spans[place]): time for place, time in recording.begun.items()}


def _under_way(spans: Iterable[Span], begun: dict[int, float]) -> list[Interval]:
    """When communication could go on: all it needed had come, and it had not ended."""
    return union((begun.get(id(span), span.start), span.end) for span in spans if not span.computes)


def _of(spans: Iterable[Span], *kinds: str) -> list[Interval]:
    return union((span.start, span.end) for span in spans if span.kind in kinds)


def _both(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """Where both are."""
    return outside(one, outside(one, other))
