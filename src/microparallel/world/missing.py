"""Say who is missing, while a rank waits for its world to be complete."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from microparallel.flight.recorder import in_ranges
from microparallel.text import count
from microparallel.topology.placement import Placement

_SOON = 10.0  # seconds of waiting that are worth a word; then twice as many, and so on
_LOOK = 5.0  # seconds that finding out may take


@contextlib.contextmanager
def saying_who_is_missing(placement: Placement, after: float = _SOON) -> Iterator[None]:
    """Within this block, this rank meets the others; if it takes long, a line on stderr says for whom it waits."""
    if placement.world_size == 1:
        yield
        return
    met = threading.Event()
    thread = threading.Thread(
        target=_say_now_and_then, args=(placement, after, met), name="microparallel roll call", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        met.set()
        thread.join(_LOOK)


def _say_now_and_then(placement: Placement, pause: float, met: threading.Event) -> None:
    begun = time.monotonic()
    while not met.wait(pause):
        pause *= 2
        with contextlib.suppress(Exception):  # a word that cannot be said must not hurt the rank
            found = who_is_missing(placement)
            if found and not met.is_set():
                waited = f"rank {placement.rank} has been waiting for {time.monotonic() - begun:.0f} s"
                print(f"microparallel: {waited}: {found}", file=sys.stderr, flush=True)


def who_is_missing(placement: Placement) -> str:
    """In words, whom the world lacks; empty if nobody, or if a lower rank is there to say so."""
    place = f"{placement.address}:{placement.port}"
    try:
        socket.create_connection((placement.address, placement.port), timeout=_LOOK).close()
    except OSError:
        return f"nobody answers at {place}, where rank 0 opens the meeting" if placement.local_rank == 0 else ""
    store = notes_of(placement, _LOOK, is_master=False)
    missing = [rank for rank in range(placement.world_size) if not store.check([f"can/{rank}"])]
    if not missing or any(rank not in missing for rank in range(placement.rank)):
        return ""
    ranks = f"{'rank' if len(missing) == 1 else 'ranks'} {in_ranges(missing)}"
    return f"{ranks} of {count(placement.world_size, 'rank')} did not come to {place} yet"


def notes_of(placement: Placement, timeout: float, *, is_master: bool) -> dist.Store:
    """The notes that the ranks of a world leave for each other where they meet."""
    store = dist.TCPStore(
        placement.address,
        placement.port,
        is_master=is_master,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
    )
    return dist.PrefixStore(f"microparallel/{placement.attempt}", store)
