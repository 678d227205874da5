"""Ranks, times and numbers, as a sentence has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from microparallel.flight.record import Record, Snapshot
from microparallel.text import show_age


def names(ranks: Iterable[int]) -> str:
    """As in `rank 2` and `ranks 0, 1`."""
    listed = list(ranks)
    return f"{'rank' if len(listed) == 1 else 'ranks'} {', '.join(map(str, listed))}"


def verb(ranks: Sequence[int], one: str, several: str) -> str:
    """The form that goes with so many ranks."""
    return one if len(ranks) == 1 else several


def ordinal(number: int) -> str:
    """As in `41st`."""
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def age(record: Record, now: float) -> str:
    """For how long a call has been waited for."""
    return show_age((record.end or now) - record.since)


def whereabouts(one: Snapshot) -> str:
    """What a rank does that is in no call, in words that follow "it is"."""
    if one.here is not None:
        doing = f", doing {one.doing}" if one.doing else ""
        return f"in {one.here.in_words}{doing}"
    if one.doing:
        return f"doing {one.doing}"
    if one.stack:
        return f"inside of a library, in {one.stack[0].in_words}, where no line of your code led"
    return "somewhere that it does not tell"


def last_call(one: Snapshot) -> str:
    """The newest call of a rank, with its time."""
    last = one.last
    if last is None:
        return "it has made no call"
    return f"its last call was {last}, {show_age(one.now - (last.end or last.begin))} ago"


def at_step(one: Snapshot) -> str:
    """As in ` at step 120`; empty where nobody counts."""
    return "" if one.step is None else f" at step {one.step}"
