"""A trace in a file: as JSON, which reads back, and in the Chrome trace format, which Perfetto opens."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from microparallel.errors import ProgramError
from microparallel.program import Kind, Observed, Op, from_text, lane, parse_op, to_text
from microparallel.text import without_nan
from microparallel.trace.event import Event
from microparallel.trace.meetings import meetings, met
from microparallel.trace.memory import Sizes
from microparallel.trace.trace import Trace

FORMAT = 2
_COLUMNS = ("rank", "op", "kind", *Event._fields[3:])  # an operation says itself which lane it keeps busy


def to_json(trace: Trace) -> str:
    """Write a trace as JSON: a table of its events, and what is known about all of them.

    An operation of a program stands there as its text, and has no kind; an observed one as its name and kind.
    """
    head = {
        "format": FORMAT,
        "ranks": trace.ranks,
        "clock_error": trace.clock_error,
        "about": trace.about,
        "simulated": trace.simulated,
        "program": None if trace.program is None else to_text(trace.program),
        "sizes": _written_sizes(trace.sizes),
    }
    return json.dumps({**head, "columns": _COLUMNS, "events": [_row(event) for event in trace.events]})


def _row(event: Event) -> list[Any]:
    kind = event.op.kind if isinstance(event.op, Observed) else None
    return [event.rank, str(event.op), kind, *event[3:]]


def from_json(text: str) -> Trace:
    """Read a trace back; raises `ValueError`, in one line, if any part of the text makes no sense."""
    try:
        return _trace(json.loads(text))
    except KeyError as error:
        raise ValueError(f"it has no {error}") from None
    except (TypeError, AttributeError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from None


def _trace(content: Any) -> Trace:
    if not isinstance(content, dict):
        raise ValueError(f"this is a {type(content).__name__}, not an object")
    if content["format"] not in (1, FORMAT):
        raise ValueError(f"its format is {content['format']!r}, and this version reads up to {FORMAT}")
    ranks, about, error = content["ranks"], content["about"], content["clock_error"]
    if not isinstance(ranks, int) or ranks < 1 or not isinstance(about, dict):
        raise ValueError("it does not say how many ranks there were, and what they ran")
    if not math.isfinite(error):
        raise ValueError(f"its clocks are {error} seconds apart")
    old = content["format"] == 1
    events = []
    for number, row in enumerate(content["spans" if old else "events"]):
        event = (_old_event if old else _event)(dict(zip(content["columns"], row, strict=True)))
        if event is None or not _makes_sense(event, ranks):
            raise ValueError(f"event {number} makes no sense: {row}")
        events.append(event)
    program = content.get("program")
    return Trace(
        met(events) if old else events,
        None if program is None else from_text(program),
        ranks,
        error,
        about,
        bool(content.get("simulated", False)),
        _read_sizes(content.get("sizes")),
    )


def _written_sizes(sizes: Sizes | Mapping[int, Sizes] | None) -> dict[str, Any] | None:
    if sizes is None or isinstance(sizes, Sizes):
        return None if sizes is None else asdict(sizes)
    return {"steps": {str(step): asdict(own) for step, own in sizes.items()}}


def _read_sizes(content: Any) -> Sizes | dict[int, Sizes] | None:
    """What `_written_sizes` wrote; a file of an earlier version has none."""
    if content is None:
        return None
    if "steps" in content:
        return {int(step): _checked(Sizes(**own)) for step, own in content["steps"].items()}
    return _checked(Sizes(**content))


def _checked(sizes: Sizes) -> Sizes:
    for kind, size in asdict(sizes).items():
        numbers = size if isinstance(size, list) else [] if size is None else [size]
        if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
            raise ValueError(f"its sizes make no sense: {kind} {size}")
    return sizes


def _old_event(row: dict[str, Any]) -> Event | None:
    """One row of format 1: it has the time when the rank asked, not the start, and names, not operations."""
    name, kind = row.pop("name"), row["kind"]
    row["kind"] = None if isinstance(name, str) and kind in get_args(Kind) and _parsed(name) is not None else kind
    sends = kind == "send"
    return _event({**row, "op": name, "messages": int(sends), "sent": row["bytes"] if sends else 0})


def _event(row: dict[str, Any]) -> Event | None:
    name, kind = row.pop("op"), row.pop("kind")
    row["group"] = tuple(row["group"])
    if row.get("activations") is not None:
        row["activations"] = tuple(row["activations"])
    if not isinstance(name, str):
        return None
    if kind is not None:
        op: Op | None = Observed(name, kind) if kind in get_args(Kind) else None
    else:
        op = _parsed(name)
    return None if op is None else Event(lane=lane(op), op=op, **row)


def _parsed(text: str) -> Op | None:
    try:
        return parse_op(text)
    except ProgramError:
        return None


def _makes_sense(event: Event, ranks: int) -> bool:
    counts = (event.rank, event.step, event.number, event.messages, *event.group)
    members = (event.rank, *event.group, *(() if event.peer is None else (event.peer,)))
    return (
        isinstance(event.place, str)
        and all(isinstance(count, int) for count in counts)
        and all(isinstance(rank, int) and 0 <= rank < ranks for rank in members)
        and all(isinstance(size, int | float) and math.isfinite(size) for size in (event.bytes, event.sent))
        and math.isfinite(event.start)
        and event.start <= event.end < math.inf
        and all(moment is None or math.isfinite(moment) for moment in (event.waited, event.issued))
        and (event.activations is None or (len(event.activations) == 2 and all(map(math.isfinite, event.activations))))
    )


# ── Chrome's format ───────────────────────────────────────────────────────────────────────────────────────────────────

# Viewers draw bars of one row inside each other, so what runs at the same time needs rows of its own.
_ROWS = ("compute", "collectives", "send", "receive and add")


def write_chrome(trace: Trace, path: Path, seconds_per_unit: float) -> None:
    """Write a trace for Perfetto: a process for each rank, an arrow from each send to its receive, times in µs."""
    scale = 1e6 * seconds_per_unit
    entries = [*_names(trace.ranks), *(_bar(event, scale) for event in trace.events), *_arrows(trace.events, scale)]
    path = path.resolve()  # a link stays one, and what it leads to is replaced
    aside = path.with_name(f"{path.name}.part")
    known = without_nan({"about": trace.about, "clock_error": trace.clock_error})
    content = {"traceEvents": entries, "displayTimeUnit": "ms", "otherData": known}
    aside.write_text(json.dumps(content, default=str))
    aside.replace(path)  # a reader sees the whole trace, or none


def _chrome_row(event: Event) -> int:
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
        "tid": _chrome_row(event),
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
            yield {**arrow, "ph": "s", "pid": send.rank, "tid": _chrome_row(send), "ts": float(send.start * scale)}
            # "bp": "e" ties the arrow's head to the bar it points at.
            yield {
                **arrow,
                "ph": "f",
                "bp": "e",
                "pid": receive.rank,
                "tid": _chrome_row(receive),
                "ts": float(receive.end * scale),
            }
