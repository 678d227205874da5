"""What torch is handed for a call that was started: something to wait for, to ask, or to take a future from."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from microparallel.comms.calls import Call, named_failures
from microparallel.comms.request import activity_of
from microparallel.comms.shared_memory import SharedMemoryGroup
from microparallel.comms.work_queue import Turn
from microparallel.errors import TransportTimeout
from microparallel.observe import ObservedCall, observe_call
from microparallel.observe.flight_recorder import Entry, NoEntry
from microparallel.torch_backend.tensors import seconds
from microparallel.torch_private import CalledWork, at_end_of_backward, number_of_backward
from microparallel.transport.base import Work


class StartedWork(CalledWork):
    """What collectives and messages have in common; `_finish` waits, and raises what went wrong."""

    def __init__(self, group: SharedMemoryGroup, call: Call, entry: Entry | NoEntry, result: Any) -> None:
        super().__init__()
        self._group = group
        self._call = call
        observers = group.flight.observers
        self._entry: Entry | NoEntry | ObservedCall | None = (  # until it has ended
            observe_call(entry, observers, activity_of(call, group)) if observers else entry
        )
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the result is there; raise an error that names the rank and the call."""
        if self._entry is not None:
            self._entry.waits()
        return self._complete(seconds(timeout))

    def _complete(self, timeout: float | None) -> bool:
        entry, self._entry = self._entry, None
        if entry is None:  # it has been waited for before
            entry = NoEntry()
        with named_failures(self._call, self._group, entry):
            self._finish(timeout)
        entry.ends()
        return True

    def _leave(self) -> None:
        """Its end is left to a future, and nobody will say that it is waited for.

        If a backward began it, that is torch's DistributedDataParallel, which waits inside of backward when all is
        computed. Calls that autograd runs then run in the order in which they were asked for, and DDP asks after us.
        """
        if number_of_backward() is not None:
            at_end_of_backward(self._all_is_computed)

    def _all_is_computed(self) -> None:
        if self._entry is not None:
            self._entry.waits()

    def _finish(self, timeout: float | None) -> None:
        raise NotImplementedError

    def _when_done(self, callback: Callable[[], None]) -> None:
        raise NotImplementedError

    def synchronize(self) -> None:
        """The same as waiting: there are no streams on a CPU."""
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
        """A future with the result, for whoever continues when it is there (DDP does)."""
        done: torch.futures.Future[Any] = torch.futures.Future()

        # An exception that is put into a future reaches only Python; one that a callback raises, C++ too.
        def outcome(_: torch.futures.Future[Any]) -> Any:
            self._complete(None)
            return self._result

        future: torch.futures.Future[Any] = done.then(outcome)
        if self._group.flight.observers:
            self._leave()
        self._when_done(lambda: done.set_result(None))
        return future

    def get_future_result(self) -> torch.futures.Future[Any]:
        """The same future: failure and success are both in it."""
        return self.get_future()


class CollectiveWork(StartedWork):
    """One or more collectives in the line of their group."""

    def __init__(
        self, group: SharedMemoryGroup, call: Call, entry: Entry | NoEntry, turns: Sequence[Turn], result: Any
    ) -> None:
        super().__init__(group, call, entry, result)
        self._turns = turns

    def _finish(self, timeout: float | None) -> None:
        for turn in self._turns:
            turn.wait(timeout)

    def _when_done(self, callback: Callable[[], None]) -> None:
        if self._turns:
            self._turns[-1].then(callback)
        else:
            callback()

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        done = all(turn.done for turn in self._turns)
        if not done:
            self._group.hurry()
        return done


class MessageWork(StartedWork):
    """A message under way. It is received by whoever waits for it; who only asks gets a thread that waits."""

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

    def _finish(self, timeout: float | None) -> None:
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            raise TransportTimeout("timed out: another thread waits for the same message")
        try:
            if not self._done:
                self._receive(timeout)
        finally:
            self._lock.release()
        if self._error is not None:
            raise self._error

    def _receive(self, timeout: float | None) -> None:
        try:
            self._work.wait(timeout)
            if self._bring_back is not None:
                self._bring_back()
        except Exception as error:
            self._error = error
        self._done = True

    def source_rank(self) -> int:
        """Who sent it, once it is here; torch asks when a program receives from anybody."""
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
