"""Watch a learner's training on one rank, write down what it does, and kill the process at a chosen moment.

```
draw 5 ─ forward ─ backward ─ report 5 ─ … ─ report 8 ─ write aside │ fsync │ rename ─ draw 9
       ✗         ✗                     ✗              ✗      ✗           ✗           ✗
```

The learner's code is not changed. The process is killed in what the grader gives it (`data`, `report`), in a hook of
the inputs' gradient, before an operation on files (Python tells audit hooks of these), or by the system, when a file
grows beyond a limit. What it has done is in a file, which outlives it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from microparallel.learn.requirements import require_number
from microparallel.learn.sandbox import trusted
from microparallel.learn.verdict import Wrong

SAMPLES, INPUTS = 24, 6
_FILE_EVENTS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate")
_FOR_THE_OTHERS = 0.2  # seconds in which the other ranks may go on before this one is killed


@dataclass(frozen=True)
class Kill:
    """When a rank is killed, or (`rank` is None) every rank; `number` counts from the beginning of the attempt.

    `draw`, `backward`, `report`: in this step. `operation`: before this operation on files of a save, or if `opened`,
    just after it has opened its file. `bytes`: when a file grows beyond so many.
    """

    rank: int | None
    when: Literal["draw", "backward", "report", "operation", "bytes"]
    number: int
    opened: bool = False


@dataclass(frozen=True)
class Plan:
    """One attempt: what the learner's `train` is told, where the log is, and when who is killed."""

    folder: str
    log: str
    steps: int
    save_every: int
    kill: Kill | None = None


def table() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of all samples."""
    inputs = torch.randn(SAMPLES, INPUTS, generator=torch.Generator().manual_seed(11), dtype=torch.float64)
    return inputs, torch.tanh(inputs[:, :2].sum(1, keepdim=True)) + 0.5 * inputs[:, 2:3]


class Watch:
    """What one rank does, as the grader sees it.

    Attributes:
        asked_for: how many samples the learner's code asked for last.
    """

    def __init__(self, comms: Any, plan: Plan) -> None:
        """Watch this rank; from now on its process may be killed."""
        rank, self._plan = comms.rank, plan
        self._kill = plan.kill if plan.kill is not None and plan.kill.rank in (rank, None) else None
        self._log = os.open(f"{plan.log}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._others = [Path(f"{plan.log}-{other}") for other in range(comms.world_size) if other != rank]
        self._inputs, self._targets = table()
        self.asked_for = 0
        self._draws = self._reports = self._operations = 0
        self._busy = False  # whether it is the grader itself that opens a file
        for name in ("fsync", "fdatasync"):
            setattr(os, name, self._watched(getattr(os, name)))
        os.sync = self._watched_sync(os.sync)
        sys.addaudithook(self._on_event)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))

    def ends(self) -> None:
        """The learner's function has returned."""
        self._write(end=True)

    def _write(self, **what: object) -> None:
        """Add a line to the log, whatever the limit on files is."""
        with _no_limit():
            os.write(self._log, json.dumps(what).encode() + b"\n")

    # ── what the learner calls ──────────────────────────────────────────────────────────────────────────────────

    def data(self, numbers: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of these samples."""
        with trusted():
            chosen = _whole_numbers(numbers)
            self.asked_for = len(chosen)
            self._draws += 1
            if self._kill is not None:
                if self._kill.when == "draw" and self._draws == self._kill.number:
                    self._write(draw=chosen)
                    self._die(draws=self._draws)
                if self._kill.when == "bytes":
                    _limit_files(self._kill.number)
                if self._kill.when in ("operation", "bytes") and self._draws == self._plan.save_every + 2:
                    self._die(draws=0)  # it has saved without an occasion
            self._write(draw=chosen)
            inputs, targets = self._inputs[chosen], self._targets[chosen]
            if self._kill is not None and self._kill.when == "backward" and self._draws == self._kill.number:
                inputs.requires_grad_().register_hook(lambda _: self._die(draws=0))  # type: ignore[no-untyped-call]
            return inputs, targets

    def report(self, step: int, loss: float) -> None:
        """So many steps are done."""
        with trusted():
            self._reports += 1
            number = require_number(step, "the first argument of report")
            if number != int(number):
                raise Wrong(f"report was told that {number:g} steps are done: give a whole number")
            value = require_number(loss, "the second argument of report")
            self._write(step=int(number), loss=value.hex())
            if self._kill is not None and self._kill.when == "report" and self._reports == self._kill.number:
                self._die(draws=0)

    # ── files ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if (event not in _FILE_EVENTS and event != "open") or self._busy or not self._draws:
            return
        if not isinstance(arguments[0], str | bytes | os.PathLike):
            return  # a file that is open already
        path = Path(os.fsdecode(arguments[0]))
        opened = event == "open"
        if opened and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        if path.is_absolute() and not path.is_relative_to(self._plan.folder):
            return
        self._busy = True
        try:
            self._before_operation(path, event, arguments[2] if opened else None)
        finally:
            self._busy = False

    def _before_operation(self, path: Path, event: str, flags: int | None) -> None:
        self._write(operation=event, name=path.name, draws=self._draws)
        if self._draws % self._plan.save_every:
            return
        kill = self._kill
        if kill is not None and kill.when == "operation" and kill.number == self._operations:
            if kill.opened and flags is not None:
                with trusted():
                    os.open(path, flags & ~os.O_EXCL, 0o600)  # as it is when the process dies just after this
            self._die(draws=self._draws + 1)
        self._operations += 1

    def _watched(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        def sync(file: Any) -> None:
            original(file)
            found = os.fstat(file if isinstance(file, int) else file.fileno())
            self._write(synced=[found.st_dev, found.st_ino, found.st_size])

        return sync

    def _watched_sync(self, original: Callable[[], None]) -> Callable[[], None]:
        def sync() -> None:
            original()
            for found in map(os.stat, filter(Path.is_file, Path(self._plan.folder).rglob("*"))):
                self._write(synced=[found.st_dev, found.st_ino, found.st_size])

        return sync

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _die(self, draws: int) -> None:
        """Kill this process, but first let the other ranks go on until they have drawn so often, if they can."""
        with trusted():
            deadline = time.monotonic() + _FOR_THE_OTHERS
            while self._draws_of_others() < draws and time.monotonic() < deadline:
                time.sleep(0.002)
            os.kill(os.getpid(), signal.SIGKILL)

    def _draws_of_others(self) -> int:
        busy, self._busy = self._busy, True
        try:
            return min(other.read_bytes().count(b'"draw":') if other.exists() else 0 for other in self._others)
        finally:
            self._busy = busy


def _whole_numbers(numbers: object) -> list[int]:
    try:
        chosen = [int(number) for number in numbers]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise Wrong(f"data takes a list with the numbers of samples, and was given {numbers!r:.80}") from None
    for number in chosen:
        if not 0 <= number < SAMPLES:
            raise Wrong(f"data was asked for sample {number}; there are {SAMPLES}, and the first is 0")
    return chosen


def _limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@contextlib.contextmanager
def _no_limit() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ── in the grader: what an attempt has left ─────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Row:
    """One step of a rank: its number as reported, the samples that were drawn for it, and the loss."""

    step: int
    samples: tuple[int, ...]
    loss: float


@dataclass
class Log:
    """What one rank has done in an attempt."""

    rows: list[Row] = field(default_factory=list)
    went_on: set[int] = field(default_factory=set)  # steps after which it has begun another, or has returned
    operations: list[tuple[str, str, int]] = field(default_factory=list)  # on files: what, which, after how many draws
    synced: set[tuple[int, ...]] = field(default_factory=set)  # device, number and size of each file
    ended: bool = False

    @property
    def begins(self) -> int | None:
        """How many steps were done when it began."""
        return self.rows[0].step - 1 if self.rows else None


def read_log(path: str, rank: int) -> Log:
    """What a rank has written down."""
    log, drawn = Log(), []
    file = Path(f"{path}-{rank}")
    for line in map(json.loads, file.read_text().splitlines() if file.exists() else []):
        if "draw" in line:
            drawn += line["draw"]
            log.went_on.update(row.step for row in log.rows[-1:])
        elif "step" in line:
            log.rows.append(Row(line["step"], tuple(drawn), float.fromhex(line["loss"])))
            drawn = []
        elif "operation" in line:
            log.operations.append((line["operation"], line["name"], line["draws"]))
        elif "synced" in line:
            log.synced.add(tuple(line["synced"]))
        else:
            log.ended = True
            log.went_on.update(row.step for row in log.rows[-1:])
    return log


def cut_power(folder: Path, synced: set[tuple[int, ...]]) -> dict[str, bool]:
    """Empty all files whose bytes were not brought to the disk; for each, whether a part of them was."""
    lost = {}
    in_part = {(device, number) for device, number, _ in synced}
    for file in sorted(folder.rglob("*")):
        found = file.stat()
        if file.is_file() and found.st_size and (found.st_dev, found.st_ino, found.st_size) not in synced:
            os.truncate(file, 0)
            lost[file.name] = (found.st_dev, found.st_ino) in in_part
    return lost
