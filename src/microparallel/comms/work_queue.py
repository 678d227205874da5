"""How long a thread that computes may keep others from running: as long as it computes, and not for ever.

A thread that waits for something uses no processor time. Maybe it waits for the very thing that was held back.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from microparallel.errors import CommsError, TransportTimeout

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


# Collectives one after another, in the order in which they were called, by whoever has time for them.
#
# Every rank must run the collectives of a group in the same order, so they wait in a line. Whoever waits for one runs
# it,
# and those before it. A call that is not waited for at once can be left to a thread, which runs what stands in the line
# while the caller computes. Where that leaves no core to the thread, the caller may ask it to hold back
# for a while, and run what is ready itself when it has computed.


Deed = Callable[[float | None], None]  # given the time at which to give up


class Turn:
    """One collective in the line: complete when it has been waited for."""

    def __init__(
        self,
        line: Line,
        deed: Deed,
        timeout: float | None,
        ready: Callable[[], bool],
        missing: Callable[[], Sequence[int]],
    ) -> None:
        self._line = line
        self._deed: Deed | None = deed
        self._timeout = timeout
        self.ready = ready  # whether nobody is missing
        self.missing = missing  # the ranks that have not called it
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self.error: BaseException | None = None
        self.done = False

    def wait(self, timeout: float | None = None) -> None:
        """Return when it has run; raise what it raised."""
        if not self.done:
            self._line.run_up_to(self, _deadline(timeout))
        if self.error is not None:
            raise self.error

    def then(self, callback: Callable[[], None]) -> None:
        """Call this when it has run: at once, or by the thread that runs it."""
        with self._lock:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback()

    def run(self, deadline: float | None) -> None:
        """Do it, and remember how it ended."""
        error: BaseException | None = None
        try:
            if self._deed is not None:
                self._deed(_earlier(deadline, _deadline(self._timeout)))
        except TransportTimeout as late:
            late.ranks = late.ranks or tuple(self.missing())
            error = late
        except BaseException as raised:
            error = raised
            if not isinstance(raised, Exception):
                raise
        finally:
            self.end(error)

    def end(self, error: BaseException | None) -> None:
        """It has run, or will never run."""
        self.error = error
        self._deed = None  # and with it the tensors
        with self._lock:
            self.done = True

    @property
    def has_callbacks(self) -> bool:
        """Whether somebody asked to be called."""
        return bool(self._callbacks)

    def report(self) -> None:
        """Call those who asked to be called."""
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class Line:
    """The collectives of one group that have been called and not run.

    A callback may call another collective and wait for it. So whoever runs callbacks is no longer counted on to run
    what stands in the line: if need be another thread takes over.
    """

    def __init__(self) -> None:
        self._waiting: deque[Turn] = deque()
        self._running = threading.Lock()  # held by whoever runs one
        self._wakeups: SimpleQueue[None] = SimpleQueue()
        self._patience = Patience()  # with a caller who computes
        self._threads: list[threading.Thread] = []
        self._available = 0  # threads that are not busy with callbacks
        self._counting = threading.Lock()
        self._closed = False

    def append(
        self,
        deed: Deed,
        timeout: float | None = None,
        ready: Callable[[], bool] = lambda: True,
        missing: Callable[[], Sequence[int]] = tuple,
    ) -> Turn:
        """Stand at the end of the line."""
        turn = Turn(self, deed, timeout, ready, missing)
        if self._closed:
            turn.end(_closed())
        else:
            self._waiting.append(turn)
        return turn

    def run_up_to(self, turn: Turn, deadline: float | None) -> None:
        """Run what stands in the line, up to and including this one."""
        while not turn.done:
            patience = -1 if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._running.acquire(timeout=patience):
                raise TransportTimeout("timed out: a thread is at this collective, or at one before it", turn.missing())
            if (first := self._run_first(deadline, unless=turn)) is not None:
                first.report()

    def run_what_is_ready(self) -> None:
        """Run the first ones in the line for which nobody is missing, unless a thread is at it."""
        while self._running.acquire(blocking=False):
            if not self._waiting or not self._waiting[0].ready():
                self._running.release()
                return
            if (first := self._run_first(None)) is not None:
                first.report()

    def _run_first(self, deadline: float | None, unless: Turn | None = None) -> Turn | None:
        """Run the first in the line and let go of the lock, which the caller has taken; None if there is none."""
        try:
            turn = None if unless is not None and unless.done else self._take()
            if turn is not None:
                turn.run(deadline)
        finally:
            self._running.release()
        return turn

    def _take(self) -> Turn | None:
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def run_in_background(self, patience: float = 0.0) -> None:
        """Let a thread run what stands in the line: at once, or when the caller has computed, for so long at most."""
        if patience:
            self._patience.ask(patience)
        else:
            self._patience.end()
        self._require_thread()
        self._wakeups.put(None)

    def hurry(self) -> None:
        """Let the thread hold back no longer: the caller asks for a result, and may do so again and again."""
        if self._patience.granted:
            self.run_in_background()

    def _require_thread(self) -> None:
        with self._counting:
            if self._available == 0 and not self._closed:
                self._available += 1
                thread = threading.Thread(target=self._keep_running, name="microparallel collectives", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _keep_running(self) -> None:
        while True:
            self._sleep()
            if self._closed:
                return
            while self._waiting:
                self._running.acquire()
                if (turn := self._run_first(None)) is not None and turn.has_callbacks:
                    self._report(turn)

    def _sleep(self) -> None:
        self._wakeups.get()
        while (nap := self._patience.nap()) > 0:
            with contextlib.suppress(Empty):
                self._wakeups.get(timeout=nap)

    def _report(self, turn: Turn) -> None:
        """Run callbacks, in a thread of ours that others must not count on meanwhile."""
        with self._counting:
            self._available -= 1
        if self._waiting:
            self.run_in_background()
        turn.report()
        with self._counting:
            self._available += 1

    def close(self) -> None:
        """Let the threads end; what nobody has run yet never runs."""
        self._closed = True
        while (turn := self._take()) is not None:
            turn.end(_closed())
            turn.report()
        self._patience.end()
        for _ in self._threads:
            self._wakeups.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._threads.clear()


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _earlier(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else min(one, other)


def _closed() -> CommsError:
    return CommsError("the group was closed before this call could be made")
