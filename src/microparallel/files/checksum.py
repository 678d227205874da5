"""What a file must have to be the one that was written: its size and its sha256. Needs no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_BLOCK = 2**20  # bytes that are read at a time


@dataclass(frozen=True)
class Checksum:
    """What a file must have to be the one that was written."""

    bytes: int
    sha256: str


def checksum(path: Path, tell: Callable[[int], None] = lambda _: None) -> Checksum:
    """Read a file from its beginning to its end, a block at a time; `tell` is told how many bytes each has."""
    size, hashed = 0, hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            hashed.update(block)
            size += len(block)
            tell(len(block))
    return Checksum(size, hashed.hexdigest())


def checksum_of(data: bytes) -> Checksum:
    """The checksum of a file with these bytes."""
    return Checksum(len(data), hashlib.sha256(data).hexdigest())
