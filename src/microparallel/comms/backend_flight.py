"""Which flight recorder a group of the torch backend writes into: its world's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch.distributed as dist

from microparallel.flight import Flight, agreed_folder

_given: ContextVar[Flight | None] = ContextVar("flight", default=None)


@contextmanager
def using(flight: Flight) -> Iterator[None]:
    """Within this block, torch makes the group of a world that has a recorder already."""
    token = _given.set(flight)
    try:
        yield
    finally:
        _given.reset(token)


def flight_for(store: dist.Store, rank: int, ranks: int) -> tuple[Flight, bool]:
    """The recorder of a new group, and whether the group must close it: that of its world, or one of its own."""
    given = _given.get()
    if given is not None:
        return given, False
    world = getattr(dist.group.WORLD, "shared_memory", None)
    if world is not None:
        return world.flight, False
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return Flight.open(agreed_folder(store), rank, ranks, ranks_here), True
