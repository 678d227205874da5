"""The work queue: a group's collectives, in the order in which this rank called them.

Every rank must run the collectives of a group in the same order, so each call waits in a queue. Two kinds of threads
take work from it, always from the front:

- a thread that waits for a call runs that call, and all calls before it;
- the queue's own thread runs calls that were started with `async_op=True`, while their caller computes.

Where all cores compute, the queue's thread would only interrupt its caller. So the caller can delay it
(`BackgroundDelay`), and run what is ready itself when it has computed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from microparallel.errors import CommsError, TransportTimeout

Action = Callable[[float | None], None]  # is given the time (of time.monotonic) at which to give up


class QueuedWork:
    """One collective in the queue: complete when a thread has run it.

    Args:
        queue: where it stands.
        action: runs the collective.
        timeout: after how many seconds of running it gives up; None: when the transport does.
        ready: whether every rank has called this collective.
        missing: the ranks that have not.
        joined: what each thread does that has waited for it: on a GPU, its stream waits, too.
    """

    def __init__(
        self,
        queue: WorkQueue,
        action: Action,
        timeout: float | None,
        ready: Callable[[], bool],
        missing: Callable[[], Sequence[int]],
        joined: Callable[[], None],
    ) -> None:
        self._queue = queue
        self._action: Action | None = action
        self._timeout = timeout
        self.ready = ready
        self.missing = missing
        self._joined = joined
        self._lock = threading.Lock()
        self._watched = _nothing, _nothing
        self._callbacks: list[Callable[[], None]] = []
        self.error: BaseException | None = None
        self.done = False
        self.ended: float | None = None  # when it was done, on `time.perf_counter`

    def wait(self, timeout: float | None = None) -> None:
        """Return when the collective has run, in this thread or another; raise what it raised."""
        if not self.done:
            self._queue.run_up_to(self, _deadline(timeout))
        if self.error is not None:
            raise self.error
        self._joined()

    def watch(self, begins: Callable[[], None], ended: Callable[[], None]) -> None:
        """Call these in the thread that runs the collective, just before and just after; not, if one has begun to.

        What is called then comes before whatever the queue's threads do next.
        """
        self._watched = begins, ended

    def then(self, callback: Callable[[], None]) -> None:
        """Call this when the collective has run: at once if it has, else in the thread that runs it."""
        with self._lock:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback()

    def run(self, deadline: float | None) -> None:
        """Run the collective in this thread, and keep the error that it raised, if any."""
        error: BaseException | None = None
        try:
            self._watched[0]()
            if self._action is not None:
                self._action(_earlier(deadline, _deadline(self._timeout)))
        except TransportTimeout as late:
            late.ranks = late.ranks or tuple(self.missing())
            error = late
        except BaseException as raised:
            error = raised
            if not isinstance(raised, Exception):
                raise
        finally:
            self._watched[1]()
            self.end(error)

    def end(self, error: BaseException | None) -> None:
        """Mark the collective as done: it has run, or never will."""
        self.error = error
        self._action = None  # and with it the tensors
        self.ended = time.perf_counter()
        with self._lock:
            self.done = True

    @property
    def has_callbacks(self) -> bool:
        """Whether `then` was given something to call."""
        return bool(self._callbacks)

    def run_callbacks(self) -> None:
        """Call what `then` was given."""
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


def _nothing() -> None:
    """Do nothing."""


class WorkQueue:
    """The collectives of one group that this rank has called and that have not run.

    A callback may call another collective and wait for it. So a queue's thread that runs callbacks does not count as
    free: while it does, another thread is started if there is work.

    Args:
        begin: what each of the queue's threads does first.
    """

    def __init__(self, begin: Callable[[], None] = _nothing) -> None:
        self._begin = begin
        self._waiting: deque[QueuedWork] = deque()
        self._running = threading.Lock()  # held by the thread that runs a collective
        self._wakeups: SimpleQueue[None] = SimpleQueue()
        self._delay = BackgroundDelay()
        self._threads: list[threading.Thread] = []
        self._free_threads = 0  # those of the queue's threads that do not run callbacks
        self._counting = threading.Lock()  # held while `_free_threads` changes
        self._closed = False

    def append(
        self,
        action: Action,
        timeout: float | None = None,
        ready: Callable[[], bool] = lambda: True,
        missing: Callable[[], Sequence[int]] = tuple,
        joined: Callable[[], None] = _nothing,
    ) -> QueuedWork:
        """Add a collective at the end."""
        work = QueuedWork(self, action, timeout, ready, missing, joined)
        if self._closed:
            work.end(_closed())
        else:
            self._waiting.append(work)
        return work

    # ── in the thread that called ───────────────────────────────────────────────────────────────────────────────

    def run_up_to(self, work: QueuedWork, deadline: float | None) -> None:
        """Run, in this thread, what stands in the queue up to and including this work."""
        while not work.done:
            left = -1 if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._running.acquire(timeout=left):
                raise TransportTimeout(
                    "timed out: another thread runs this collective, or one before it", work.missing()
                )
            if (first := self._run_first(deadline, unless=work)) is not None:
                first.run_callbacks()

    def run_ready(self) -> None:
        """Run, in this thread, the first collectives that every rank has called; return if another thread runs one."""
        while self._running.acquire(blocking=False):
            if not self._waiting or not self._waiting[0].ready():
                self._running.release()
                return
            if (first := self._run_first(None)) is not None:
                first.run_callbacks()

    def _run_first(self, deadline: float | None, unless: QueuedWork | None = None) -> QueuedWork | None:
        """Run the first in the queue and release `_running`, which this thread holds; None if the queue is empty.

        Runs nothing if the work `unless` is done, since another thread ran it before this one got the lock.
        """
        try:
            work = None if unless is not None and unless.done else self._take()
            if work is not None:
                work.run(deadline)
        finally:
            self._running.release()
        return work

    def _take(self) -> QueuedWork | None:
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    # ── in the queue's own thread ───────────────────────────────────────────────────────────────────────────────

    def run_in_background(self, delay: float = 0.0) -> None:
        """Let the queue's thread run what stands in the queue, at once or after a delay.

        Args:
            delay: for how many seconds the queue's thread leaves the caller alone, as long as that computes.
        """
        if delay:
            self._delay.begin(delay)
        else:
            self._delay.end()
        self._require_thread()
        self._wakeups.put(None)

    def end_delay(self) -> None:
        """Let the queue's thread run at once: a caller that polls for a result may call this again and again."""
        if self._delay.under_way:
            self.run_in_background()

    def _require_thread(self) -> None:
        with self._counting:
            if self._free_threads == 0 and not self._closed:
                self._free_threads += 1
                thread = threading.Thread(target=self._keep_running, name="microparallel collectives", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _keep_running(self) -> None:
        self._begin()
        while True:
            self._sleep()
            if self._closed:
                return
            while self._waiting:
                self._running.acquire()
                if (work := self._run_first(None)) is not None and work.has_callbacks:
                    self._run_callbacks(work)

    def _sleep(self) -> None:
        self._wakeups.get()
        while (seconds := self._delay.next_look()) > 0:
            with contextlib.suppress(Empty):
                self._wakeups.get(timeout=seconds)

    def _run_callbacks(self, work: QueuedWork) -> None:
        with self._counting:
            self._free_threads -= 1
        if self._waiting:
            self.run_in_background()
        work.run_callbacks()
        with self._counting:
            self._free_threads += 1

    def close(self) -> None:
        """End the queue's threads; work that no thread has begun fails with a `CommsError`."""
        self._closed = True
        while (work := self._take()) is not None:
            work.end(_closed())
            work.run_callbacks()
        self._delay.end()
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


# ── when the queue's thread must let its caller compute ─────────────────────────────────────────────────────────────

_LOOK_EVERY = 0.01  # seconds between two looks; even where two threads share a core, each gets some of them
_NOTHING_MUCH = 0.0001  # seconds of processor time between two looks: what it takes a thread to begin to wait


class BackgroundDelay:
    """How long the queue's thread leaves a caller alone: as long as the caller computes, and not for ever.

    A thread that waits for something uses no processor time. Perhaps it waits for the very collective that is delayed.
    So the queue's thread looks at the caller's processor time now and then, and ends the delay when that stands still.
    """

    def __init__(self) -> None:
        self._until = 0.0
        self._next_look = 0.0
        self._clock = 0  # the processor clock of the caller's thread
        self._used = 0.0  # what that clock said at the last look

    def begin(self, seconds: float) -> None:
        """The calling thread is going to compute: leave it alone for so long at most."""
        # Where a thread's processor time cannot be read, whether it computes cannot be known, and nothing is delayed.
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
            self._used = time.clock_gettime(self._clock)
            now = time.monotonic()
            self._next_look, self._until = now + _LOOK_EVERY, now + seconds

    @property
    def under_way(self) -> bool:
        """Whether the delay still lasts, as far as is known without a look at the caller's clock."""
        return time.monotonic() < self._until

    def end(self) -> None:
        """Delay no longer."""
        self._until = 0.0

    def next_look(self) -> float:
        """After how many seconds the queue's thread looks again; 0: the delay has ended."""
        now = time.monotonic()
        if now < self._until and now >= self._next_look:
            self._next_look = now + _LOOK_EVERY
            if self._caller_waits():
                self.end()
        return max(0.0, min(self._until, self._next_look) - now)

    def _caller_waits(self) -> bool:
        try:
            before, self._used = self._used, time.clock_gettime(self._clock)
        except OSError:  # the thread has ended
            return True
        return self._used - before < _NOTHING_MUCH
