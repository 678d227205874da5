"""Which communication belongs together, and when it could begin."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from microparallel.program import Observed
from microparallel.trace.event import Event


def meetings(events: Sequence[Event]) -> list[list[int]]:
    """The events that belong together, by their places: all of one collective, or a message's send and receive."""
    found: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for place, event in enumerate(events):
        if event.kind == "collective":
            named = None if isinstance(event.op, Observed) else event.op
            found["collective", event.group, named, event.number].append(place)
        elif event.kind == "send":
            found["message", event.rank, event.peer, event.number].append(place)
        elif event.kind == "receive":
            found["message", event.peer, event.rank, event.number].append(place)
    return list(found.values())


def needed(events: Sequence[Event], places: Iterable[int]) -> list[int]:
    """What must have come before a meeting begins: a collective needs every rank, a message its send."""
    return [place for place in places if events[place].kind != "receive"]


def met(events: Sequence[Event]) -> list[Event]:
    """Recorded events, of which each rank knows only when it asked: communication starts when all it needs has come.

    Where a rank knows better when something started, it says so (`issued` is set), and that stays.
    """
    result = list(events)
    for places in meetings(events):
        latest = max((events[place].asked for place in needed(events, places)), default=-math.inf)
        for place in places:
            event = events[place]
            if event.issued is not None:
                continue
            result[place] = event._replace(issued=event.asked, start=min(event.end, max(latest, event.asked)))
    return result
