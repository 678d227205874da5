"""A world that hangs says so by itself: rank 0 looks now and then for how long it has been waiting."""

from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path

from microparallel.flight.diagnosis import diagnose, in_words
from microparallel.flight.gathering import gather
from microparallel.flight.reading import read
from microparallel.flight.record import Record, Snapshot
from microparallel.text import show_age


class Watchdog:
    """A thread that prints one diagnosis for each hang.

    Args:
        flight_file: of the rank that is watched, in whose process this is.
        patience: how many seconds of waiting are a hang.
    """

    def __init__(self, flight_file: Path, patience: float) -> None:
        self._file = flight_file
        self._patience = patience
        self._told = 0  # the number of the call that was explained last
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="microparallel watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._end.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(min(5.0, self._patience / 4)):
            with contextlib.suppress(Exception):  # it only watches: nothing that goes wrong here may hurt the rank
                self._look()

    def _look(self) -> None:
        one = read(self._file)
        waiting = None if one is None else _longest_wait(one, self._told)
        if one is None or waiting is None or waiting.number == self._told:
            return
        duration = one.now - waiting.since
        if duration < self._patience:
            return
        findings = diagnose(gather(self._file.parent, here=one.rank))
        # A call that nobody waits for may have ended without a word; it is looked at once.
        if findings or not waiting.waits:
            self._told = waiting.number
        if findings and not self._end.is_set():
            print(f"microparallel: rank {one.rank} has been waiting for {show_age(duration)}", file=sys.stderr)
            print("".join(f"  {line}\n" for line in in_words(findings).splitlines()), end="", file=sys.stderr)
            sys.stderr.flush()


def _longest_wait(one: Snapshot, told: int) -> Record | None:
    """The call that holds a rank up, or might: torch's DDP waits in C++, for calls that nobody waits for in Python."""
    if one.current is not None:
        return one.current if one.current.end is None else None
    pending = (record for record in one.records if record.kind == "collective" and record.end is None)
    return next((record for record in pending if record.number > told), None)
