"""The last thing that is done for ranks that have failed for good: what they left in memory is brought to the disk.

The launcher calls this, which holds that memory, because the ranks have left a word about it (`Copies.if_all_fails`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from microparallel.errors import CheckpointError, ConfigError
from microparallel.files.lock import FolderLock
from microparallel.files.state_memory import Slot, newest
from microparallel.train.checkpoint_folder import checkpoints
from microparallel.train.checkpoint_reader import open_memory
from microparallel.train.checkpoint_writer import write_from_memory
from microparallel.train.config import TrainConfig
from microparallel.train.guard import not_finite
from microparallel.train.run_folder import RunFolder


def save_what_is_in_memory(
    slots: Sequence[Slot],
    *,
    folder: str,
    keep: int,
    keep_every: int | None,
    go_on: str | None,
    run: dict[str, Any] | None,
) -> None:
    """Save the newest state, if it is good and newer than what is on the disk, and say so on stderr.

    `go_on` says how to go on, where nobody else does. `run` are the settings of a run of `train`: its folder is made
    again if somebody has removed it.
    """
    number = newest(slots)
    step = None if number is None else slots[number].step
    if number is None or step is None or step <= max(checkpoints(Path(folder)), default=0):
        return  # before the first step there is nothing to save
    try:
        found = open_memory(slots[number])
        if not_finite((name, stored.whole()) for name, stored in found.stored_model.items()):
            return
        with _locked(Path(folder), run):
            write_from_memory(slots[number], Path(folder), keep, keep_every)
    except (CheckpointError, ConfigError) as error:
        print(f"step {step} is in memory, and could not be saved: {error}", file=sys.stderr)
        return
    how = "" if go_on is None else f"; go on with: {go_on}"
    print(f"step {step}, which was in memory, is saved{how}", file=sys.stderr)


@contextlib.contextmanager
def _locked(folder: Path, run: dict[str, Any] | None) -> Iterator[None]:
    """Lock the folder of checkpoints, or of the run: another process may be going on with it."""
    if run is not None:
        with RunFolder.take_up(folder.parent, TrainConfig(**run)):
            yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(folder / "lock", str(folder))
    try:
        yield
    finally:
        lock.release()
