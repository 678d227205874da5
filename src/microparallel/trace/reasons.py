"""Why did an operation begin when it did, and not earlier?"""

from __future__ import annotations

from collections.abc import Iterator

from microparallel.program import AllReduce, Broadcast, Recv, Rules, Value
from microparallel.trace.event import Event
from microparallel.trace.trace import Trace


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
    makers: dict[Value, Event] = {value: event for event in events for value in rules.makes(event.op)}
    free = begin
    for event in events:
        if not event.computes:
            continue
        if event.start > free:
            given = [(makers[value].end, value) for value in rules.needs(event.op) if value in makers]
            _, value = max(given, key=lambda pair: pair[0], default=(0, None))
            yield event, _words(rank, event, value, makers) if value is not None else f"{event.op} began late"
        free = event.end


def _words(rank: int, event: Event, value: Value, makers: dict[Value, Event]) -> str:
    maker = makers[value].op
    if isinstance(maker, Recv):
        return f"rank {rank} waited for {value} from rank {maker.source} before {event.op}"
    if isinstance(maker, AllReduce):
        return f"rank {rank} waited for the all-reduce of {value} before {event.op}"
    if isinstance(maker, Broadcast):
        return f"rank {rank} waited for the broadcast of {value} before {event.op}"
    return f"rank {rank} waited for {maker} before {event.op}"
