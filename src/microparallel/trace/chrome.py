"""The Chrome trace format, which Perfetto opens: one process a rank, and an arrow from each send to its receive."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from microparallel.trace.event import Event
from microparallel.trace.meetings import meetings
from microparallel.trace.trace import Trace

# Viewers draw bars of one row inside each other, so what runs at the same time needs rows of its own.
_ROWS = ("compute", "collectives", "send", "receive and add")


def write_chrome(trace: Trace, path: Path, seconds_per_unit: float) -> None:
    """Write a trace; times become microseconds."""
    scale = 1e6 * seconds_per_unit
    entries = [*_names(trace.ranks), *(_bar(event, scale) for event in trace.events), *_arrows(trace.events, scale)]
    path = path.resolve()  # a link stays one, and what it leads to is replaced
    aside = path.with_name(f"{path.name}.part")
    aside.write_text(json.dumps({"traceEvents": entries, "displayTimeUnit": "ms"}))
    aside.replace(path)  # a reader sees the whole trace, or none


def _row(event: Event) -> int:
    return 0 if event.computes else {"collective": 1, "send": 2}.get(event.kind, 3)


def _names(ranks: int) -> Iterator[dict[str, Any]]:
    for rank in range(ranks):
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
        for row, name in enumerate(_ROWS):
            yield {"ph": "M", "pid": rank, "tid": row, "name": "thread_name", "args": {"name": name}}


def _bar(event: Event, scale: float) -> dict[str, Any]:
    details = {"step": event.step, "bytes": float(event.bytes), "place": event.place}
    return {
        "ph": "X",
        "name": event.name,
        "cat": event.kind,
        "pid": event.rank,
        "tid": _row(event),
        "ts": float(event.start * scale),
        "dur": float(event.duration * scale),
        "args": {name: value for name, value in details.items() if value},
    }


def _arrows(events: list[Event], scale: float) -> Iterator[dict[str, Any]]:
    for number, places in enumerate(meetings(events)):
        ends = {events[place].kind: events[place] for place in places}
        if "send" in ends and "receive" in ends:
            send, receive = ends["send"], ends["receive"]
            arrow = {"name": send.name, "cat": "message", "id": number}
            yield {**arrow, "ph": "s", "pid": send.rank, "tid": _row(send), "ts": float(send.start * scale)}
            # "bp": "e" ties the arrow's head to the bar it points at.
            yield {
                **arrow,
                "ph": "f",
                "bp": "e",
                "pid": receive.rank,
                "tid": _row(receive),
                "ts": float(receive.end * scale),
            }
