"""Files that a verb writes: found out before the work begins that they can be written, and never left half-written."""

from __future__ import annotations

import os
from pathlib import Path

from microparallel.errors import ConfigError


def require_writable(path: Path, flag: str) -> None:
    """Raise `ConfigError` if a file cannot be written there, naming the flag that asked for it."""
    folder = path.parent
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: it is a folder; give the name of a file")
    if not folder.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {folder}; create it first")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{flag} {path}: it must not be written to; choose another place")
