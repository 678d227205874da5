"""Which communication belongs together, when it could begin, and why a rank had to wait."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from microparallel.collectives import group_kind
from microparallel.program import GroupOp, Observed, Op, Recv, Rules, Value
from microparallel.trace.event import Event
from microparallel.trace.trace import Trace


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
    """Give recorded communication its start: the moment when all that it needs has come.

    A rank records when it asked for communication, and takes that as the start. Where it knows the real start of a
    message, it has set `issued`, and the event stays as it is. Of a collective it may know when it began itself, as on
    a GPU whose stream had other work before: then all begin when the last has.
    """
    result = list(events)
    for places in meetings(events):
        latest = max((events[place].start for place in needed(events, places)), default=-math.inf)
        for place in places:
            event = events[place]
            if event.issued is not None and event.kind != "collective":
                continue
            result[place] = event._replace(issued=event.asked, start=min(event.end, max(latest, event.start)))
    return result


# ── why an operation began no earlier ─────────────────────────────────────────────────────────────────────────────────


def reasons(trace: Trace) -> dict[int, str]:
    """For each compute event that its rank had to wait for: why, in words. Keys are places in `trace.events`."""
    places = {id(event): place for place, event in enumerate(trace.events)}
    begin = min((event.start for event in trace.events), default=0)
    found: dict[int, str] = {}
    for rank, events in enumerate(trace.by_rank):
        rules = Rules(trace.followed.goal, [event.op for event in events])
        for event, reason in _waits(rank, events, rules, begin):
            found[places[id(event)]] = reason
    return found


def _waits(rank: int, events: list[Event], rules: Rules, begin: float) -> Iterator[tuple[Event, str]]:
    makers: defaultdict[Value, list[Event]] = defaultdict(list)  # several where it was made again
    for event in events:
        for value in rules.makes(event.op):
            makers[value].append(event)
    free = begin
    for event in events:
        if not event.computes:
            continue
        if event.start > free:
            # Of what was made again, later versions come after this event.
            before = [
                (maker, value)
                for value in rules.needs(event.op)
                for maker in makers[value]
                if maker.start <= event.start
            ]
            if before:
                maker, value = max(before, key=lambda pair: pair[0].end)
                yield event, _words(rank, event, value, maker.op)
            else:
                yield event, f"{event.op} began late"
        free = event.end


def _words(rank: int, event: Event, value: Value, maker: Op) -> str:
    if isinstance(maker, Recv):
        return f"rank {rank} waited for {value} from rank {maker.source} before {event.op}"
    if isinstance(maker, GroupOp):
        return f"rank {rank} waited for the {group_kind(maker)} of {maker.value} before {event.op}"
    return f"rank {rank} waited for {maker} before {event.op}"
