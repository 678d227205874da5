"""Read a flight file: while its rank writes on, or after the rank has gone."""

from __future__ import annotations

import mmap
import socket
import struct
import time
from pathlib import Path
from typing import Any

from microparallel.flight import layout
from microparallel.flight.layout import uncut
from microparallel.flight.place import Place
from microparallel.flight.processes import exit_in_words
from microparallel.flight.record import Record, Snapshot


def read(path: Path) -> Snapshot | None:
    """What a rank has written; None if this is no flight file, or has only just been made."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), layout.FILE_BYTES, access=mmap.ACCESS_READ) as memory:
            return _snapshot(memory)
    except (OSError, ValueError):  # gone, or too short
        return None


def _snapshot(memory: mmap.mmap) -> Snapshot | None:
    magic, version, *head = layout.HEAD.unpack_from(memory, 0)
    if magic != layout.MAGIC or version != layout.VERSION:
        return None
    pid, rank, world_size, parent, ticks, began, clock, answers, host, world = head
    # Machines count their time from when they were started; what they share is the time of day.
    elsewhere = uncut(host) != socket.gethostname()
    shift = began - clock - (time.time() - time.monotonic()) if elsewhere else 0.0
    (step,) = layout.STEP.unpack_from(memory, layout.STEP_AT)
    _, doing_since, doing = _whole(memory, layout.DOING_AT, layout.DOING) or (0, 0.0, b"")
    _, ending, line, file, words = _whole(memory, layout.END_AT, layout.END) or (0, 0, 0, b"", b"")
    exit_status = _whole(memory, layout.EXIT_AT, layout.EXIT)
    return Snapshot(
        rank=rank,
        world_size=world_size,
        pid=pid,
        parent=parent,
        host=uncut(host),
        world=uncut(world),
        began=began,
        now=time.monotonic(),
        exit=exit_in_words(exit_status[1]) if exit_status else "",
        ending=layout.ENDINGS[ending],
        last_words=uncut(words),
        end_place=Place(uncut(file), line) if line else None,
        step=None if step < 0 else step,
        doing=uncut(doing),
        doing_since=doing_since + shift if doing_since else None,
        answers=bool(answers),
        start_ticks=ticks,
        records=_records(memory, shift),
    )


def _records(memory: mmap.mmap, shift: float) -> tuple[Record, ...]:
    groups = _groups(memory)
    records = []
    for slot in range(layout.RECORDS):
        fields = _whole(memory, layout.RECORDS_AT + slot * layout.RECORD_BYTES, layout.RECORD)
        if fields is not None and fields[2] in groups:
            records.append(_record(fields, shift, *groups[fields[2]]))
    return tuple(sorted(records, key=lambda record: record.number))


def _record(fields: tuple[Any, ...], shift: float, group_name: str, members: tuple[int, ...]) -> Record:
    number, sequence, _, peer, tag, kind, outcome, waits_in_main, begun_in_main, line, size, *rest = fields
    *times, text, agreement, file = rest
    begin, started, wait, end = (moment + shift if moment else None for moment in times)
    return Record(
        number=number,
        kind=layout.KINDS[kind],
        text=uncut(text),
        agreement=uncut(agreement),
        group=members,
        group_name=group_name,
        sequence=sequence,
        begin=begin or 0.0,
        started=started,
        wait=wait,
        end=end,
        outcome=layout.OUTCOMES[outcome],
        peer=None if peer < 0 else peer,
        tag=tag,
        size=size,
        place=Place(uncut(file), line) if line else None,
        begun_in_main=bool(begun_in_main),
        waits_in_main=bool(waits_in_main),
    )


def _groups(memory: mmap.mmap) -> dict[int, tuple[str, tuple[int, ...]]]:
    groups = {}
    for slot in range(layout.GROUPS):
        fields = _whole(memory, layout.GROUPS_AT + slot * layout.GROUP_BYTES, layout.GROUP)
        if fields is not None:
            number, name = fields[0], uncut(fields[1])
            groups[number - 1] = name, _from_ranges(name.partition("#")[0])
    return groups


def _whole(memory: mmap.mmap, at: int, what: struct.Struct) -> tuple[Any, ...] | None:
    """What lies there after its number, if it is whole: the number is the same after the rest was read, and not 0."""
    (before,) = layout.NUMBER.unpack_from(memory, at)
    fields = what.unpack_from(memory, at + layout.NUMBER.size)
    (after,) = layout.NUMBER.unpack_from(memory, at)
    return (before, *fields) if before == after != 0 else None


def _from_ranges(text: str) -> tuple[int, ...]:
    ranks: list[int] = []
    for part in text.partition("…")[0].split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            ranks += range(int(first), int(last if last.isdigit() else first) + 1)
    return tuple(ranks)
