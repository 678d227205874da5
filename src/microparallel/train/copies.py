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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from microparallel.comms import Comms
from microparallel.comms.wire import gather_json
from microparallel.errors import CheckpointError
from microparallel.train.checkpoint_writer import Writer
from microparallel.train.state_memory import Slot, StateMemory, can_hold, newest
from microparallel.train.training import Training


class Copies:
    """One rank's part in copying a run's state into memory; every rank calls `copy` after the same steps.

    Args:
        training: what is copied.
        slots: where to.
        held: the memory, if this process holds it; otherwise it outlives this rank.
        writer: of the checkpoints; rank 0 alone asks it for something.
    """

    def __init__(
        self, training: Training, slots: Sequence[Slot], held: StateMemory | None = None, writer: Writer | None = None
    ) -> None:
        self._training = training
        self._slots = slots
        self._held = held
        self._first = training.comms.rank == 0
        self._newest = newest(slots) if self._first else None
        self.writer = writer or Writer()

    @classmethod
    def in_own_memory(cls, training: Training, writer: Writer | None = None) -> Copies | None:
        """Copy into memory that rank 0 holds; None where not all ranks can see it, on several machines say."""
        comms = training.comms
        held = StateMemory(comms.world_size, slots=1) if comms.rank == 0 and can_hold() else None
        told = gather_json(None if held is None else [asdict(slot) for slot in held.slots], comms)[0]
        if told is None:
            return None
        slots = [Slot(tuple(slot["parts"]), slot["record"]) for slot in told]
        if not _all_see(Path(slots[0].record), comms):
            if held is not None:
                held.close()
            return None
        return cls(training, slots, held, writer)

    @property
    def outlives_ranks(self) -> bool:
        """Whether ranks that are started again find the copies; asked on rank 0."""
        return self._held is None

    def copy(self, *, finite: bool = True) -> None:
        """Copy the state, unless the writer reads the only slot; without room, a CheckpointError on every rank."""
        number = self._training.copy(self._slots, self._choose, finite)
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
            for slot in self._slots:
                slot.clear()

    def close(self, *, at_once: bool = False) -> None:
        """Let the writer come to its end, or end it, and give back memory that is this process's."""
        if at_once:
            self.writer.end_at_once()
        self.writer.close()
        if self._held is not None:
            self._held.close()

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
