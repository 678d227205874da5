"""The newest states of a run in memory that outlives its ranks. Needs no torch.

```
launcher, or rank 0      holds two slots, each with a file in memory for every rank, and one for the record
                         slot 0   part 0 │ part 1 │ record of step 40
                         slot 1   part 0 │ part 1 │ (empty: the ranks are copying step 50)
ranks                    copy their parts into a slot; rank 0 writes the record when all parts are there
the writer               a process that brings a slot to the disk (checkpoint_writer.py)
ranks started again      read the slot whose record is newest
the launcher             if ranks are not started again: calls what they have left a word about (`if_all_fails`)
```

A slot has the files of a checkpoint under other names, and a record is its `state.json`: whatever reads a checkpoint on
a disk reads this, too. The files have no names of their own in any folder: they are gone when the process that holds
them has ended, however it ended.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_SLOTS = 2  # while one is overwritten, the other is whole; one that nobody uses takes no memory


@dataclass(frozen=True)
class Slot:
    """Where one state is in memory: the paths are those by which other processes reach the holder's files."""

    parts: tuple[str, ...]
    record: str

    def file(self, name: str) -> Path:
        """The file that a checkpoint calls part-00001.safetensors."""
        match = re.fullmatch(r"part-(\d+)\.safetensors", name)
        if match is None or int(match[1]) >= len(self.parts):
            raise ValueError(f"there is no {name} in memory")
        return Path(self.parts[int(match[1])])

    def read_record(self) -> dict[str, Any] | None:
        """What the state is; None if it is not whole."""
        try:
            record: dict[str, Any] = json.loads(Path(self.record).read_bytes())
        except (OSError, ValueError):  # empty, or cut off: what lacks its last bracket is not JSON
            return None
        return record

    @property
    def step(self) -> int | None:
        """After which step it was taken; None if it is not whole."""
        record = self.read_record()
        return None if record is None else int(record["step"])

    @property
    def is_finite(self) -> bool:
        """Whether it is whole, and nobody has found weights in it that are not finite."""
        record = self.read_record()
        return record is not None and record["finite"] is not False

    @property
    def bytes(self) -> int:
        """The memory that it takes."""
        return sum(Path(path).stat().st_size for path in (*self.parts, self.record))

    def clear(self) -> None:
        """From now on it is not whole."""
        os.truncate(self.record, 0)

    def free(self) -> None:
        """Give its memory back."""
        for path in (self.record, *self.parts):
            os.truncate(path, 0)


@dataclass(frozen=True)
class HeldStates:
    """What a launcher hands to its ranks: memory that outlives them.

    Attributes:
        slots: for their states.
        word: a file for what the launcher shall call if the ranks fail for good.
    """

    slots: tuple[Slot, ...]
    word: str

    def if_all_fails(self, function: str, **arguments: Any) -> None:
        """Let the launcher call `module:function(slots, **arguments)` then; the arguments are such as JSON holds."""
        Path(self.word).write_text(json.dumps([function, arguments]))

    @property
    def arguments(self) -> dict[str, Any] | None:
        """Those of the call that was asked for last; None if none was."""
        text = Path(self.word).read_bytes()
        return json.loads(text)[1] if text else None


class StateMemory:
    """Memory for the states of so many ranks, held by this process; it is empty until they copy something into it.

    Attributes:
        slots: for the states.
        held: to be handed to the ranks.
    """

    def __init__(self, ranks: int) -> None:
        self._files: list[int] = []
        try:
            self.slots = [Slot(tuple(self._new() for _ in range(ranks)), self._new()) for _ in range(_SLOTS)]
            self.held = HeldStates(tuple(self.slots), self._new())
        except OSError:
            self.close()
            raise

    @staticmethod
    def files(ranks: int) -> int:
        """How many files this process opens for it."""
        return _SLOTS * (ranks + 1) + 1

    def all_has_failed(self) -> None:
        """Call what the ranks have left a word about, if they have."""
        text = Path(self.held.word).read_bytes()
        if text:
            name, arguments = json.loads(text)
            module, _, function = name.partition(":")
            getattr(importlib.import_module(module), function)(self.slots, **arguments)

    def _new(self) -> str:
        self._files.append(os.memfd_create("microparallel state"))
        return f"/proc/{os.getpid()}/fd/{self._files[-1]}"

    def close(self) -> None:
        """Give the memory back."""
        while self._files:
            os.close(self._files.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def can_hold() -> bool:
    """Whether this system has files in memory that other processes can open."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def newest(slots: Sequence[Slot]) -> int | None:
    """The number of the slot with the newest state; None if none is whole."""
    steps = {number: step for number, slot in enumerate(slots) if (step := slot.step) is not None}
    return max(steps, key=steps.__getitem__, default=None)
