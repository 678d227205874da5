"""The flight files of the ranks that a process has started, as their parent sees them."""

from __future__ import annotations

import contextlib
from pathlib import Path

from microparallel.flight import diagnose, gather, in_words
from microparallel.flight.folders import flight_file, remove
from microparallel.flight.processes import ENDED_STATUS
from microparallel.flight.recorder import write_exit

_LITTLE = 0.05  # seconds of waiting that count when a world has failed already


class Flights:
    """One world's; None instead of a folder where nothing is recorded."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._died: set[int] = set()

    @property
    def folder_name(self) -> str | None:
        """The folder, for the ranks."""
        return None if self._folder is None else str(self._folder)

    def note_death(self, rank: int, exit_status: int | None) -> None:
        """Write down how a rank's process ended: when it is gone, only its parent knows."""
        self._died.add(rank)
        if exit_status is not None:
            self._write_exit(rank, exit_status)

    def note_end(self, ranks: int) -> None:
        """Write down that those who are left are ended by their parent."""
        for rank in set(range(ranks)) - self._died:
            self._write_exit(rank, ENDED_STATUS)

    def _write_exit(self, rank: int, status: int) -> None:
        if self._folder is not None:
            with contextlib.suppress(OSError):
                write_exit(flight_file(self._folder, rank), status)

    def why(self) -> str:
        """What is wrong, in lines that go beneath a headline."""
        if self._folder is None:
            return ""
        try:
            findings = diagnose(gather(self._folder), _LITTLE)
        except Exception:  # whatever it is, the error that is being explained matters more
            return ""
        return "".join(f"\n  {line}" for line in in_words(findings).splitlines())

    def remove_unless_a_rank_died(self) -> None:
        """Take the files away; those of ranks that died stay for `microparallel why`."""
        if self._folder is not None and not self._died:
            with contextlib.suppress(OSError):
                remove(self._folder)
