"""Files that a verb writes: before the work begins, it is known that they can be written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from microparallel.errors import ConfigError


def require_writable(path: Path, flag: str) -> None:
    """Raise `ConfigError` if a file cannot be written there, naming the flag that asked for it."""
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: this is a folder; name a file in it")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{flag} {path}: this is not an ordinary file; name one that may be replaced")
    if not path.parent.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {path.parent}; create it, or choose another")
    try:
        with tempfile.TemporaryFile(dir=path.parent):  # permissions do not tell, for root and on odd file systems
            writable = not path.exists() or os.access(path, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise ConfigError(f"{flag} {path}: this place cannot be written to; choose another")
