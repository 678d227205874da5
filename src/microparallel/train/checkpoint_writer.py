"""The process that brings states from memory to the disk, while the ranks compute. Needs no torch.

```
rank 0      copy │ steps ……………………………………………… │ copy │ steps …
                 ▼ {"save": slot}       ▲ {"error": null}
writer           read, hash, write, fsync, rename, remove old ones
```

It reads one request a line, and answers each with a line. Every other process goes before it, and it ends when rank 0
does. A state whose record is in memory is on its way: if this process is killed, the next save starts another. While it
copies it says so every second; if it is silent for too long, since the disk hangs or it was stopped, it is ended, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from microparallel.errors import CheckpointError
from microparallel.files.checksum import Checksum
from microparallel.files.state_memory import Slot
from microparallel.text import show_seconds
from microparallel.train.checkpoint_folder import (
    clear_leftovers,
    complete,
    failing_in_one_line,
    hidden,
    make_folder,
    mark_best,
    remove_all_but,
)

_BLOCK = 2**20  # bytes that are copied at a time
_SECONDS_BETWEEN_SIGNS = 1.0  # of life
_SAY_SILENT_AFTER = 10.0  # seconds
_SECONDS_TO_END = 5.0
_SECONDS_TO_DIE = 5.0  # once it was killed
_END_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_MEANT_FOR_RANKS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the rank says when there is nothing more to write


def write_from_memory(
    slot: Slot, folder: Path, keep: int, keep_every: int | None = None, tell: Callable[[], None] = lambda: None
) -> Path:
    """Write the checkpoint whose files are in memory into `folder`, then remove old ones, as `checkpoint.save` does.

    `tell` is called after each block.
    """
    text = Path(slot.record).read_bytes()
    record = json.loads(text)
    step = record["step"]
    names = sorted({name for about in record["tensors"].values() for name, *_ in about["parts"]})
    path = folder / f"step-{step:08d}"
    try:
        make_folder(path)
        with failing_in_one_line(path):
            files = {name: _copy(slot.file(name), hidden(path, "writing") / name, tell) for name in names}
        complete(path, text, files)
    except CheckpointError:
        with contextlib.suppress(OSError):
            clear_leftovers(folder)
        raise
    remove_all_but(keep, folder, step, keep_every)
    return path


def _copy(source: Path, target: Path, tell: Callable[[], None]) -> Checksum:
    """Copy a file, and return when its bytes are on the disk."""
    size, hashed = 0, hashlib.sha256()
    with source.open("rb", buffering=0) as memory, target.open("wb", buffering=0) as file:
        while block := memory.read(_BLOCK):
            hashed.update(block)
            size += len(block)
            rest = memoryview(block)
            while rest:
                rest = rest[file.write(rest) :]
            tell()
        os.fsync(file.fileno())
    return Checksum(size, hashed.hexdigest())


# ── in rank 0 ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Writer:
    """Rank 0's side: hands states over, one at a time, and hears what became of them.

    Args:
        tell: told, in words, that it is silent.

    Attributes:
        patience: seconds for which the process may be silent while it has something to do; then it is ended.
        processor_seconds: that the last save took of a core.
        processor_total: that all saves have taken.
    """

    def __init__(self, patience: float = 900.0, tell: Callable[[str], None] = lambda _: None) -> None:
        self.patience = patience
        self._tell = tell
        self._heard_at = 0.0  # when it last gave a sign of life, or was asked while it had nothing to do
        self._said = False  # that it is silent
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting_for: list[Callable[[dict[str, Any]], None]] = []  # of each request that is not answered yet
        self.processor_seconds = self.processor_total = 0.0
        self._slot: int | None = None
        self._failure: str | None = None

    @property
    def pid(self) -> int | None:
        """The number of the process."""
        return None if self._process is None else self._process.pid

    @property
    def reading(self) -> int | None:
        """The number of the slot that it reads just now, which nobody may overwrite."""
        self._hear()
        return self._slot

    def save(self, number: int, slot: Slot, folder: Path, keep: int, keep_every: int | None) -> None:
        """Let it write a slot; the one before must have been waited for."""
        request = {"save": asdict(slot), "folder": str(folder.absolute()), "keep": keep, "keep_every": keep_every}
        self._slot, self._failure = number, None
        self._ask(request, self._saved)

    def keep_best(
        self, path: Path, loss: float, keep: int, keep_every: int | None, if_not: Callable[[], None] = lambda: None
    ) -> None:
        """After what it writes now, let it mark a checkpoint as the best; if it cannot, `if_not` is called later."""
        request = {"best": str(path.absolute()), "loss": loss, "keep": keep, "keep_every": keep_every}
        self._ask(request, lambda answer: None if answer["error"] is None else if_not())

    def finished(self) -> bool:
        """Whether there is nothing that it has to do."""
        self._hear()
        return not self._waiting_for

    def take_failure(self) -> str | None:
        """Why the last save failed, if it did; said once."""
        self._hear()
        failure, self._failure = self._failure, None
        return failure

    def wait(self) -> None:
        """Wait until all is written, or the process was ended because it was silent."""
        while self._waiting_for:
            self._hear(min(1.0, self.patience))

    def close(self) -> None:
        """Wait until all is written, and end the process."""
        self.wait()
        if self._process is not None:
            self._end()

    def end_at_once(self) -> None:
        """End the process, whatever it has to do."""
        if self._process is not None:
            self._process.kill()
            self._gone("it was ended")

    def _saved(self, answer: dict[str, Any]) -> None:
        self._slot, self._failure = None, answer["error"]
        self.processor_seconds = answer.get("processor_seconds", 0.0)
        self.processor_total += self.processor_seconds

    def _ask(self, request: dict[str, Any], then: Callable[[dict[str, Any]], None]) -> None:
        if not self._waiting_for:
            self._heard_at, self._said = time.monotonic(), False
        self._waiting_for.append(then)
        try:
            if self._process is None:
                self._process = _start()
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        except OSError as error:  # it cannot be started, or has ended
            self._gone(f"{error.strerror or error}")

    def _hear(self, seconds: float = 0.0) -> None:
        """Take in what it has said; wait so long for the first line. A process that is silent for too long is ended."""
        while self._waiting_for and self._process is not None:
            assert self._process.stdout is not None
            with selectors.DefaultSelector() as selector:
                selector.register(self._process.stdout, selectors.EVENT_READ)
                if not selector.select(seconds):
                    break
            line = self._process.stdout.readline()
            if not line:
                self._gone(f"exit status {self._end()}")
                return
            seconds, self._heard_at, self._said = 0.0, time.monotonic(), False
            answer = json.loads(line)
            if "error" in answer:  # otherwise it was a sign of life
                self._waiting_for.pop(0)(answer)
        if self._waiting_for:
            self._look_how_long_it_is_silent()

    def _look_how_long_it_is_silent(self) -> None:
        silent = time.monotonic() - self._heard_at
        if silent >= self.patience:
            if self._process is not None:
                self._process.kill()
            self._gone(f"after {show_seconds(silent)} of silence: was it stopped, or does the disk hang?")
        elif silent >= _SAY_SILENT_AFTER and not self._said:
            self._said = True
            self._tell(
                f"process {self.pid}, which writes checkpoints, is silent since {show_seconds(silent)}; "
                f"after {show_seconds(self.patience)} it is ended, and the next save starts another"
            )

    def _gone(self, how: str) -> None:
        """Nothing of what it had to do will be done; the next save starts another process."""
        if self._process is not None:
            self._end()
        answer = {"error": f"the process that writes checkpoints has ended ({how})"}
        while self._waiting_for:
            self._waiting_for.pop(0)(answer)

    def _end(self) -> int | None:
        """Let the process come to its end, and return its exit status; None if nothing can end it just now."""
        process, self._process = self._process, None
        assert process is not None and process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.write(b"\n")  # a process that a rank has forked may still hold this end of the pipe
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_SECONDS_TO_END)
        process.kill()  # it was stopped, say
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_SECONDS_TO_DIE)
        return None  # the system does not let it go before the disk answers


def _start() -> subprocess.Popen[bytes]:
    path = os.pathsep.join(str(Path(folder).absolute()) for folder in sys.path)
    # A signal that is blocked here stays blocked in the new process, which so never dies of a Ctrl-C.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _MEANT_FOR_RANKS)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "microparallel.train.checkpoint_writer", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=os.environ | {"PYTHONPATH": path},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ── in the process ────────────────────────────────────────────────────────────────────────────────────────────────────


def main(parent: int) -> None:
    """Do what each line asks for, until there is an empty one, no more, or no parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)
    os.nice(19)
    if hasattr(os, "SCHED_IDLE"):  # whoever else wakes up goes first, at once
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while os.getppid() == parent and (line := sys.stdin.buffer.readline()).strip():
        begun, error = time.process_time(), None
        try:
            _do(json.loads(line))
        except CheckpointError as refusal:
            error = str(refusal)
        except Exception as unexpected:  # whoever waits must hear of it
            error = f"cannot write the checkpoint: {unexpected!r}"
        answer = {"error": error, "processor_seconds": time.process_time() - begun}
        print(json.dumps(answer), flush=True)


class _Signs:
    """Of life, one a second at the most."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._last > _SECONDS_BETWEEN_SIGNS:
            self._last = time.monotonic()
            print("{}", flush=True)


def _do(request: dict[str, Any]) -> None:
    keep, keep_every = request["keep"], request["keep_every"]
    if "save" in request:
        slot = Slot(tuple(request["save"]["parts"]), request["save"]["record"])
        write_from_memory(slot, Path(request["folder"]), keep, keep_every, _Signs())
    else:
        path = Path(request["best"])
        if not path.is_dir():
            raise CheckpointError(f"{path}, which is the best, could not be saved")
        mark_best(path, request["loss"])
        remove_all_but(keep, path.parent, int(path.name.removeprefix("step-")), keep_every)


if __name__ == "__main__":
    main(int(sys.argv[1]))
