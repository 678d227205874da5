"""The last thing that is done for ranks that have failed for good: what they left in memory is brought to the disk.

The launcher calls this, which holds that memory, because the ranks have left a word about it (`Copies.if_all_fails`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from microparallel.errors import CheckpointError
from microparallel.files.state_memory import Slot, newest
from microparallel.train.checkpoint_folder import checkpoints
from microparallel.train.checkpoint_reader import open_memory
from microparallel.train.checkpoint_writer import write_from_memory
from microparallel.train.guard import not_finite


def save_what_is_in_memory(
    slots: Sequence[Slot], *, folder: str, keep: int, keep_every: int | None, go_on: str
) -> None:
    """Save the newest state, if it is good and newer than what is on the disk, and say on stderr how to go on."""
    number = newest(slots)
    step = None if number is None else slots[number].step
    if number is None or step is None or step <= max(checkpoints(Path(folder)), default=0):
        return  # before the first step there is nothing to save
    try:
        found = open_memory(slots[number])
        if not_finite((name, stored.whole()) for name, stored in found.stored_model.items()):
            return
        write_from_memory(slots[number], Path(folder), keep, keep_every)
    except CheckpointError as error:
        print(f"step {step} is in memory, and could not be saved: {error}", file=sys.stderr)
        return
    print(f"step {step}, which was in memory, is saved; go on with: {go_on}", file=sys.stderr)
