"""A rank's flight recorder, from joining its world to leaving it; and what the rank says when the world hangs.

`Flight` is what a world holds: it opens and closes the recorder's file and explains a failed call (`why`). A `Watchdog`
thread explains a call that takes long. Nothing here needs torch.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from microparallel.errors import CommsError
from microparallel.observe import folders
from microparallel.observe.diagnosis import diagnose, show_findings
from microparallel.observe.flight_file import Record, Snapshot, read
from microparallel.observe.flight_recorder import FlightRecorder, GroupLog, NoLog
from microparallel.observe.folders import gather, look
from microparallel.observe.place import where_raised
from microparallel.observe.processes import StackDumper
from microparallel.text import show_age

if TYPE_CHECKING:
    from torch.distributed import Store

VARIABLE = "MICROPARALLEL_FLIGHT"
AFTER_VARIABLE = "MICROPARALLEL_WHY_AFTER"
_MEETING = ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")  # what tells worlds of one time apart
_AFTER = 60.0  # seconds that a rank waits before it prints why
SHORT_WAIT = 0.05  # seconds from which on waiting counts when a call has failed already


def is_wanted() -> bool:
    """Whether this process keeps a flight recorder: always, unless the environment says no."""
    return os.environ.get(VARIABLE, "1") != "0"


def new_folder() -> Path | None:
    """A folder for the flight files of a new world; None: no recorder is kept."""
    return _folder_of(folders.new_world())


def agreed_folder(store: Store) -> Path | None:
    """The folder that all ranks of a world on a machine use; None: no recorder is kept.

    The first rank to call this writes a word into the store, and the folder's name follows from it. Others who can
    write into the store could choose the word, but not the name: it is always a new one, in this user's own folder.
    """
    word = store.compare_set("microparallel/flight", "", folders.new_world()).decode()
    meeting = [os.environ.get(name, "") for name in _MEETING]
    return _folder_of(folders.world_named_after(word, *meeting))


def _folder_of(name: str) -> Path | None:
    """The folder that this process was told to use, or one of this user's folders on the machine that it is on."""
    if not is_wanted():
        return None
    if given := os.environ.get(folders.FOLDER_VARIABLE, ""):
        return Path(given).absolute()
    with contextlib.suppress(OSError):
        return folders.private_folder() / name
    return None


class Flight:
    """One rank's flight recorder, with the stack dumper and the watchdog.

    Everything works without a recorder, too (`recorder` is None): then nothing is written.
    """

    def __init__(self, recorder: FlightRecorder | None, ranks_here: int = 1) -> None:
        self.recorder = recorder
        self.observers: list[Any] = []  # which are told what this rank does in this world (`observer.py`)
        self._ranks_here = ranks_here
        self._stack_dumper: StackDumper | None = None
        self._watchdog: Watchdog | None = None
        if recorder is None:
            return
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            self._stack_dumper = StackDumper(recorder.path)
            recorder.every_few_calls = self._look_after_dumps
            self._look_after_dumps()
        after = _seconds_until_why()
        if recorder.world_size > 1 and after > 0:
            self._watchdog = Watchdog(recorder.path, after)
        atexit.register(self._exits)

    @staticmethod
    def open(folder: Path | None, rank: int, world_size: int, ranks_here: int) -> Flight:
        """Begin to record in this folder; where that is not possible, go on without a recorder."""
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

    @property
    def waited(self) -> float:
        """For how many seconds the main thread has waited in calls; without a recorder, nobody counts."""
        return 0.0 if self.recorder is None else self.recorder.waited

    # ── what the rank does ──────────────────────────────────────────────────────────────────────────────────────

    def group(self, world_ranks: Sequence[int]) -> GroupLog | NoLog:
        """A log for the calls of this rank in a group."""
        return NoLog() if self.recorder is None else self.recorder.group(world_ranks)

    def spread_over(self, hosts: Sequence[str]) -> None:
        """Write down on which host each rank is, where they are not all on one."""
        if self.recorder is not None:
            self.recorder.spread_over(hosts)

    def at_step(self, step: int) -> None:
        """Write down the training step that the rank has come to."""
        if self.recorder is not None:
            self.recorder.at_step(step)

    def doing(self, activity: str) -> None:
        """Write down what the rank does from now on, between its calls."""
        if self.recorder is not None:
            self.recorder.doing(activity)

    def finishes(self) -> None:
        """Write down that the rank's function has returned."""
        if self.recorder is not None:
            self.recorder.ends("finished")

    def ends_with(self, error: BaseException | None) -> None:
        """Write down that the rank ends, with an error or (None) in order."""
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
        """What is wrong with this world, in a few lines; empty if it is not known. Takes two seconds at most.

        Args:
            lost: ranks (of the world) that are known to be gone.
        """
        if self.recorder is None:
            return ""
        try:
            snapshots = gather(self.recorder.path.parent, expect_end=lost, asking=self.recorder.rank)
            return show_findings(diagnose(snapshots, SHORT_WAIT))
        except Exception:  # the error that is being explained matters more than this one
            return ""

    def gave_up(self, ranks: Collection[int]) -> bool:
        """Whether each of these ranks (of the world) has left since a call of its own took too long.

        That is known of the ranks whose flight files are on this machine.
        """
        if self.recorder is None or not ranks:
            return False
        left = (read(folders.flight_file(self.recorder.path.parent, rank)) for rank in ranks)
        return all(one is not None and one.last is not None and one.last.outcome == "timed out" for one in left)

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Close the recorder; the last rank of a machine to do so removes the files."""
        recorder, self.recorder = self.recorder, None
        if recorder is None:
            return
        atexit.unregister(self._exits)
        if self._watchdog is not None:
            self._watchdog.close()
        if self._stack_dumper is not None:
            recorder.dumps_stack(False)
            self._stack_dumper.close()
        if os.getpid() == recorder.pid:
            recorder.ends("closed")
            with contextlib.suppress(OSError):
                folders.remove_if_all_left(recorder.path.parent, self._ranks_here)
        recorder.forget()

    def _look_after_dumps(self) -> None:
        """Write down whether other processes may send the signal: the user's program may handle it by now."""
        if self.recorder is not None and self._stack_dumper is not None:
            self.recorder.dumps_stack(self._stack_dumper.active)
            self._stack_dumper.keep_small()

    def _exits(self) -> None:
        """Python ends, and the program has not closed the world: write down why, and close it."""
        if self.recorder is not None and os.getpid() == self.recorder.pid:
            self.ends_with(getattr(sys, "last_value", None))
        self.close()


def _seconds_until_why() -> float:
    try:
        return float(os.environ.get(AFTER_VARIABLE, _AFTER))
    except ValueError:
        return _AFTER


# ── the watchdog ────────────────────────────────────────────────────────────────────────────────────────────────────


class Watchdog:
    """A thread of each rank that looks every few seconds how long the rank has been waiting, and explains a hang once.

    Of all ranks of a machine that wait, the first explains it: rank 0 may be the one that was stopped, or hangs.

    Args:
        flight_file: of this process's rank.
        after: how many seconds of waiting are a hang.
    """

    def __init__(self, flight_file: Path, after: float) -> None:
        self._file = flight_file
        self._after = after
        self._explained = 0  # the number of the call that was explained last
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="microparallel watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(min(5.0, self._after / 4)):
            with contextlib.suppress(Exception):  # an error in here must not end the rank
                self._look()

    def _look(self) -> None:
        one = read(self._file)
        waiting = None if one is None else _longest_wait(one, self._explained)
        if one is None or waiting is None or waiting.number == self._explained:
            return
        duration = one.now - waiting.since
        if duration < self._after:
            return
        if any(self._explains(other) for other in look(self._file.parent).values() if other.rank < one.rank):
            return
        findings = diagnose(gather(self._file.parent, asking=one.rank))
        # A call that no thread waits for may have ended without a record; it is looked at only once.
        if findings or not waiting.waits:
            self._explained = waiting.number
        if findings and not self._end.is_set():
            print(f"microparallel: rank {one.rank} has been waiting for {show_age(duration)}", file=sys.stderr)
            print("".join(f"  {line}\n" for line in show_findings(findings).splitlines()), end="", file=sys.stderr)
            sys.stderr.flush()

    def _explains(self, other: Snapshot) -> bool:
        """Whether another rank will do it, or has: it runs, and waits as this one does."""
        waiting = _longest_wait(other, 0)
        return other.state == "running" and waiting is not None and other.now - waiting.since > self._after / 2


def _longest_wait(one: Snapshot, explained: int) -> Record | None:
    """The call that the rank waits for, or may wait for: torch's DDP waits in C++, which leaves no record."""
    if one.current is not None:
        return one.current if one.current.end is None else None
    pending = (record for record in one.records if record.kind == "collective" and record.end is None)
    return next((record for record in pending if record.number > explained), None)
