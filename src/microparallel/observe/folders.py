"""The folders of flight files: where they are, how long they stay, and how all ranks of a world are read at once.

```
runs/20250131-093000-mlp/flight/          of a training run
$XDG_RUNTIME_DIR/microparallel-1000/      of everything else: one folder for each world
  20250131-093000-4711/
    rank-0.flight  rank-0.stack  rank-1.flight …
```

The last rank to leave in order removes the folder. The files of ranks that died stay for a day.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from microparallel.observe import processes
from microparallel.observe.flight_file import Snapshot, host_of, read
from microparallel.observe.processes import ask_for_stack, state_of

FOLDER_VARIABLE = "MICROPARALLEL_FLIGHT_DIR"
_A_DAY = 24 * 3600.0
_MOST_WORLDS, _MOST_BYTES = 20, 64 * 2**20  # of worlds that have ended, kept for `why`


def private_folder() -> Path:
    """The folder of this user for worlds that have none of their own; no other user may read it.

    Raises:
        OSError: another user has made a folder of that name.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    base = Path(runtime) if runtime and os.access(runtime, os.W_OK) else Path(tempfile.gettempdir())
    folder = base / f"microparallel-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder of this user's own")
    return folder


def new_world() -> str:
    """A name for a world that no other on this machine has."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{time.monotonic_ns() % 10**6:06d}"


def world_named_after(word: str, *more: str) -> str:
    """A name for a world that all its ranks find, given a word that they share; nobody can choose the name."""
    digest = hashlib.sha256("\0".join([word, *more]).encode("utf-8", "replace")).hexdigest()[:16]
    when = word[:15] if re.fullmatch(r"\d{8}-\d{6}", word[:15], re.ASCII) else time.strftime("%Y%m%d-%H%M%S")
    return f"{when}-{digest}"


def flight_file(folder: Path, rank: int) -> Path:
    """The flight file of a rank."""
    return folder / f"rank-{rank}.flight"


def flight_files(folder: Path) -> list[Path]:
    """The flight files of all ranks that have one in this folder."""
    return sorted(folder.glob("rank-*.flight"))


def remove(folder: Path) -> None:
    """Remove all flight files, and the folder unless it holds other files."""
    for path in (*folder.glob("rank-*.flight"), *folder.glob("rank-*.stack")):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def remove_if_all_left(folder: Path, ranks_here: int) -> None:
    """Remove the files if every rank of this machine has left the world in order."""
    snapshots = [read(path) for path in flight_files(folder)]
    left = sum(snapshot is not None and snapshot.ending == "closed" for snapshot in snapshots)
    if left == len(snapshots) >= ranks_here:
        remove(folder)


def remove_old(folder: Path) -> None:
    """Remove the flight files of worlds that ended more than a day ago; of the others, keep some, the newest.

    A run that starts its ranks again many times leaves a folder each time.
    """
    worlds, taken = 0, 0
    for world in sorted(folder.iterdir(), key=_changed, reverse=True):
        with contextlib.suppress(OSError):
            if is_running(world):
                continue
            worlds += 1
            taken += sum(path.stat().st_blocks * 512 for path in flight_files(world))
            too_many = worlds > _MOST_WORLDS or taken > _MOST_BYTES
            if too_many or time.time() - world.stat().st_mtime > _A_DAY:
                remove(world)


def _changed(path: Path) -> float:
    """When a folder was changed last; 0 for one that another process has just removed."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def is_running(folder: Path) -> bool:
    """Whether any rank of this world still runs on this machine."""
    found = (read(path) for path in flight_files(folder))
    return any(one is not None and processes.state_of(one.pid, one.start_ticks)[0] != "ended" for one in found)


def folder_of_process(pid: int) -> Path | None:
    """The folder of the world that a process belongs to, as a rank or as the parent of ranks."""
    for candidate in (pid, *processes.descendants(pid)):
        path = processes.flight_file_of(candidate)
        if path is not None and path.exists():
            return path.parent
    for world in _kept():
        for one in map(read, flight_files(world)):
            if one is not None and pid in (one.pid, one.parent):
                return world
    return None


def running_worlds() -> list[Path]:
    """The folders of all worlds of this user that run now, the newest first."""
    mapped = {path.parent for pid in processes.of_this_user() if (path := processes.flight_file_of(pid)) is not None}
    worlds = {folder for folder in mapped | set(_kept()) if folder.is_dir() and is_running(folder)}
    return sorted(worlds, key=_began, reverse=True)


def _began(folder: Path) -> float:
    return max((one.began for one in map(read, flight_files(folder)) if one is not None), default=0.0)


def _kept() -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from sorted(private_folder().iterdir(), reverse=True)


def read_world(folder: Path) -> dict[Path, Snapshot]:
    """What all ranks of the newest world in a folder have written."""
    found = {path: one for path in flight_files(folder) if (one := read(path)) is not None}
    newest = max(found.values(), key=lambda one: one.began, default=None)
    return {path: one for path, one in found.items() if newest is not None and one.world == newest.world}


# ── all ranks of a world ────────────────────────────────────────────────────────────────────────────────────────────

_TIMEOUT = 2.0  # seconds for all ranks together


def gather(folder: Path, *, expect_end: Collection[int] = (), asking: int | None = None) -> list[Snapshot]:
    """One snapshot of each rank, in rank order: its file, its process, and its stack if it is in no call.

    Args:
        folder: where their flight files are.
        expect_end: ranks whose connections are closed: the system may take a moment to show that they have ended.
        asking: the rank that calls this, whose stack is not asked for.
    """
    deadline = time.monotonic() + _TIMEOUT
    found = look(folder)
    while any(_seems_well(one) for one in found.values() if one.rank in expect_end) and _left(deadline) > 1.0:
        time.sleep(0.01)
        found = look(folder)
    for path, one in found.items():
        if _seems_well(one) and one.dumps_stack and one.current is None and one.rank != asking:
            found[path] = replace(one, stack=ask_for_stack(path, one.pid, min(0.5, _left(deadline))))
    return _with_absent(list(found.values()))


def look(folder: Path) -> dict[Path, Snapshot]:
    """What the ranks have written, with the states of their processes."""
    host = socket.gethostname()
    return {
        path: one.with_state(*(state_of(one.pid, one.start_ticks) if one.host == host else ("unknown", "")))
        for path, one in read_world(folder).items()
    }


def _seems_well(one: Snapshot) -> bool:
    return one.state == "running" and one.ending == "running"


def _with_absent(found: list[Snapshot]) -> list[Snapshot]:
    if not found:
        return []
    there = {one.rank for one in found}
    size, now = found[0].world_size, found[0].now
    hosts = found[0].hosts
    absent = [
        Snapshot(rank, size, state="unknown", now=now, host=host_of(rank, hosts))
        for rank in range(size)
        if rank not in there
    ]
    return sorted([*found, *absent], key=lambda one: one.rank)


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
