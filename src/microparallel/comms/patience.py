"""How long a thread that computes may keep others from running: as long as it computes, and not for ever.

A thread that waits for something uses no processor time. Maybe it waits for the very thing that was held back.
"""

from __future__ import annotations

import threading
import time

_NAP = 0.01  # seconds between two looks; even where two threads share a core, each gets some of them
_LITTLE = 0.0001  # seconds of processor time in a nap: what it takes to begin to wait


class Patience:
    """Granted to one thread, which asks for it; another one looks how much is left."""

    def __init__(self) -> None:
        self._until = 0.0
        self._next_look = 0.0
        self._clock = 0  # of the thread that asked
        self._used = 0.0  # its processor time at the last look

    def ask(self, seconds: float) -> None:
        """The calling thread would like to compute for so long without being disturbed."""
        # Where a thread's processor time cannot be read, nobody can tell whether it computes.
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
            self._used = time.clock_gettime(self._clock)
            now = time.monotonic()
            self._next_look, self._until = now + _NAP, now + seconds

    @property
    def granted(self) -> bool:
        """Whether that thread may still compute undisturbed, as far as is known without looking at it."""
        return time.monotonic() < self._until

    def end(self) -> None:
        """It is over."""
        self._until = 0.0

    def nap(self) -> float:
        """For how many seconds to leave that thread alone before looking again; 0 when it waits, or has had enough."""
        now = time.monotonic()
        if now < self._until and now >= self._next_look:
            self._next_look = now + _NAP
            if self._waits():
                self.end()
        return max(0.0, min(self._until, self._next_look) - now)

    def _waits(self) -> bool:
        try:
            before, self._used = self._used, time.clock_gettime(self._clock)
        except OSError:  # the thread has ended
            return True
        return self._used - before < _LITTLE
