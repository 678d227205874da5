"""Open files that another user may have put there, or replaced by a link, without harm."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import IO

_PLAIN = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW  # a pipe that no process writes to would be waited for


def open_own(path: Path) -> IO[bytes]:
    """Open a file to read it, if it is an ordinary one, and this user's own; a link is not followed.

    Raises:
        OSError: it is something else.
    """
    return _own(path, os.open(path, os.O_RDONLY | _PLAIN), "rb")


def append_to_own(path: Path) -> IO[bytes]:
    """Open a file to write at its end, and make it if need be; on the same conditions."""
    return _own(path, os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _PLAIN, 0o600), "ab")


def _own(path: Path, descriptor: int, mode: str) -> IO[bytes]:
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
        os.close(descriptor)
        raise PermissionError(f"{path} is not an ordinary file of this user's own")
    return os.fdopen(descriptor, mode, buffering=0)
