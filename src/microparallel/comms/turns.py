"""Collectives one after another, in the order in which they were called, by whoever has time for them.

Every rank must run the collectives of a group in the same order, so they wait in a line. Whoever waits for one runs it,
and those before it. A call that is not waited for at once can be left to a thread of its own, which runs what stands in
the line while the caller computes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

Deed = Callable[[float | None], None]  # given the time at which to give up


class Turn:
    """One collective in the line: complete when it has been waited for."""

    def __init__(self, line: Line, deed: Deed) -> None:
        self._line = line
        self._deed = deed
        self._error: BaseException | None = None
        self.done = False

    def wait(self, timeout: float | None = None) -> None:
        """Return when it has run; raise what it raised."""
        if not self.done:
            self._line.run_up_to(self, None if timeout is None else time.monotonic() + timeout)
        if self._error is not None:
            raise self._error

    def run(self, deadline: float | None) -> None:
        """Do it, and remember how it ended."""
        try:
            self._deed(deadline)
        except BaseException as error:
            self._error = error
            if not isinstance(error, Exception):
                raise
        finally:
            self.done = True


class Line:
    """The collectives of one group that have been called and not run."""

    def __init__(self) -> None:
        self._waiting: deque[Turn] = deque()
        self._running = threading.Lock()  # held by whoever runs one
        self._work = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._closed = False

    def append(self, deed: Deed) -> Turn:
        """Stand at the end of the line."""
        turn = Turn(self, deed)
        self._waiting.append(turn)
        return turn

    def run_up_to(self, turn: Turn, deadline: float | None) -> None:
        """Run what stands in the line, up to and including this one."""
        with self._running:
            while not turn.done:
                self._waiting.popleft().run(deadline)

    def run_in_background(self) -> None:
        """Let a thread run what stands in the line."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep_running, name="microparallel collectives", daemon=True)
            self._thread.start()
        self._work.release()

    def _keep_running(self) -> None:
        while True:
            self._work.acquire()
            if self._closed:
                return
            with self._running:
                while self._waiting:
                    self._waiting.popleft().run(None)

    def close(self) -> None:
        """Let the thread end."""
        self._closed = True
        if self._thread is not None:
            self._work.release()
            self._thread.join()
            self._thread = None
