"""The handle of a communication that is under way."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from microparallel.comms.calls import Call
from microparallel.comms.failures import named_failures
from microparallel.comms.group import Group
from microparallel.flight import Entry, NoEntry
from microparallel.observe import Watched
from microparallel.transport.base import Work

Result = TypeVar("Result")

# Buffers of requests that were dropped before they were waited for. The transport may still read or write them, so they
# live as long as the process: a leak that a warning names is better than memory that changes under a transfer.
_ORPHANS: list[Sequence[Work]] = []


class Request(Generic[Result]):
    """A communication under way. It owns its buffers until `wait()` has returned; keep it until then."""

    def __init__(
        self,
        call: Call,
        works: Sequence[Work],
        finish: Callable[[], Result],
        transport: Group,
        entry: Entry | NoEntry | Watched,
    ) -> None:
        self._call = call
        self._entry = entry
        self._works = works
        self._finish: Callable[[], Result] | None = finish
        self._transport = transport
        self._failure: BaseException | None = None
        self._result: Result

    def wait(self, timeout: float | None = None) -> Result:
        """Return the result when it is there; waiting again returns it again, or raises what was raised.

        Raises:
            CommsTimeout: after `timeout` seconds (None: the timeout of the world).
            PeerLost: when a rank that is needed has gone away.
        """
        if self._failure is not None:
            raise self._failure
        if self._finish is not None:
            works, self._works = self._works, ()
            try:
                self._wait_for(works, timeout)
            except BaseException as error:
                self._failure = error  # what the buffers hold now is nobody's result
                raise
            self._result = self._finish()
            self._finish = None
        return self._result

    def _wait_for(self, works: Sequence[Work], timeout: float | None) -> None:
        self._entry.waits()
        with named_failures(self._call, self._transport, self._entry):
            for work in works:
                work.wait(timeout)
        self._entry.ends()

    def __del__(self) -> None:
        if getattr(self, "_works", ()):
            _ORPHANS.append(self._works)
            warnings.warn(
                f"{self._call} was dropped before it was waited for; keep the request and call wait()",
                ResourceWarning,
                stacklevel=2,
            )

    def __repr__(self) -> str:
        return f"<Request {self._call}, {'under way' if self._finish else 'complete'}>"
