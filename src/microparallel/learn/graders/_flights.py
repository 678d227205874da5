"""Flights of runs that hung, as files: recorded from real ranks by benchmarks/hung_flights.py, which says how."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from microparallel.observe.flight_file import Record, Snapshot

_FILE = Path(__file__).parent / "hung_flights.json"
_NOW = 100.0  # when a flight was read; all of its times are given as they would be then
_OF_A_RANK = ("rank", "world_size", "state", "exit", "ending")
_OF_A_CALL = (
    "number",
    "kind",
    "text",
    "agreement",
    "group",
    "group_name",
    "sequence",
    "outcome",
    "peer",
    "tag",
    "size",
)
_TIMES = ("begin", "started", "wait", "end")


@dataclass(frozen=True, slots=True)
class HungRun:
    """A run that hung: its name, who is to blame and why, and what each rank had written."""

    name: str
    culprit: int
    reason: str
    flights: tuple[Snapshot, ...]

    def renumbered(self, ranks: Sequence[int]) -> HungRun:
        """The same run as if its ranks had had other numbers: rank r becomes ranks[r]."""

        def call(one: Record) -> Record:
            peer = None if one.peer is None else ranks[one.peer]
            text = one.text if one.peer is None else one.text.replace(f"={one.peer})", f"={peer})")
            return replace(one, peer=peer, text=text)

        flights = [
            replace(one, rank=ranks[one.rank], records=tuple(call(each) for each in one.records))
            for one in self.flights
        ]
        flights.sort(key=lambda one: one.rank)
        return replace(self, culprit=ranks[self.culprit], flights=tuple(flights))


def to_text(runs: Sequence[HungRun]) -> str:
    """The runs as JSON, a line for each rank."""
    parts = []
    for run in runs:
        ranks = ",\n    ".join(json.dumps(_rank(one)) for one in run.flights)
        head = json.dumps({"name": run.name, "culprit": run.culprit, "reason": run.reason})[:-1]
        parts.append(f'  {head}, "ranks": [\n    {ranks}\n  ]}}')
    return "[\n" + ",\n".join(parts) + "\n]\n"


def _rank(one: Snapshot) -> dict[str, Any]:
    def call(record: Record) -> dict[str, Any]:
        times = {name: getattr(record, name) for name in _TIMES}
        ago = {name: None if time is None else round(time - one.now, 3) for name, time in times.items()}
        return {name: getattr(record, name) for name in _OF_A_CALL} | ago

    return {name: getattr(one, name) for name in _OF_A_RANK} | {"records": [call(record) for record in one.records]}


@cache
def hung_runs() -> tuple[HungRun, ...]:
    """All runs that were recorded."""
    return from_text(_FILE.read_text("utf-8"))


def from_text(text: str) -> tuple[HungRun, ...]:
    """The runs that `to_text` has written."""
    runs = json.loads(text)
    return tuple(
        HungRun(run["name"], run["culprit"], run["reason"], tuple(_snapshot(one) for one in run["ranks"]))
        for run in runs
    )


def _snapshot(values: dict[str, Any]) -> Snapshot:
    records = []
    for call in values.pop("records"):
        times = {name: None if call[name] is None else _NOW + call[name] for name in _TIMES}
        records.append(Record(**call | times | {"group": tuple(call["group"])}))
    return Snapshot(**values, pid=values["rank"] + 1, now=_NOW, records=tuple(records))
