"""Recording: what the ranks of any run did, in spans of time, on one clock.

A `Trace` knows the program that ran. A recording needs none: it is made of what could be seen from outside, such as
"backward", "all_reduce(float32[1024])" or "F0.3".
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

Kind = Literal["forward", "backward", "optimizer", "collective", "send", "receive"]
COMPUTE: tuple[Kind, ...] = ("forward", "backward", "optimizer")

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Span:
    """Something that one rank did.

    Attributes:
        rank: who.
        kind: what it was: computing, or talking to others.
        name: what it is called.
        start: when it began, in seconds.
        end: when it had ended.
        step: the training step it belongs to.
        waited: of communication, when the rank had nothing else to do but to wait for it; NaN if it never waited.
        bytes: how many were sent, or received.
        group: of a collective, the ranks that took part.
        number: which collective of its group it was, or which message of its channel, counted from 0.
        peer: of a message, the other rank.
        place: where in the user's code it was called.
    """

    rank: int
    kind: Kind
    name: str
    start: float
    end: float
    step: int = 0
    waited: float = math.nan
    bytes: int = 0
    group: tuple[int, ...] = ()
    number: int = 0
    peer: int | None = None
    place: str = ""

    @property
    def duration(self) -> float:
        """How long it took."""
        return self.end - self.start

    @property
    def computes(self) -> bool:
        """Whether the rank itself was at work."""
        return self.kind in COMPUTE


@dataclass(frozen=True)
class Recording:
    """What all ranks did.

    Attributes:
        ranks: how many there are.
        spans: what they did, on rank 0's clock, from 0.
        clock_error: how far apart the ranks' clocks may be, in seconds.
        about: what was run: any words and numbers.
    """

    ranks: int
    spans: list[Span]
    clock_error: float = 0.0
    about: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def by_rank(self) -> list[list[Span]]:
        """Each rank's spans, in the order in which they began."""
        found: list[list[Span]] = [[] for _ in range(self.ranks)]
        for span in self.spans:
            found[span.rank].append(span)
        for spans in found:
            spans.sort(key=lambda span: (span.start, span.end))
        return found

    @property
    def steps(self) -> list[int]:
        """The numbers of the steps that were recorded."""
        return sorted({span.step for span in self.spans})

    def step(self, number: int) -> Recording:
        """One step alone."""
        return replace(self, spans=[span for span in self.spans if span.step == number])

    @property
    def makespan(self) -> float:
        """From the first span's start to the last one's end."""
        return max((span.end for span in self.spans), default=0) - min((span.start for span in self.spans), default=0)

    @cached_property
    def begun(self) -> dict[int, float]:
        """For each communication, by its place among the spans, when it could begin: when all it needs had come.

        A collective needs every rank of its group, a receive its send. What lies before that is waiting.
        """
        meetings: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for place, span in enumerate(self.spans):
            if span.kind == "collective":
                meetings[span.group, span.number].append(place)
            elif span.kind in ("send", "receive"):
                ends = (span.rank, span.peer) if span.kind == "send" else (span.peer, span.rank)
                meetings[ends, span.number].append(place)
        times: dict[int, float] = {}
        for key, places in meetings.items():
            whole = isinstance(key[0], tuple) and self.spans[places[0]].kind == "collective"
            needed = places if whole else [one for one in places if self.spans[one].kind == "send"]
            latest = max((self.spans[one].start for one in needed), default=-math.inf)
            times.update({one: max(latest, self.spans[one].start) for one in places})
        return times

    # ── files ───────────────────────────────────────────────────────────────────────────────────────────────────

    def to_json(self) -> str:
        """Everything, as a text that `from_json` reads."""
        rows = [[_plain(value) for value in asdict(span).values()] for span in self.spans]
        head = {"format": FORMAT, "ranks": self.ranks, "clock_error": self.clock_error, "about": self.about}
        return json.dumps({**head, "columns": list(Span.__dataclass_fields__), "spans": rows})

    @classmethod
    def from_json(cls, text: str) -> Recording:
        """Read a recording back."""
        content = json.loads(text)
        names = content["columns"]
        spans = [_span(dict(zip(names, row, strict=True))) for row in content["spans"]]
        return cls(content["ranks"], spans, content["clock_error"], content["about"])

    def save(self, folder: str | Path) -> None:
        """Write trace.json, of which `microparallel report FOLDER` makes a page, and trace-chrome.json for Perfetto."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        (path / "trace.json").write_text(self.to_json())
        self.to_chrome(path / "trace-chrome.json")

    def to_chrome(self, path: str | Path) -> None:
        """Write a file that Perfetto and chrome://tracing open: a process for each rank, arrows for messages."""
        entries = list(_chrome(self))
        Path(path).write_text(json.dumps({"traceEvents": entries, "displayTimeUnit": "ms"}))


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


def _span(values: dict[str, Any]) -> Span:
    values["group"] = tuple(values["group"])
    values["waited"] = math.nan if values["waited"] is None else values["waited"]
    return Span(**values)


# Viewers draw bars of one row inside each other, so what overlaps needs rows of its own.
_ROWS = ("compute", "collectives", "send", "receive")


def _chrome(recording: Recording) -> Iterable[dict[str, Any]]:
    for rank in range(recording.ranks):
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
        for row, name in enumerate(_ROWS):
            yield {"ph": "M", "pid": rank, "tid": row, "name": "thread_name", "args": {"name": name}}
    for span in recording.spans:
        row = 0 if span.computes else {"collective": 1, "send": 2, "receive": 3}[span.kind]
        details = {"step": span.step, "bytes": span.bytes, "place": span.place}
        yield {
            **{"ph": "X", "name": span.name, "cat": span.kind, "pid": span.rank, "tid": row},
            **{"ts": 1e6 * span.start, "dur": 1e6 * span.duration, "args": details},
        }
    yield from _arrows([span for span in recording.spans if span.kind in ("send", "receive")])


def _arrows(messages: Sequence[Span]) -> Iterable[dict[str, Any]]:
    sends = {(span.rank, span.peer, span.number): span for span in messages if span.kind == "send"}
    for number, receive in enumerate(span for span in messages if span.kind == "receive"):
        send = sends.get((receive.peer, receive.rank, receive.number))  # type: ignore[arg-type]
        if send is not None:
            arrow = {"name": "message", "cat": "message", "id": number}
            yield {**arrow, "ph": "s", "pid": send.rank, "tid": 2, "ts": 1e6 * send.start}
            yield {**arrow, "ph": "f", "bp": "e", "pid": receive.rank, "tid": 3, "ts": 1e6 * receive.end}
