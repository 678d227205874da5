"""One process's flight recorder, from joining its world to leaving it."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

from microparallel.errors import CommsError
from microparallel.observe import folders
from microparallel.observe.diagnosis import diagnose, in_words
from microparallel.observe.flight_file import Record, Snapshot, read
from microparallel.observe.flight_recorder import FlightRecorder, GroupLog, NoLog
from microparallel.observe.folders import gather
from microparallel.observe.place import where_raised
from microparallel.observe.processes import Answers
from microparallel.text import show_age

VARIABLE = "MICROPARALLEL_FLIGHT"
AFTER_VARIABLE = "MICROPARALLEL_WHY_AFTER"
_NONE = "none"  # for a folder
_AFTER = 60.0  # seconds of waiting before a world explains itself
_LITTLE = 0.05  # seconds of waiting that count when a call has failed already


class Notes(Protocol):
    """Where the ranks of a world find each other: as much of torch's store as is needed here."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a key unless it is there, and return what is."""


def is_wanted() -> bool:
    """Whether this process keeps a flight recorder: always, unless the environment says no."""
    return os.environ.get(VARIABLE, "1") != "0"


def new_folder() -> Path | None:
    """The folder for the flight files of a new world; None: it keeps no recorder."""
    return _folder_of(_new_name())


def agreed_folder(notes: Notes) -> Path | None:
    """The folder that all ranks of a world use; the first to come chooses it. None: they keep no recorder."""
    chosen = notes.compare_set("microparallel/flight", "", _new_name()).decode()
    return _folder_of(chosen) if is_wanted() else None


def _new_name() -> str:
    if not is_wanted():
        return _NONE
    given = os.environ.get(folders.FOLDER_VARIABLE, "")
    return str(Path(given).absolute()) if given else folders.new_world()


def _folder_of(name: str) -> Path | None:
    """A name alone is of a folder of this user's, on whatever machine this rank is on."""
    if name.startswith("/"):
        return Path(name)
    with contextlib.suppress(OSError):
        return None if name == _NONE else folders.private_folder() / name
    return None


class Flight:
    """What a world holds: the recorder, who answers for its stack, and who looks whether it hangs.

    Everything works without a recorder, too (`recorder` is None): then nothing is written.
    """

    def __init__(self, recorder: FlightRecorder | None, ranks_here: int = 1) -> None:
        self.recorder = recorder
        self.observers: list[Any] = []  # who else is told what this rank does in this world (`observe`)
        self._ranks_here = ranks_here
        self._answers: Answers | None = None
        self._watchdog: Watchdog | None = None
        if recorder is None:
            return
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            self._answers = Answers(recorder.path)
            recorder.now_and_then = self._say_whether_it_answers
            self._say_whether_it_answers()
        patience = _seconds_until_why()
        if recorder.rank == 0 and recorder.world_size > 1 and patience > 0:
            self._watchdog = Watchdog(recorder.path, patience)
        atexit.register(self._exits)

    @staticmethod
    def open(folder: Path | None, rank: int, world_size: int, ranks_here: int) -> Flight:
        """Begin to record in this folder; where that is not possible, the world goes on without."""
        if folder is None or not is_wanted():
            return Flight(None)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            recorder = FlightRecorder(folders.flight_file(folder, rank), rank, world_size, folder.name)
        except OSError:
            return Flight(None)
        with contextlib.suppress(OSError):
            if rank == 0:
                folders.remove_old(folders.private_folder())
        return Flight(recorder, ranks_here)

    @property
    def folder(self) -> Path | None:
        """Where the flight files of this world are."""
        return None if self.recorder is None else self.recorder.path.parent

    # ── what happens ────────────────────────────────────────────────────────────────────────────────────────────

    def group(self, world_ranks: Sequence[int]) -> GroupLog | NoLog:
        """A log for the calls of a group."""
        return NoLog() if self.recorder is None else self.recorder.group(world_ranks)

    def at_step(self, step: int) -> None:
        """Training has come to this step."""
        if self.recorder is not None:
            self.recorder.at_step(step)

    def doing(self, words: str) -> None:
        """What the rank does from now on, between its calls."""
        if self.recorder is not None:
            self.recorder.doing(words)

    def finishes(self) -> None:
        """The rank's function has returned."""
        if self.recorder is not None:
            self.recorder.ends("finished")

    def ends_with(self, error: BaseException | None) -> None:
        """The rank ends with an error, or in order."""
        if self.recorder is None:
            return
        if error is None:
            self.recorder.ends("closed")
        elif isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            self.recorder.ends("exited" if code else "closed", f"exit code {code}")
        else:
            first_line = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            kind = "broke off" if isinstance(error, CommsError) else "raised"
            self.recorder.ends(kind, first_line, where_raised(error.__traceback__))

    # ── why ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def why(self, lost: Collection[int] = ()) -> str:
        """What is wrong with this world, in a few lines; empty if that cannot be told. Takes two seconds at most.

        Args:
            lost: ranks (of the world) that are known to have gone.
        """
        if self.recorder is None:
            return ""
        try:
            snapshots = gather(self.recorder.path.parent, expect_end=lost, here=self.recorder.rank)
            return in_words(diagnose(snapshots, _LITTLE))
        except Exception:  # whatever it is, the error that is being explained matters more
            return ""

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Leave; the last rank to do so takes the files away."""
        recorder, self.recorder = self.recorder, None
        if recorder is None:
            return
        atexit.unregister(self._exits)
        if self._watchdog is not None:
            self._watchdog.close()
        if self._answers is not None:
            recorder.answers(False)
            self._answers.close()
        if os.getpid() == recorder.pid:
            recorder.ends("closed")
            with contextlib.suppress(OSError):
                folders.remove_if_all_left(recorder.path.parent, self._ranks_here)
        recorder.forget()

    def _say_whether_it_answers(self) -> None:
        """Its user may have taken the signal for something else meanwhile; then nobody must send it to ask."""
        if self.recorder is not None and self._answers is not None:
            self.recorder.answers(self._answers.given)

    def _exits(self) -> None:
        """Python ends, and nobody has closed the world."""
        if self.recorder is not None and os.getpid() == self.recorder.pid:
            self.ends_with(getattr(sys, "last_value", None))
        self.close()


def _seconds_until_why() -> float:
    try:
        return float(os.environ.get(AFTER_VARIABLE, _AFTER))
    except ValueError:
        return _AFTER


# A world that hangs says so by itself: rank 0 looks now and then for how long it has been waiting.


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
