"""How long a thread that computes may keep others from running: as long as it computes, and not for ever.

A thread that waits for something uses no processor time. Maybe it waits for the very thing that was held back.
"""

from __future__ import annotations

import threading
import time

_NAP = 0.01  # seconds between two looks; even where two threads share a core, each gets some of them


class Patience:
    """Granted to one thread, which asks for it; another one looks how much is left."""

    def __init__(self) -> None:
        self._until = 0.0
        self._clock: int | None = None
        self._used = -1.0  # processor time of the thread that asked, at the last look

    def ask(self, seconds: float) -> None:
        """The calling thread would like to compute for so long without being disturbed."""
        # Where a thread's processor time cannot be read, nobody can tell whether it computes.
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
            self._until = time.monotonic() + seconds

    def end(self) -> None:
        """It is over."""
        self._until = 0.0

    def nap(self) -> float:
        """For how many seconds to leave that thread alone before looking again; 0 when it waits, or has had enough."""
        left = self._until - time.monotonic()
        if left <= 0 or self._clock is None:
            return 0.0
        try:
            before, self._used = self._used, time.clock_gettime(self._clock)
        except OSError:  # the thread has ended
            return 0.0
        return 0.0 if self._used == before else min(left, _NAP)
