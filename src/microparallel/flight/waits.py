"""Who waits for whom: what each rank's files say about the calls of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from microparallel.flight.layout import RECORDS
from microparallel.flight.processes import ENDED_BY_PARENT
from microparallel.flight.record import Record, Snapshot


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank that cannot go on, in a call, until these ranks have made theirs.

    A weak one is a call that was left to itself: the rank may have other things to do meanwhile.
    """

    rank: int
    record: Record
    missing: tuple[int, ...]
    weak: bool = False


def find_waits(ranks: Mapping[int, Snapshot], patience: float) -> dict[int, Wait]:
    """Every rank that has waited for at least so many seconds, by rank."""
    found = {}
    for rank, one in ranks.items():
        gone = one.state not in ("running", "unknown") and one.exit != ENDED_BY_PARENT
        if gone and one.ending == "running":
            continue  # stopped, or dead: it does not wait
        record = one.current
        if record is not None:
            if (record.end or one.now) - record.since >= patience:
                found[rank] = Wait(rank, record, missing_in(record, rank, ranks))
        elif (pending := _left_to_itself(one, ranks, max(patience, 1.0))) is not None:
            found[rank] = pending
    return found


def _left_to_itself(one: Snapshot, ranks: Mapping[int, Snapshot], patience: float) -> Wait | None:
    """The oldest collective under way that somebody has not entered: torch's DDP waits for such ones in C++."""
    if one.ending != "running":
        return None
    for record in one.records:
        if record.kind == "collective" and record.end is None and one.now - record.begin >= patience:
            missing = missing_in(record, one.rank, ranks)
            if missing:
                return Wait(one.rank, record, missing, weak=True)
    return None


def missing_in(record: Record, rank: int, ranks: Mapping[int, Snapshot]) -> tuple[int, ...]:
    """The ranks that have not made their part of a call."""
    if record.kind == "collective":
        others = [other for other in record.group if other != rank]
        return tuple(other for other in others if not _has_entered(ranks.get(other), record))
    opposite = "recv" if record.kind == "send" else "send"
    others = [record.peer] if record.peer is not None else [other for other in record.group if other != rank]
    return tuple(other for other in others if not _has_answered(ranks.get(other), record, opposite, rank))


def _has_entered(other: Snapshot | None, record: Record) -> bool:
    if other is None or not other.pid:
        return False
    made = [one.sequence for one in other.records if one.channel == record.channel]
    return max(made) >= record.sequence if made else _is_forgetful(other)


def _has_answered(other: Snapshot | None, record: Record, kind: str, rank: int) -> bool:
    if other is None or not other.pid:
        return False
    channel = (record.group_name, kind, rank, record.tag)
    made = [one.sequence for one in other.records if one.channel == channel]
    from_anybody = [one for one in other.records if one.kind == "recv" and one.peer is None and one.waits]
    if kind == "recv" and any(one.group_name == record.group_name and one.tag == record.tag for one in from_anybody):
        return True
    return max(made) >= record.sequence if made else _is_forgetful(other)


def _is_forgetful(one: Snapshot) -> bool:
    """Whether it has made more calls than its file holds: then one that is not there may have been made."""
    return len(one.records) >= RECORDS - 1


def find_cycle(waits: Mapping[int, Wait]) -> tuple[int, ...]:
    """Ranks that wait for each other in a circle, beginning with the lowest; empty if there is none."""
    edges = {
        rank: [other for other in wait.missing if other in waits and not waits[other].weak]
        for rank, wait in waits.items()
        # One that takes a message from anybody is helped by any of them.
        if not wait.weak and (wait.record.peer is not None or wait.record.kind == "collective")
    }
    cycles = [cycle for rank in edges if (cycle := _shortest_back_to(rank, edges))]
    return min(cycles, key=lambda cycle: (len(cycle), cycle), default=())


def _shortest_back_to(start: int, edges: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    paths: list[tuple[int, ...]] = [(start,)]
    seen: set[int] = set()
    while paths:
        path = paths.pop(0)
        for other in edges.get(path[-1], ()):
            if other == start:
                lowest = path.index(min(path))
                return path[lowest:] + path[:lowest]
            if other not in seen:
                seen.add(other)
                paths.append((*path, other))
    return ()
