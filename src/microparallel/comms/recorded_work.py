"""A transfer that is written down by the flight recorder, for those who use a transport without a Request."""

from __future__ import annotations

from typing import Any

from microparallel.flight import Entry, NoEntry
from microparallel.transport.base import Work


class RecordedWork:
    """A transfer under way; for all but waiting it is the one it was made from."""

    def __init__(self, work: Work, entry: Entry | NoEntry) -> None:
        self._work = work
        self._entry = entry
        entry.started()

    def wait(self, timeout: float | None = None) -> None:
        """Return when the transfer is complete."""
        self._entry.waits()
        try:
            self._work.wait(timeout)
        except BaseException as error:
            self._entry.fails(timed_out=isinstance(error, TimeoutError))
            raise
        self._entry.ends()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
