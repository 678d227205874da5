"""Where did a step's time go? Every moment of every rank belongs to exactly one part.

```
rank 0  forward ▒▒▒▒ backward ▒▒▒▒▒▒▒▒▒▒▒▒ waits ····▓▓▓▓ optimizer ▒▒
                       all_reduce ─────────────────┤    │
rank 1  forward ▒▒▒▒▒▒▒▒ backward ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▓▓▓▓ optimizer ▒▒
                                                   └ only now has every rank come: what is before it is waiting
```

Communication that runs while the rank computes takes none of the step's time. It is counted apart, as `hidden`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from microparallel.trace.event import Event
from microparallel.trace.intervals import Interval, length, outside, union
from microparallel.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class Parts:
    """One rank's step, in seconds; all but `hidden` add up to `step`.

    Attributes:
        step: from its first event's start to the end of all ranks' last.
        forward: spent on forwards.
        backward: spent on backwards.
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


def pieces_of(trace: Trace) -> list[dict[str, list[Interval]]]:
    """For each rank, the times in which it computed forward, backward and the optimizer, communicated, and waited.

    No two of them overlap; the time that is in none of them is other.
    """
    return [_pieces(trace, rank) for rank in range(trace.ranks)]


def _pieces(trace: Trace, rank: int) -> dict[str, list[Interval]]:
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


def _of(events: list[Event], kind: str) -> list[Interval]:
    return union((event.start, event.end) for event in events if event.kind == kind)


def _both(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """Where both are."""
    return outside(one, outside(one, other))


# ── utilisation: the shares of computing, communicating and waiting ───────────────────────────────────────────────────

_BAR = 24  # columns; a line with its numbers then fits into 80
_SIGNS = "█░·"


@dataclass(frozen=True)
class Shares:
    """What one rank did with the makespan, in fractions that sum to 1.

    Communication that runs behind computation costs nothing, so only the rest of it counts; and a rank that waits for
    a message does not communicate.
    """

    computing: float
    communicating: float
    waiting: float


def shares(trace: Trace) -> list[Shares]:
    """The shares of each rank, of a step that was run or simulated."""
    whole = trace.makespan
    if not whole:
        return [Shares(0.0, 0.0, 1.0) for _ in range(trace.ranks)]
    times = zip(trace.work, trace.exposed_communication, trace.waiting, strict=True)
    return [Shares(work / whole, exposed / whole, waiting / whole) for work, exposed, waiting in times]


def utilisation_table(trace: Trace) -> str:
    """A bar for each rank and what it stands for, in at most 80 columns.

    ```
    rank 0  ███████████████░·········  62 % computes   3 % communicates  35 % waits
    ```
    """
    digits = len(str(trace.ranks - 1))
    return "\n".join(f"rank {rank:>{digits}}  {_line(share)}" for rank, share in enumerate(shares(trace)))


def _line(share: Shares) -> str:
    fractions = (share.computing, share.communicating, share.waiting)
    bar = "".join(sign * count for sign, count in zip(_SIGNS, apportion(fractions, _BAR), strict=True))
    computes, communicates, waits = apportion(fractions, 100)
    return f"{bar} {computes:>3} % computes {communicates:>3} % communicates {waits:>3} % waits"


def apportion(fractions: Sequence[float], total: int) -> list[int]:
    """Whole numbers that are nearest to these fractions of a total and still sum to it: 62 + 3 + 35 is 100."""
    exact = [fraction * total for fraction in fractions]
    whole = [max(0, int(number)) for number in exact]
    most_was_cut = sorted(range(len(exact)), key=lambda index: whole[index] - exact[index])
    for index in most_was_cut[: total - sum(whole)]:
        whole[index] += 1
    return whole
