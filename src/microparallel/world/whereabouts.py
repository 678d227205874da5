"""Where does a rank stand that does not answer? Ask it with a signal, and read the stack it dumps."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from pathlib import Path
from typing import IO

from microparallel.flight.place import best_of, read_stack

SIGNAL = signal.SIGUSR2
_COMMS = str(Path(__file__).parent.parent / "comms" / "comms.py")


def answer_in(file: IO[bytes] | int) -> None:
    """From now on, dump this process's stack into the file whenever the signal comes, even from inside C code."""
    faulthandler.register(SIGNAL, file=file, all_threads=False)


def ask(pid: int, file: IO[bytes], patience: float = 1.0) -> str:
    """Ask a process where it stands, and put the answer in one line."""
    start = os.fstat(file.fileno()).st_size
    os.kill(pid, SIGNAL)
    deadline = time.monotonic() + patience
    dump = b""
    while time.monotonic() < deadline:
        dump = os.pread(file.fileno(), 1 << 20, start)
        if dump.endswith(b"\n") and dump.count(b"\n") > 1:
            break
        time.sleep(0.01)
    return summarise(dump.decode(errors="replace"))


def summarise(dump: str) -> str:
    """The caller's innermost line in a dumped stack, and the call of ours it is waiting in."""
    frames = read_stack(dump)
    place = best_of(frames)
    if place is None:
        return "gave no answer (stopped, or not yet started)"
    at = f"{place.function} at {place.file}:{place.line}"
    calls = [frame.function for frame in frames if frame.file == _COMMS]
    return f"in {calls[-1]}, called by {at}" if calls else f"in {at}"
