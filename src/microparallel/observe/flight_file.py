"""A rank's flight file: what it says (`Snapshot`, `Record`), how it is laid out, and how it is read.

```
  0     head     who writes this: magic, version, process, rank, world, host, when it began
  512   step     the number of the training step; -1 where steps are not counted
  1024  doing    what the rank does now, as text
  2048  end      how it ended: in order, or with which error; the exit status that its parent has seen
  3200  hosts    on which host which ranks are, where they are not all on one
  4096  groups   64 × 256 bytes: the ranks of the groups that the records name
  20480 records  256 × 512 bytes, used in turn
```

Everything has a fixed place, so that the file can be read while its rank writes, and after the rank has died. Each item
longer than a machine word begins with a number that is 0 while the rest is being written: a rank that was killed in the
middle leaves a gap, never half a record.
"""

from __future__ import annotations

import mmap
import re
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from microparallel.observe.own_file import open_own
from microparallel.observe.place import Place, most_relevant, relevance
from microparallel.observe.processes import show_exit
from microparallel.text import parse_ranges, show_ranges


@dataclass(frozen=True, slots=True)
class Record:
    """One call of one rank.

    Ranks are numbered as in the world. Times are those of the machine's monotonic clock; None is for what has not
    happened yet.
    """

    number: int  # counts this rank's records
    kind: str  # collective, send or recv
    text: str  # as the user wrote it
    agreement: str  # the part of the call that must be the same on all ranks that make it together
    group: tuple[int, ...]
    group_name: str
    sequence: int  # from 1: of the group's collectives, or of the messages to or from this peer
    begin: float
    started: float | None = None  # when the call had been made, and only waiting for it remains
    wait: float | None = None
    end: float | None = None
    outcome: str = "open"
    peer: int | None = None
    tag: int = 0
    size: int = 0
    place: Place | None = None
    begun_in_main: bool = True
    waits_in_main: bool = True

    @property
    def name(self) -> str:
        """The call without its arguments."""
        return self.text.partition("(")[0]

    @property
    def waits(self) -> bool:
        """Whether a thread of the rank is in this call: it waits for it, or has not returned from making it."""
        return self.end is None and (self.wait is not None or self.started is None)

    @property
    def in_main(self) -> bool:
        """Whether the thread that waits, or else made the call, is the main thread."""
        return self.begun_in_main if self.wait is None else self.waits_in_main

    @property
    def since(self) -> float:
        """When the waiting began."""
        return self.begin if self.wait is None else self.wait

    @property
    def channel(self) -> tuple[str, str, int | None, int]:
        """What `sequence` counts: the group's collectives, or messages to, or from, one peer under one tag."""
        return (self.group_name, self.kind, self.peer, self.tag)

    def __str__(self) -> str:
        # A call's text numbers ranks within its group, which may differ from their numbers in the world.
        renumbered = self.group != tuple(range(len(self.group)))
        group = f" in the group {', '.join(map(str, self.group))}" if renumbered else ""
        return f"{self.text}{group}" + (f" ({self.place})" if self.place is not None else "")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One rank, as it was when its file was read.

    Attributes:
        host: of the process; of a rank that left no file here, where the others say that it is.
        state: of the process: running, stopped, ended, or unknown (on another machine, or it left no file).
        exit: how the process ended, as text, where that is known.
        ending: running, finished (its function returned), closed (it left the world), exited, raised, broke off (with
            an error that follows from another rank's).
        end_reason: the error with which it ended, or its exit code.
        stack: of its main thread, innermost first; empty where it could not be asked.
    """

    rank: int
    world_size: int
    pid: int = 0
    parent: int = 0
    host: str = ""
    world: str = ""
    began: float = 0.0  # wall clock
    now: float = 0.0  # monotonic clock
    state: str = "running"
    exit: str = ""
    ending: str = "running"
    end_reason: str = ""
    end_place: Place | None = None
    step: int | None = None
    doing: str = ""
    doing_since: float | None = None
    dumps_stack: bool = False
    start_ticks: int = 0
    hosts: str = ""  # as `show_hosts` writes them
    records: tuple[Record, ...] = ()
    stack: tuple[Place, ...] = ()

    def with_state(self, state: str, exit_text: str) -> Snapshot:
        """The same snapshot, with the state of the process."""
        return replace(self, state=state, exit=self.exit or exit_text)

    @property
    def last(self) -> Record | None:
        """The newest call."""
        return max(self.records, key=lambda record: record.number, default=None)

    @property
    def current(self) -> Record | None:
        """The call that the rank's main thread is in, or that timed out or failed if it has made none since."""
        waiting = [record for record in self.records if record.waits]
        in_main = [record for record in waiting if record.in_main]
        everything_elsewhere = not any(record.in_main or record.begun_in_main for record in self.records)
        candidates = in_main or (waiting if everything_elsewhere else [])
        if candidates:
            return max(candidates, key=lambda record: record.number)
        last = self.last
        return last if last is not None and last.outcome in ("timed out", "failed") else None

    @property
    def user_place(self) -> Place | None:
        """The line of the user's code that the rank's stack shows; None if it shows none."""
        place = most_relevant(self.stack)
        return place if place is not None and relevance(place.file) > 0 else None


# ── the layout ──────────────────────────────────────────────────────────────────────────────────────────────────────

MAGIC = b"mpflight"
VERSION = 1

# magic, version, pid, rank, world size, parent's pid, the process's start in clock ticks, wall clock, monotonic clock,
# whether it dumps its stack on the signal, host, world
HEAD = struct.Struct("<8sIiiiiQddi64s128s")
DUMPS_STACK = struct.Struct("<i")
DUMPS_STACK_AT = struct.calcsize("<8sIiiiiQdd")

STEP_AT = 512
STEP = struct.Struct("<q")

NUMBER = struct.Struct("<Q")

DOING_AT = 1024
DOING = struct.Struct("<d256s")  # since when, what; after its number

END_AT = 2048
END = struct.Struct("<Bi128s600s")  # kind, line, file, words; after its number
EXIT_AT = 3072
EXIT = struct.Struct("<i")  # the exit status as `subprocess` gives it; after its number

HOSTS_AT = 3200
HOSTS = struct.Struct("<800s")  # `alpha 0-3;beta 4-7`; after its number

GROUPS_AT = 4096
GROUPS = 64
GROUP_BYTES = 256
GROUP = struct.Struct("<248s")  # its ranks and its number among the groups of these ranks; after its number

RECORDS_AT = GROUPS_AT + GROUPS * GROUP_BYTES
RECORDS = 256
RECORD_BYTES = 512
# sequence, group, peer, tag, kind, outcome, waits in main thread, begun in main thread, line, bytes,
# begin, started, wait, end, call, what must agree, file; after its number
RECORD = struct.Struct("<IIiiBBBBIQdddd180s128s124s")
TIMES = struct.Struct("<d")
STARTED_AT = NUMBER.size + struct.calcsize("<IIiiBBBBIQd")
WAIT_AT = STARTED_AT + 8
END_TIME_AT = WAIT_AT + 8
OUTCOME_AT = NUMBER.size + struct.calcsize("<IIiiB")
WAITS_IN_MAIN_AT = OUTCOME_AT + 1
BYTE = struct.Struct("<B")

FILE_BYTES = RECORDS_AT + RECORDS * RECORD_BYTES

KINDS = ("collective", "send", "recv")
OUTCOMES = ("open", "well", "timed out", "failed")
ENDINGS = ("running", "finished", "closed", "exited", "raised", "broke off")

if NUMBER.size + RECORD.size > RECORD_BYTES or HEAD.size > STEP_AT:
    raise AssertionError("a record does not fit its place")


def cut(text: str, size: int) -> bytes:
    """A text in at most `size` bytes; one that is too long keeps its beginning, and gets a checksum as its end."""
    content = text.encode("utf-8", "replace")
    if len(content) <= size:
        return content
    import zlib

    mark = f"…#{zlib.crc32(content):08x}".encode()
    return content[: size - len(mark)].decode("utf-8", "ignore").encode() + mark


def uncut(content: bytes) -> str:
    """The text that `cut` has encoded."""
    return content.rstrip(b"\0").decode("utf-8", "replace")


def show_hosts(hosts: Sequence[str]) -> str:
    """On which host which ranks are, given each rank's host: `alpha 0-3;beta 4-7`."""
    ranks_of: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    return ";".join(f"{host} {show_ranges(ranks)}" for host, ranks in ranks_of.items())


def host_of(rank: int, hosts: str) -> str:
    """The host of a rank, in what `show_hosts` has written; empty if that is not known."""
    for one in hosts.split(";"):
        host, _, ranks = one.partition(" ")
        if re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", ranks) and rank in parse_ranges(ranks):
            return host
    return ""


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def read(path: Path) -> Snapshot | None:
    """What a rank has written, also while it writes; None if this is no flight file, or has only just been made.

    Files of other users are not read: what is in one may be meant to deceive.
    """
    try:
        with open_own(path) as file, mmap.mmap(file.fileno(), FILE_BYTES, access=mmap.ACCESS_READ) as memory:
            return _snapshot(memory)
    except (OSError, ValueError, IndexError):  # gone, or too short, or with numbers that no rank writes
        return None


def _snapshot(memory: mmap.mmap) -> Snapshot | None:
    magic, version, *head = HEAD.unpack_from(memory, 0)
    if magic != MAGIC or version != VERSION:
        return None
    pid, rank, world_size, parent, ticks, began, clock, dumps_stack, host, world = head
    # Monotonic clocks of two machines begin at different times; only the time of day is common to them.
    elsewhere = uncut(host) != socket.gethostname()
    shift = began - clock - (time.time() - time.monotonic()) if elsewhere else 0.0
    (step,) = STEP.unpack_from(memory, STEP_AT)
    _, doing_since, doing = _whole(memory, DOING_AT, DOING) or (0, 0.0, b"")
    _, ending, line, file, words = _whole(memory, END_AT, END) or (0, 0, 0, b"", b"")
    exit_status = _whole(memory, EXIT_AT, EXIT)
    _, hosts = _whole(memory, HOSTS_AT, HOSTS) or (0, b"")
    return Snapshot(
        rank=rank,
        world_size=world_size,
        pid=pid,
        parent=parent,
        host=uncut(host),
        world=uncut(world),
        began=began,
        now=time.monotonic(),
        exit=show_exit(exit_status[1]) if exit_status else "",
        ending=ENDINGS[ending],
        end_reason=uncut(words),
        end_place=Place(uncut(file), line) if line else None,
        step=None if step < 0 else step,
        doing=uncut(doing),
        doing_since=doing_since + shift if doing_since else None,
        dumps_stack=bool(dumps_stack),
        start_ticks=ticks,
        hosts=uncut(hosts),
        records=_records(memory, shift),
    )


def _records(memory: mmap.mmap, shift: float) -> tuple[Record, ...]:
    groups = _groups(memory)
    records = []
    for slot in range(RECORDS):
        fields = _whole(memory, RECORDS_AT + slot * RECORD_BYTES, RECORD)
        if fields is not None and fields[2] in groups:
            records.append(_record(fields, shift, *groups[fields[2]]))
    return tuple(sorted(records, key=lambda record: record.number))


def _record(fields: tuple[Any, ...], shift: float, group_name: str, members: tuple[int, ...]) -> Record:
    number, sequence, _, peer, tag, kind, outcome, waits_in_main, begun_in_main, line, size, *rest = fields
    *times, text, agreement, file = rest
    begin, started, wait, end = (moment + shift if moment else None for moment in times)
    return Record(
        number=number,
        kind=KINDS[kind],
        text=uncut(text),
        agreement=uncut(agreement),
        group=members,
        group_name=group_name,
        sequence=sequence,
        begin=begin or 0.0,
        started=started,
        wait=wait,
        end=end,
        outcome=OUTCOMES[outcome],
        peer=None if peer < 0 else peer,
        tag=tag,
        size=size,
        place=Place(uncut(file), line) if line else None,
        begun_in_main=bool(begun_in_main),
        waits_in_main=bool(waits_in_main),
    )


def _groups(memory: mmap.mmap) -> dict[int, tuple[str, tuple[int, ...]]]:
    groups = {}
    for slot in range(GROUPS):
        fields = _whole(memory, GROUPS_AT + slot * GROUP_BYTES, GROUP)
        if fields is not None:
            number, name = fields[0], uncut(fields[1])
            groups[number - 1] = name, parse_ranges(name.partition("#")[0])
    return groups


def _whole(memory: mmap.mmap, at: int, what: struct.Struct) -> tuple[Any, ...] | None:
    """The item at this place; None if the rank was writing it: its number is 0, or changed while it was read."""
    (before,) = NUMBER.unpack_from(memory, at)
    fields = what.unpack_from(memory, at + NUMBER.size)
    (after,) = NUMBER.unpack_from(memory, at)
    return (before, *fields) if before == after != 0 else None
