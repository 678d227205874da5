"""The Chrome trace format, which Perfetto opens: one process a rank, and an arrow from each send to its receive."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from microparallel.program import Op, Recv, Send
from microparallel.trace.event import Event

# A rank sends and receives at the same time, and a viewer cannot draw two bars on one row.
_ROWS = ("compute", "send", "receive and reduce")


def write_chrome(events: Sequence[Event], ranks: int, path: Path, seconds_per_unit: float) -> None:
    """Write events as a Chrome trace; times become microseconds."""
    scale = 1e6 * seconds_per_unit
    entries = [*_names(ranks), *(_bar(event, scale) for event in events), *_arrows(events, scale)]
    path = path.resolve()  # a link stays one, and what it leads to is replaced
    aside = path.with_name(f"{path.name}.part")
    aside.write_text(json.dumps({"traceEvents": entries, "displayTimeUnit": "ms"}))
    aside.replace(path)  # whoever opens it sees the whole trace


def _row(event: Event) -> int:
    if isinstance(event.op, Send):
        return 1
    return 0 if event.lane == "compute" else 2


def _names(ranks: int) -> Iterator[dict[str, Any]]:
    for rank in range(ranks):
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
        for row, name in enumerate(_ROWS):
            yield {"ph": "M", "pid": rank, "tid": row, "name": "thread_name", "args": {"name": name}}


def _bar(event: Event, scale: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": str(event.op),
        "cat": _kind(event.op),
        "pid": event.rank,
        "tid": _row(event),
        "ts": float(event.start * scale),
        "dur": float(event.duration * scale),
        "args": {"bytes": float(event.bytes)} if event.messages else {},
    }


def _kind(op: Op) -> str:
    return type(op).__name__


def _arrows(events: Sequence[Event], scale: float) -> Iterator[dict[str, Any]]:
    """Messages of a channel arrive in order, so the n-th send of a channel belongs to its n-th receive."""
    sends: dict[tuple[int, int], list[Event]] = defaultdict(list)
    receives: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.start):
        if isinstance(event.op, Send):
            sends[event.rank, event.op.to].append(event)
        elif isinstance(event.op, Recv):
            receives[event.op.source, event.rank].append(event)
    number = 0
    for channel, sent in sends.items():
        for send, receive in zip(sent, receives[channel], strict=False):
            number += 1
            arrow = {"name": str(send.op), "cat": "message", "id": number}
            yield {**arrow, "ph": "s", "pid": send.rank, "tid": 1, "ts": float(send.start * scale)}
            # "bp": "e" ties the arrow's head to the bar it points at.
            end = float(receive.end * scale)
            yield {**arrow, "ph": "f", "bp": "e", "pid": receive.rank, "tid": 2, "ts": end}
