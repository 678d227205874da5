"""Where does a rank stand that does not answer? Ask it with a signal, and read the stack it dumps."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from pathlib import Path
from typing import IO

SIGNAL = signal.SIGUSR2
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
_PACKAGE = Path(__file__).parent.parent
_COMMS = str(_PACKAGE / "comms" / "comms.py")
_LIBRARIES = (str(_PACKAGE), "site-packages", "dist-packages", "/lib/python")


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
    frames = [match.groupdict() for match in _FRAME.finditer(dump)]
    if not frames:
        return "gave no answer (stopped, or not yet started)"
    place = next((frame for frame in frames if not _is_library(frame)), frames[0])
    at = f"{place['function']} at {place['file']}:{place['line']}"
    calls = [frame["function"] for frame in frames if frame["file"] == _COMMS]
    return f"in {calls[-1]}, called by {at}" if calls else f"in {at}"


def _is_library(frame: dict[str, str]) -> bool:
    """Whether a frame is somebody else's code: ours, an installed package's, or Python's own."""
    file = frame["file"]
    started_by_us = (file, frame["function"]) == ("<string>", "<module>")
    return started_by_us or file.startswith("<frozen") or any(part in file for part in _LIBRARIES)
