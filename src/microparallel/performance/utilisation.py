"""Utilisation: which share of a step each rank computes, communicates and waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from microparallel.trace import Trace

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
