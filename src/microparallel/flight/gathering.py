"""Look at all ranks of a world at once: their files, their processes, and the stacks of those that are in no call."""

from __future__ import annotations

import socket
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from microparallel.flight.folders import read_world
from microparallel.flight.processes import state_of
from microparallel.flight.record import Snapshot
from microparallel.flight.stacks import ask

_PATIENCE = 2.0  # seconds for everything


def gather(folder: Path, *, expect_end: Collection[int] = (), here: int | None = None) -> list[Snapshot]:
    """One snapshot of each rank, in rank order.

    Args:
        folder: where their flight files are.
        expect_end: ranks whose connections have gone: their processes may take a moment to be seen to have ended.
        here: the rank that asks, which knows where it is.
    """
    deadline = time.monotonic() + _PATIENCE
    found = look(folder)
    while any(_seems_well(one) for one in found.values() if one.rank in expect_end) and _left(deadline) > 1.0:
        time.sleep(0.01)
        found = look(folder)
    for path, one in found.items():
        if _seems_well(one) and one.answers and one.current is None and one.rank != here:
            found[path] = replace(one, stack=ask(path, one.pid, min(0.5, _left(deadline))))
    return _with_absent(list(found.values()))


def look(folder: Path) -> dict[Path, Snapshot]:
    """What the ranks have written, and how their processes are."""
    host = socket.gethostname()
    return {
        path: one.with_state(*(state_of(one.pid, one.start_ticks) if one.host == host else ("unknown", "")))
        for path, one in read_world(folder).items()
    }


def _seems_well(one: Snapshot) -> bool:
    return one.state == "running" and one.ending == "running"


def _with_absent(found: list[Snapshot]) -> list[Snapshot]:
    if not found:
        return []
    there = {one.rank for one in found}
    size, now = found[0].world_size, found[0].now
    absent = [Snapshot(rank, size, state="unknown", now=now) for rank in range(size) if rank not in there]
    return sorted([*found, *absent], key=lambda one: one.rank)


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
