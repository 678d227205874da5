"""A lock on a folder, held by one process, which says who holds it.

The system releases it when that process ends, however it ends: no lock is ever stale. It is a record lock (`lockf`),
which children of the holder do not inherit.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path

from microparallel.errors import ConfigError

_LENGTH = 200  # bytes, of what the file says


class FolderLock:
    """Taken when it is made, held until `release`.

    Args:
        path: the file that is locked, which says who holds it.
        what: what the lock is for, in the error that another process gets.
    """

    def __init__(self, path: Path, what: str) -> None:
        self._path = path
        self._file: int | None = None
        while self._file is None:
            self._file = self._try(what)
        about = {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
            os.pwrite(self._file, json.dumps(about).encode().ljust(_LENGTH), 0)

    def _try(self, what: str) -> int | None:
        """Lock the file, and return it; None if its holder removed it meanwhile, so that the lock is on no name."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_nlink:
                return file
        except OSError as error:
            holder = _holder(os.pread(file, _LENGTH, 0))
            os.close(file)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise ConfigError(f"{what} is in use by {holder}; wait until that has ended, or end it") from None
            raise
        os.close(file)
        return None

    def release(self) -> None:
        """Remove the file, and let others have the lock."""
        if self._file is not None:
            file, self._file = self._file, None
            if os.fstat(file).st_nlink:  # otherwise another may have a file of this name
                self._path.unlink(missing_ok=True)
            os.close(file)


def _holder(text: bytes) -> str:
    try:
        about = json.loads(text)
        return f"process {about['process']} on {about['host']} (since {about['since']})"
    except (ValueError, KeyError, TypeError):
        return "another process"
