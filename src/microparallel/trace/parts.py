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

from dataclasses import dataclass

from microparallel.trace.event import Event
from microparallel.trace.intervals import Span, length, outside, union
from microparallel.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class Parts:
    """One rank's step, in seconds; all but `hidden` add up to `step`.

    Attributes:
        step: from its first event's start to the end of all ranks' last.
        forward: computing forward.
        backward: computing backward.
        optimizer: updating the weights.
        communicating: nothing but communication went on: it was exposed.
        waiting: for other ranks.
        other: between the events: data, logging, Python.
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


def parts(trace: Trace) -> list[Parts]:
    """For each rank, where the time between the first event's start and the last one's end went."""
    found = []
    for rank, pieces in enumerate(pieces_of(trace)):
        lengths = {name: length(times) for name, times in pieces.items()}
        computing = union([*pieces["forward"], *pieces["backward"], *pieces["optimizer"]])
        hidden = length(_both(trace.communicating[rank], computing))
        other = trace.makespan - sum(lengths.values())
        found.append(Parts(step=trace.makespan, other=other, hidden=hidden, **lengths))
    return found


def pieces_of(trace: Trace) -> list[dict[str, list[Span]]]:
    """For each rank, the times in which it computed forward, backward and the optimizer, communicated, and waited.

    They are apart from each other; what is in none of them is other.
    """
    return [_pieces(trace, rank) for rank in range(trace.ranks)]


def _pieces(trace: Trace, rank: int) -> dict[str, list[Span]]:
    events, blocked, under_way = trace.by_rank[rank], trace.blocked[rank], trace.communicating[rank]
    # A forward inside a backward is a recomputation, and counts to the backward it is part of.
    optimizer = outside(_of(events, "optimizer"), blocked)
    backward = outside(outside(_of(events, "backward"), blocked), optimizer)
    forward = outside(outside(_of(events, "forward"), blocked), union([*optimizer, *backward]))
    # At the end of a step, ranks that are done wait for the last one.
    end = trace.bounds[1]
    last = max((event.end for event in events), default=end)
    return {
        "forward": forward,
        "backward": backward,
        "optimizer": optimizer,
        "communicating": _both(blocked, under_way),
        "waiting": union([*outside(blocked, under_way), (last, end)]),
    }


def _of(events: list[Event], kind: str) -> list[Span]:
    return union((event.start, event.end) for event in events if event.kind == kind)


def _both(one: list[Span], other: list[Span]) -> list[Span]:
    """Where both are."""
    return outside(one, outside(one, other))
