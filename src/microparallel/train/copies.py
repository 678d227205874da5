"""Copies of a run's state in memory: quickly taken, then written to the disk by a process of its own.

```
step 40   copy ─▶ slot 0 ─▶ writer ─▶ disk          a save: the steps wait for the copy alone
step 41   copy ─▶ slot 1                            a copy: what a run that is started again goes on from
step 42   copy ─▶ slot 1                            slot 0 is still being read by the writer
step 43   copy ─▶ slot 0                            slot 1 has the newest
```

Where ranks are not started again there is one slot, and no copy while the writer reads it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from microparallel.comms import Comms
from microparallel.comms.wire import gather_json
from microparallel.errors import CheckpointError
from microparallel.files.state_memory import HeldStates, Slot, StateMemory, can_hold, newest
from microparallel.train import checkpoint
from microparallel.train.checkpoint_folder import checkpoints
from microparallel.train.checkpoint_reader import Checkpoint, open_memory
from microparallel.train.checkpoint_writer import Writer

RESCUE = "microparallel.train.rescue:save_what_is_in_memory"


class Copies:
    """One rank's part in copying a state into memory; every rank calls `copy` after the same steps.

    Args:
        comms: the ranks.
        contents: returns what is copied: what `checkpoint.save` is given.
        slots: where to.
        memory: of these slots, if this process holds it.
        held: of these slots, if that is memory which outlives the ranks.
        writer: of the checkpoints; rank 0 alone asks it for something.
    """

    def __init__(
        self,
        comms: Comms,
        contents: Callable[[], dict[str, Any]],
        slots: Sequence[Slot],
        memory: StateMemory | None = None,
        held: HeldStates | None = None,
        writer: Writer | None = None,
    ) -> None:
        self._comms = comms
        self._contents = contents
        self._slots = slots
        self._memory = memory
        self._held = held
        self._first = comms.rank == 0
        self._newest = newest(slots) if self._first else None
        self.writer = writer or Writer()

    @classmethod
    def into_memory(
        cls, comms: Comms, contents: Callable[[], dict[str, Any]], writer: Writer | None = None, slots: int = 2
    ) -> Copies | None:
        """Copy into memory of the launcher, or of rank 0; None where not all ranks can see it, on several machines say.

        Every rank calls it. With one slot a copy takes half the memory, and while one is made there is no other.
        """
        if (held := comms.take_held_states()) is not None:
            return cls(comms, contents, held.slots[:slots], held=held, writer=writer)
        memory = StateMemory(comms.world_size) if comms.rank == 0 and can_hold() else None
        told = gather_json(None if memory is None else [asdict(slot) for slot in memory.slots[:slots]], comms)[0]
        if told is None:
            return None
        own = [Slot(tuple(slot["parts"]), slot["record"]) for slot in told]
        if not _all_see(Path(own[0].record), comms):
            if memory is not None:
                memory.close()
            return None
        return cls(comms, contents, own, memory, writer=writer)

    def if_all_fails(
        self, folder: Path, keep: int, keep_every: int | None, go_on: str | None, run: dict[str, Any] | None = None
    ) -> None:
        """Let the launcher save the newest copy when there is no restart left, and say how to `go_on`.

        `run` are the settings of a run of `train`, which says that itself. Copies that are there already, and belong to
        another folder, are forgotten.
        """
        if self._first and self._held is not None:
            arguments = {"folder": str(folder.absolute()), "keep": keep, "keep_every": keep_every, "go_on": go_on}
            before = self._held.arguments
            if before is not None and before["folder"] != arguments["folder"]:
                self.forget()
            self._held.if_all_fails(RESCUE, **arguments, run=run)

    def newest_state(self, folder: Path) -> Checkpoint | None:
        """The newest state in memory, if it is good and the folder has none that is newer; every rank calls it.

        Older copies are forgotten.
        """
        number = None
        if self._first:
            on_disk = max(checkpoints(folder), default=-1)
            steps = {one: slot.step for one, slot in enumerate(self._slots) if slot.is_finite}
            number = max(steps, key=lambda one: steps[one] or 0, default=None)
            if number is not None and (steps[number] or 0) < on_disk:
                number = None
            for other, slot in enumerate(self._slots):
                if other != number:
                    slot.clear()
            self._newest = number
        told = gather_json(number, self._comms)[0]
        return None if told is None else open_memory(self._slots[told])

    @property
    def outlives_ranks(self) -> bool:
        """Whether ranks that are started again find the copies."""
        return self._held is not None

    def copy(self, **about: Any) -> None:
        """Copy the state, unless the writer reads the only slot; without room, a CheckpointError on every rank.

        `about` is what else `checkpoint.copy` is told.
        """
        number = checkpoint.copy(self._slots, self._choose, **self._contents(), **about)
        self._newest = self._newest if number is None else number

    def _choose(self) -> int | None:
        """The slot that is neither read nor the newest; else the newest, as the other stays whole; else none."""
        numbers = [number for number in range(len(self._slots)) if number != self.writer.reading]
        return next((number for number in numbers if number != self._newest), numbers[0] if numbers else None)

    def write(self, folder: Path, keep: int, keep_every: int | None) -> None:
        """Let the newest copy be written to the disk."""
        if self._first:
            assert self._newest is not None
            self.writer.save(self._newest, self._slots[self._newest], folder, keep, keep_every)

    def settle(self) -> None:
        """Wait until all is on the disk; a CheckpointError says what could not be written."""
        self.writer.wait()
        if (failure := self.writer.take_failure()) is not None:
            raise CheckpointError(failure)

    def forget(self) -> None:
        """Let nobody go on from these copies: what is in them is wrong."""
        if self._first:
            self.writer.wait()
            self._newest = None
            for slot in self._slots:
                slot.clear()

    def close(self, *, at_once: bool = False) -> None:
        """Let the writer come to its end, or end it, and give the memory back."""
        if at_once:
            self.writer.end_at_once()
        self.writer.close()
        if self._held is not None:
            self._comms.held_states = self._held  # for whoever copies next
        if self._memory is not None:
            self._memory.close()

    def give_up(self) -> None:
        """There is too little memory for copies: give back what they took."""
        if self._first:
            self.writer.wait()
            with suppress(OSError):
                for slot in self._slots:
                    slot.free()
        self.close()


def _all_see(file: Path, comms: Comms) -> bool:
    """Whether every rank finds in this file what rank 0 writes into it; then it is emptied again."""
    word = gather_json(os.urandom(16).hex(), comms)[0]
    if comms.rank == 0:
        file.write_text(word)
    gather_json(None, comms)
    try:
        # On another machine, or in another container, this may be anything that a process has open: a pipe, say.
        sees = file.is_file() and file.read_text() == word
    except (OSError, ValueError):
        sees = False
    everybody = all(gather_json(sees, comms))
    if comms.rank == 0:
        os.truncate(file, 0)
    return everybody
