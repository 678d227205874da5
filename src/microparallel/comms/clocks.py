"""One clock for all ranks of a recording: rank 0's.

Processes of one machine read the same clock (`time.perf_counter`, which is the kernel's monotonic one). Of each other
machine, the lowest rank asks rank 0 for the time, before the recording and after it, and tells the ranks beside it what
it found: their events stay as they were to each other.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path

import torch

from microparallel.comms.comms import Comms
from microparallel.comms.wire import gather_json
from microparallel.text import show_ranks, show_seconds
from microparallel.topology.clocks import OtherClock, RoundTrip, quickest

_ROUNDS = 16
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_TIME_NAMESPACE = Path("/proc/self/ns/time")


class Clocks:
    """The clocks of all machines, measured before a recording; every rank makes one.

    Args:
        comms: the ranks.
        clock: what this rank's events are timed by.
        machine: a name that two processes share if, and only if, they read the same clock.
    """

    def __init__(
        self, comms: Comms, clock: Callable[[], float] = time.perf_counter, machine: str | None = None
    ) -> None:
        self._comms, self._clock = comms, clock
        names = gather_json(_machine() if machine is None else machine, comms)
        # The lowest rank of each machine, by rank.
        self._first = [names.index(name) for name in names]
        self._before = self._measure()

    @property
    def several(self) -> bool:
        """Whether there is more than one clock."""
        return any(first != 0 for first in self._first)

    def align(self) -> list[OtherClock]:
        """Rank 0's clock as each rank's machine sees it, measured again; every rank calls this after the recording."""
        after = self._measure()
        mine = None
        if self._before is not None and after is not None:
            clock = OtherClock.between(self._before, after)
            mine = astuple(clock)
        found = gather_json(mine, self._comms) if self.several else [None] * self._comms.world_size
        clocks = [OtherClock() if one is None else OtherClock(*one) for one in found]
        return [clocks[first] for first in self._first]

    def worst(self, clocks: Sequence[OtherClock]) -> float:
        """How far apart the events of two ranks may be, at most: both of their machines' errors count."""
        errors = sorted((clocks[first].error for first in {*self._first}), reverse=True)
        return sum(errors[:2])

    def about(self, clocks: Sequence[OtherClock]) -> dict[str, str]:
        """What is kept with a trace, of each machine beside rank 0's: how its clock was put right, and the doubt."""
        said = {}
        for first in sorted({*self._first} - {0}):
            clock, ranks = clocks[first], [rank for rank, one in enumerate(self._first) if one == first]
            way = "behind" if clock.offset > 0 else "ahead of"
            digits = max(0, -math.floor(math.log10(clock.error)))  # no more than are known
            drift, doubt = -1e6 * clock.drift, 1e6 * clock.drift_error
            said[f"clock of {show_ranks(ranks)}"] = (
                f"{abs(clock.offset):.{digits}f} s {way} rank 0's, put right to within {show_seconds(clock.error)}; "
                f"it gains {drift:.0f} ± {math.ceil(doubt)} µs a second"
            )
        return said

    def _measure(self) -> RoundTrip | None:
        """Let the first rank of each machine ask rank 0 for the time; returns what this one found, if it is one."""
        found = None
        for rank in sorted({*self._first} - {0}):
            if self._comms.rank == 0:
                self._answer(rank)
            elif self._comms.rank == rank:
                found = quickest(self._ask() for _ in range(_ROUNDS))
        if self.several:
            self._comms.barrier()  # ranks begin together what they record
        return found

    def _answer(self, rank: int) -> None:
        for _ in range(_ROUNDS):
            self._comms.recv_tensor(1, rank, torch.float64)
            self._comms.send_tensor(torch.tensor([self._clock()], dtype=torch.float64, device="cpu"), rank)

    def _ask(self) -> RoundTrip:
        asked = self._clock()
        self._comms.send_tensor(torch.zeros(1, dtype=torch.float64, device="cpu"), 0)
        theirs = float(self._comms.recv_tensor(1, 0, torch.float64))
        return RoundTrip(asked, theirs, self._clock())


def _machine() -> str:
    """A name that two processes share if, and only if, they read the same clock; containers can have their own."""
    try:
        return f"{_BOOT.read_text().strip()} {_TIME_NAMESPACE.readlink() if _TIME_NAMESPACE.exists() else ''}"
    except OSError:
        return socket.gethostname()
