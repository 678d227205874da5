"""The `Work` that torch gets for a call that has started: to wait for, to poll, or to take a future from.

torch's C++ may keep a work that no Python variable holds any more, and wait for it later: `DDP.join` does. C++ finds
our methods only as long as the Python object lives. So a collective that was dropped before any thread waited for it is
kept (`DroppedWorks`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from microparallel.comms.calls import Call
from microparallel.comms.request import activity_of, named_failures
from microparallel.comms.shared_memory import SharedMemoryGroup
from microparallel.comms.work_queue import QueuedWork
from microparallel.errors import TransportTimeout
from microparallel.observe import ObservedCall, observe_call
from microparallel.observe.flight_recorder import Entry, NoEntry
from microparallel.torch_backend.tensors import seconds, tensors_of
from microparallel.torch_private import (
    CalledWork,
    at_end_of_backward,
    forget_in_graphs,
    make_known_in_graphs,
    number_of_backward,
    profile_until,
    uncompiled,
)
from microparallel.transport.base import Work

_MOST_DROPPED = 64  # works of a group
_LARGE = 2**16  # bytes of tensors that are not kept just because their work was dropped


@uncompiled
class StartedWork(CalledWork):
    """What collectives and messages share; a subclass's `_finish` waits, and raises what went wrong."""

    _entry: Entry | NoEntry | ObservedCall | None = None  # until it has ended
    _is_known_in_graphs = False

    def __init__(self, group: SharedMemoryGroup, call: Call, entry: Entry | NoEntry, result: Any) -> None:
        super().__init__()
        self._group = group
        self._call = call
        observers = group.flight.observers
        self._entry = observe_call(entry, observers, activity_of(call, group)) if observers else entry
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the result is there; raise an error that names the rank and the call."""
        if self._entry is not None:
            self._entry.waits()
        return self._complete(seconds(timeout))

    def _complete(self, timeout: float | None) -> bool:
        entry, self._entry = self._entry, None
        if entry is None:  # a thread has waited for it before
            entry = NoEntry()
        with named_failures(self._call, self._group, entry):
            self._finish(timeout)
        if isinstance(entry, ObservedCall):
            entry.ended_at = self._ended_at
        entry.ends()
        if self._is_known_in_graphs:
            self._is_known_in_graphs = False
            forget_in_graphs(tensors_of(self._result))
        return True

    @property
    def _ended_at(self) -> float | None:
        """When it ended, on `time.perf_counter`; None if only the thread that has waited for it knows."""
        return None

    def make_known_in_graphs(self) -> None:
        """Let `wait_tensor` wait for this work: the caller is within `allow_inflight_collective_as_graph_input_ctx`."""
        self._is_known_in_graphs = True
        make_known_in_graphs(tensors_of(self._result), self)

    def _report_wait_at_end_of_backward(self) -> None:
        """Tell the observers, at the end of backward, that the rank waits: a future is taken, so `wait` is not called.

        A future that is taken during backward is taken by torch's DistributedDataParallel, which waits at the end of
        backward. Autograd runs callbacks at its end in the order in which they were queued, and DDP queues its own
        after this one.
        """
        if number_of_backward() is not None:
            at_end_of_backward(self._all_is_computed)

    def _all_is_computed(self) -> None:
        if self._entry is not None:
            self._entry.waits()

    def profile(self) -> None:
        """Show the call in `torch.profiler`, from now until it is complete."""
        profile_until(f"microparallel:{self._call.name}", self._when_complete)

    def _when_complete(self, callback: Callable[[], None]) -> None:
        """Call back when it is complete; unlike `_when_done`, this completes nothing."""
        raise NotImplementedError

    def _finish(self, timeout: float | None) -> None:
        raise NotImplementedError

    def _when_done(self, callback: Callable[[], None]) -> None:
        raise NotImplementedError

    def synchronize(self) -> None:
        """The same as waiting: a thread that waits lets its stream wait, too."""
        self.wait()

    def result(self) -> Any:
        """The tensors with the result."""
        return self._result

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What went wrong, if it has ended."""
        if not self.is_completed():
            return None
        try:
            self.wait()
        except Exception as error:
            return error
        return None

    def get_future(self) -> torch.futures.Future[Any]:
        """A future with the result; DDP chains what it does next to it."""
        # torch lets the streams of those who wait for a future with devices wait for what comes with it.
        devices = {tensor.device for tensor in tensors_of(self._result) if tensor.is_cuda}
        done: torch.futures.Future[Any] = torch.futures.Future(devices=list(devices))

        # An exception that is put into a future reaches Python only; one that a callback raises reaches C++ too.
        def outcome(_: torch.futures.Future[Any]) -> Any:
            self._complete(None)
            return self._result

        future: torch.futures.Future[Any] = done.then(outcome)
        if number_of_backward() is not None and _is_half(self._result):
            future = _typed().later(future, self._result)
        if self._group.flight.observers:
            self._report_wait_at_end_of_backward()
        self._when_done(lambda: done.set_result(None))
        return future

    def get_future_result(self) -> torch.futures.Future[Any]:
        """The same future: failure and success are both in it."""
        return self.get_future()


def _is_half(result: Any) -> bool:
    first = result[0] if isinstance(result, list) and result else None
    return isinstance(first, torch.Tensor) and first.dtype == torch.float16


@functools.cache
def _typed() -> Any:
    """A function that makes a future of tensors from one of Python objects, which is all that Python can make.

    DDP's built-in FP16 hook is written in C++, and takes nothing else. Only for futures that this hook may have asked
    for, it is worth the time of another thread.
    """
    return torch.jit.CompilationUnit("""
def tensors_when(done: Future[int], tensors: List[Tensor]) -> List[Tensor]:
    torch.jit.wait(done)
    return tensors

def later(done: Future[int], tensors: List[Tensor]) -> Future[List[Tensor]]:
    return torch.jit.fork(tensors_when, done, tensors)
""")


class DroppedWorks:
    """Collectives of a group that no variable holds and no thread has waited for: torch's C++ may still do so.

    Each is kept until it is done. Then it is kept as one of the last few, unless its tensors are large. Objects may be
    dropped in any thread, and while any lock is held, so this takes none.
    """

    def __init__(self) -> None:
        self._works: deque[CollectiveWork] = deque()

    def keep(self, work: CollectiveWork) -> None:
        """Keep one more; let go of older ones."""
        self._works.append(work)
        with contextlib.suppress(IndexError):  # another thread has let it go
            while (len(self._works) > _MOST_DROPPED or self._works[0].is_large) and self._works[0].is_done:
                self._works.popleft()

    def clear(self) -> None:
        """Let go of all: the group ends."""
        self._works.clear()


@uncompiled
class CollectiveWork(StartedWork):
    """One or more collectives in the work queue of their group."""

    def __init__(
        self,
        group: SharedMemoryGroup,
        call: Call,
        entry: Entry | NoEntry,
        works: Sequence[QueuedWork],
        result: Any,
        dropped: DroppedWorks,
    ) -> None:
        super().__init__(group, call, entry, result)
        self._works = works
        self._dropped = dropped
        if isinstance(self._entry, ObservedCall):
            self._entry.issued(works)

    def __del__(self) -> None:
        if self._entry is not None:
            self._dropped.keep(self)

    @property
    def is_large(self) -> bool:
        """Whether its tensors take much memory."""
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(self._result)) > _LARGE

    @property
    def _ended_at(self) -> float | None:
        return self._works[-1].ended if self._works else None

    @property
    def is_done(self) -> bool:
        """Whether it has ended; unlike `is_completed`, asking does not make it run."""
        return all(work.done for work in self._works)

    def _finish(self, timeout: float | None) -> None:
        for work in self._works:
            work.wait(timeout)

    def _when_done(self, callback: Callable[[], None]) -> None:
        if self._works:
            self._works[-1].then(callback)
        else:
            callback()

    _when_complete = _when_done

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        if not self.is_done:
            self._group.end_delay()
        return self.is_done


@uncompiled
class MessageWork(StartedWork):
    """A message under way. The thread that waits receives it; for a caller that only polls, another thread does."""

    def __init__(
        self,
        group: SharedMemoryGroup,
        call: Call,
        entry: Entry | NoEntry,
        work: Work,
        result: Any,
        bring_back: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(group, call, entry, result)
        self._work = work
        self._bring_back = bring_back
        self._lock = threading.Lock()
        self._done = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._completed: Callable[[], None] = _nothing
        self._received: Any = None  # where the thread's stream was that has received it

    def _finish(self, timeout: float | None) -> None:
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            raise TransportTimeout("timed out: another thread waits for the same message")
        try:
            if not self._done:
                self._receive(timeout)
        finally:
            self._lock.release()
        self._group.transport.order.join(self._received)
        if self._error is not None:
            raise self._error

    def _receive(self, timeout: float | None) -> None:
        try:
            self._work.wait(timeout)
            if self._bring_back is not None:
                self._bring_back()
        except Exception as error:
            self._error = error
        self._received = self._group.transport.order.here()
        self._done = True
        self._completed()

    def _when_complete(self, callback: Callable[[], None]) -> None:
        self._completed = callback

    def source_rank(self) -> int:
        """The rank that sent it, once it is here; torch asks when a program receives from any source."""
        return int(getattr(self._work, "source", -1))

    def _when_done(self, callback: Callable[[], None]) -> None:
        def receive() -> None:
            self._wait_quietly()
            callback()

        if self._done:
            callback()
        else:
            threading.Thread(target=receive, name="microparallel message", daemon=True).start()

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        if not self._done and self._thread is None:
            self._thread = threading.Thread(target=self._wait_quietly, name="microparallel message", daemon=True)
            self._thread.start()
        return self._done

    def _wait_quietly(self) -> None:
        try:
            self._finish(None)
        except Exception as error:
            self._error = error


def _nothing() -> None:
    """Do nothing."""


@uncompiled
class SeveralWorks(dist.Work):
    """Calls that were started together."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when all results are there."""
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Whether all have ended."""
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        """A future with the results of all."""
        together = torch.futures.collect_all([work.get_future() for work in self._works])
        future: torch.futures.Future[Any] = together.then(lambda done: [one.value() for one in done.value()])
        return future
