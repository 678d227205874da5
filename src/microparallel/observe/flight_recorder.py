"""The flight recorder: a rank writes its last calls into a small memory-mapped file, as it makes them.

What was written stays readable even if the rank is killed, since the kernel keeps the pages of a mapped file. Writing
an entry takes some microseconds and never waits: no lock, no system call.
"""

from __future__ import annotations

import itertools
import mmap
import os
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from microparallel.observe import flight_file
from microparallel.observe.place import Place, caller
from microparallel.observe.processes import start_ticks
from microparallel.text import show_ranges

_write_number = flight_file.NUMBER.pack_into
_read_number = flight_file.NUMBER.unpack_from
_write_record = flight_file.RECORD.pack_into
_write_time = flight_file.TIMES.pack_into
_write_byte = flight_file.BYTE.pack_into
_now = time.monotonic
_frame = sys._getframe
_thread = threading.get_ident
_cut = flight_file.cut

_COLLECTIVE, _SEND, _RECV = range(3)
_WELL, _TIMED_OUT, _FAILED = 1, 2, 3
_FEW = 16  # calls


class FlightRecorder:
    """Writes one process's flight file. Each group of ranks gets a `GroupLog`, which writes the records of its calls.

    Args:
        path: of the file; one that exists already is replaced.
        rank: of this process, in the world.
        world_size: how many ranks there are.
        world: a name that all ranks of this world share.
    """

    def __init__(self, path: Path, rank: int, world_size: int, world: str) -> None:
        self.path = path
        self.rank = rank
        self.world_size = world_size
        self.pid = os.getpid()
        self._memory: mmap.mmap | bytearray = _create(path)
        self._numbers = itertools.count(1)
        self._activities = itertools.count(1)
        self._groups = itertools.count(0)
        self._groups_of: Counter[tuple[int, ...]] = Counter()  # how many groups of the same ranks there were
        self._main = threading.main_thread().ident
        self.waited = 0.0  # seconds for which the main thread has waited in calls that have ended
        self._waited_until = 0.0
        self.every_few_calls: Callable[[], None] = _nothing  # called for every 16th call that is recorded
        host, named = _cut(socket.gethostname(), 64), _cut(world, 128)
        head = (self.pid, rank, world_size, os.getppid(), start_ticks(self.pid), time.time(), _now(), 0, host, named)
        flight_file.STEP.pack_into(self._memory, flight_file.STEP_AT, -1)
        flight_file.HEAD.pack_into(self._memory, 0, flight_file.MAGIC, flight_file.VERSION, *head)

    def group(self, world_ranks: Sequence[int]) -> GroupLog:
        """A log for the calls of a group. Its ranks make them in the same order, so all number them alike."""
        members = tuple(world_ranks)
        self._groups_of[members] += 1
        number = next(self._groups)
        name = f"{show_ranges(members)}#{self._groups_of[members]}"
        at = flight_file.GROUPS_AT + number % flight_file.GROUPS * flight_file.GROUP_BYTES
        self._put(at, number + 1, flight_file.GROUP, _cut(name, flight_file.GROUP.size))
        return GroupLog(self, members, number)

    def at_step(self, step: int) -> None:
        """Write down the training step that the rank has come to."""
        flight_file.STEP.pack_into(self._memory, flight_file.STEP_AT, step)

    def doing(self, activity: str) -> None:
        """Write down what the rank does from now on, between its calls."""
        self._put(flight_file.DOING_AT, next(self._activities), flight_file.DOING, _now(), _cut(activity, 256))

    def spread_over(self, hosts: Sequence[str]) -> None:
        """Write down on which host each rank is: what those on other hosts write may not be seen from here."""
        self._put(
            flight_file.HOSTS_AT, 1, flight_file.HOSTS, _cut(flight_file.show_hosts(hosts), flight_file.HOSTS.size)
        )

    def ends(self, kind: str, reason: str = "", place: Place | None = None) -> None:
        """Write down how the rank ends. Only the first end is kept, unless that was "finished"."""
        before = flight_file.BYTE.unpack_from(self._memory, flight_file.END_AT + flight_file.NUMBER.size)[0]
        if before <= flight_file.ENDINGS.index("finished"):
            file, line = (place.file.encode()[-128:], place.line) if place is not None else (b"", 0)
            what = (flight_file.ENDINGS.index(kind), line, file, _cut(reason, 600))
            self._put(flight_file.END_AT, 1, flight_file.END, *what)

    def dumps_stack(self, yes: bool) -> None:
        """Write down whether this process dumps its stack when it gets the signal (`processes.StackDumper`)."""
        flight_file.DUMPS_STACK.pack_into(self._memory, flight_file.DUMPS_STACK_AT, yes)

    def forget(self) -> None:
        """Close the file; what is recorded from now on is lost."""
        memory, self._memory = self._memory, bytearray(flight_file.FILE_BYTES)
        if isinstance(memory, mmap.mmap):
            memory.close()

    def _put(self, at: int, number: int, what: struct.Struct, *values: object) -> None:
        memory = self._memory
        _write_number(memory, at, 0)
        what.pack_into(memory, at + flight_file.NUMBER.size, *values)
        _write_number(memory, at, number)


class GroupLog:
    """Writes the calls of this rank in one group."""

    def __init__(self, recorder: FlightRecorder, world_ranks: tuple[int, ...], number: int) -> None:
        self.recorder = recorder
        self.world_ranks = world_ranks
        self._number = number
        self._collectives = itertools.count(1)
        self._messages: dict[tuple[int, int | None, int], Iterator[int]] = {}

    def collective(self, text: str, agreement: str, size: int = 0) -> Entry:
        """Write down that the rank begins a call that all ranks of the group make."""
        return Entry(
            self.recorder, (next(self._collectives), self._number, -1, 0, _COLLECTIVE), text, agreement, size, _frame(1)
        )

    def send(self, text: str, agreement: str, peer: int, tag: int = 0, size: int = 0) -> Entry:
        """Write down that the rank begins to send to a rank of the group."""
        return self._message(_SEND, text, agreement, peer, tag, size)

    def recv(self, text: str, agreement: str, peer: int | None, tag: int = 0, size: int = 0) -> Entry:
        """Write down that the rank begins to receive from a rank of the group; None: from any."""
        return self._message(_RECV, text, agreement, peer, tag, size)

    def _message(self, kind: int, text: str, agreement: str, peer: int | None, tag: int, size: int) -> Entry:
        channel = kind, peer, tag
        numbers = self._messages.get(channel)
        if numbers is None:
            numbers = self._messages[channel] = itertools.count(1)
        other = -1 if peer is None else self.world_ranks[peer]
        # The user chooses tags freely; a record has room for 32 bits.
        what = (next(numbers), self._number, other, tag & 0x7FFFFFFF, kind)
        return Entry(self.recorder, what, text, agreement, size, _frame(2))


class Entry:
    """One call in the file. `Comms` calls its methods as the call goes on."""

    __slots__ = ("_at", "_content", "_number", "_recorder", "_waits_since")

    def __init__(
        self, recorder: FlightRecorder, what: tuple[int, ...], text: str, agreement: str, size: int, frame: FrameType
    ):
        self._recorder = recorder
        file, line = caller(frame)
        self._content = what, text, agreement, size, file, line, _now()
        self._waits_since: float | None = None
        self._write(_thread() == recorder._main)

    def _write(self, in_main: bool) -> None:
        recorder = self._recorder
        what, text, agreement, size, file, line, begin = self._content
        memory = recorder._memory
        self._number = number = next(recorder._numbers)
        self._at = at = flight_file.RECORDS_AT + number % flight_file.RECORDS * flight_file.RECORD_BYTES
        shown = _cut(text, 180)
        agreed = _cut(agreement, 128) if agreement is not text or len(shown) > 128 else shown
        _write_number(memory, at, 0)
        _write_record(memory, at + 8, *what, 0, in_main, in_main, line, size, begin, 0.0, 0.0, 0.0, shown, agreed, file)
        _write_number(memory, at, number)
        if not number % _FEW:
            recorder.every_few_calls()

    @property
    def place(self) -> tuple[bytes, int]:
        """The file, as much of its end as a record holds, and the line of the user's code that made the call."""
        return self._content[4], self._content[5]

    def started(self) -> None:
        """The call has been made; only waiting for it remains."""
        if _read_number(self._recorder._memory, self._at)[0] == self._number:
            _write_time(self._recorder._memory, self._at + flight_file.STARTED_AT, _now())

    def waits(self) -> None:
        """The calling thread waits for the call from now on."""
        recorder = self._recorder
        in_main = _thread() == recorder._main
        if _read_number(recorder._memory, self._at)[0] != self._number:
            self._write(in_main)  # its place in the file holds a later call by now
        now = _now()
        if in_main:
            self._waits_since = now
        _write_byte(recorder._memory, self._at + flight_file.WAITS_IN_MAIN_AT, in_main)
        _write_time(recorder._memory, self._at + flight_file.WAIT_AT, now)

    def ends(self) -> None:
        """The call has ended well."""
        self._end(_WELL)

    def fails(self, timed_out: bool) -> None:
        """The call has ended with an error."""
        self._end(_TIMED_OUT if timed_out else _FAILED)

    def _end(self, outcome: int) -> None:
        recorder, now = self._recorder, _now()
        if self._waits_since is not None:  # several calls may be waited for at once: no second counts twice
            recorder.waited += now - max(self._waits_since, recorder._waited_until)
            recorder._waited_until = now
        memory = recorder._memory
        if _read_number(memory, self._at)[0] == self._number:
            _write_byte(memory, self._at + flight_file.OUTCOME_AT, outcome)
            _write_time(memory, self._at + flight_file.END_TIME_AT, now)


class NoLog:
    """The log of a rank without a flight recorder: writes nothing."""

    def collective(self, text: str, agreement: str, size: int = 0) -> NoEntry:  # noqa: ARG002
        """As `GroupLog.collective`."""
        return NoEntry()

    def send(self, text: str, agreement: str, peer: int, tag: int = 0, size: int = 0) -> NoEntry:  # noqa: ARG002
        """As `GroupLog.send`."""
        return NoEntry()

    def recv(self, text: str, agreement: str, peer: int | None, tag: int = 0, size: int = 0) -> NoEntry:  # noqa: ARG002
        """As `GroupLog.recv`."""
        return NoEntry()


class NoEntry:
    """A call of a rank without a flight recorder: writes nothing."""

    place = None  # not looked up

    def started(self) -> None:
        """As `Entry.started`."""

    def waits(self) -> None:
        """As `Entry.waits`."""

    def ends(self) -> None:
        """As `Entry.ends`."""

    def fails(self, timed_out: bool) -> None:
        """As `Entry.fails`."""


def _nothing() -> None:
    """Do nothing."""


def _create(path: Path) -> mmap.mmap:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600)
    try:
        # All of it now: to write where a full disk has no room would end the process.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, flight_file.FILE_BYTES)
        else:
            os.write(descriptor, bytes(flight_file.FILE_BYTES))
        return mmap.mmap(descriptor, flight_file.FILE_BYTES)
    finally:
        os.close(descriptor)


def write_exit(path: Path, status: int) -> None:
    """Write into a rank's file how its process ended, which only its parent knows; -9 means killed by signal 9."""
    with path.open("r+b") as file:
        file.seek(flight_file.EXIT_AT)
        file.write(flight_file.NUMBER.pack(1) + flight_file.EXIT.pack(status))
