"""A safetensors file, written as a stream and read in ranges.

```
8 bytes      the length of the header
header       JSON: {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "b": …}, then blanks;
             "__metadata__", if it is there, is no tensor but words about them
tensors      one after another, as they lie in memory
```

The safetensors package reads and writes the same files. It copies all tensors to write them, and it cuts a tensor along
its dimensions only. Here one tensor at a time is copied, and any range of its flattened elements can be read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import torch
from torch import Tensor

from microparallel.files.checksum import Checksum, checksum, checksum_of

__all__ = ["Checksum", "Piece", "TensorFile", "TensorWriter", "checksum", "checksum_of", "write", "write_into_memory"]

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BY_CODE = {code: dtype for dtype, code in _CODES.items()}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _CODES}  # that a file can hold, by torch's names

Kind = tuple[torch.dtype, tuple[int, ...]]  # of a tensor: its dtype and shape


# ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Piece:
    """What a file holds under one name: the elements from `start` to `stop` of a tensor, with a shape of their own."""

    tensor: Tensor
    start: int
    stop: int
    shape: tuple[int, ...]


def write(path: Path, pieces: Mapping[str, Piece]) -> Checksum:
    """Write a file and return when its bytes are on the disk; its name still needs `sync_folder`."""
    size, hashed = 0, hashlib.sha256()
    with path.open("wb") as file:
        for data in _contents(pieces):
            file.write(data)
            hashed.update(data)
            size += len(data)
        file.flush()
        os.fsync(file.fileno())
    return Checksum(size, hashed.hexdigest())


def write_into_memory(path: Path, pieces: Mapping[str, Piece]) -> None:
    """Write a file that lies in memory, over what is there: the pages that it has are used again."""
    with path.open("r+b", buffering=0) as file:
        for data in _contents(pieces) if pieces else ():
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]
        file.truncate()


def _contents(pieces: Mapping[str, Piece]) -> Iterator[bytes | memoryview]:
    """The bytes of a file: its header, then one tensor after another."""
    header, begins = _header({name: (piece.tensor.dtype, piece.shape) for name, piece in pieces.items()})
    yield header
    for name in begins:
        piece = pieces[name]
        flat = piece.tensor.detach().reshape(-1)[piece.start : piece.stop]
        yield _memory(flat.cpu().contiguous())


def _header(kinds: Mapping[str, Kind], metadata: Mapping[str, str] | None = None) -> tuple[bytes, dict[str, int]]:
    """The header of a file with these tensors, and where the bytes of each begin, in the order of the file."""
    # Tensors with larger elements come first, so that each one begins at a multiple of its elements' size.
    ordered = sorted(kinds.items(), key=lambda item: -item[1][0].itemsize)
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begins, end = {}, 0
    for name, (dtype, shape) in ordered:
        begins[name], end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": [begins[name], end]}
    text = json.dumps(entries).encode("ascii")
    text = text.ljust(math.ceil(len(text) / 8) * 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + begin for name, begin in begins.items()}


class TensorWriter:
    """A file whose tensors are written in any order, each when it is there; none is kept.

    Args:
        path: where it is; what was there is overwritten.
        kinds: dtype and shape of each tensor, by name.
        metadata: words about them, by name.
    """

    def __init__(self, path: Path, kinds: Mapping[str, Kind], metadata: Mapping[str, str] | None = None) -> None:
        header, self._begins = _header(kinds, metadata)
        self._kinds = kinds
        self._missing = set(kinds)
        self._file = path.open("wb")
        self._file.write(header)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one of the tensors."""
        if (tensor.dtype, tuple(tensor.shape)) != self._kinds[name]:
            raise ValueError(f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, not {self._kinds[name]}")
        self._file.seek(self._begins[name])
        self._file.write(_memory(tensor.detach().reshape(-1).cpu().contiguous()))
        self._missing.discard(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Return when the bytes are on the disk; after an error, just close the file."""
        with self._file:
            if kind is not None:
                return
            if self._missing:
                raise ValueError(f"{self._file.name} would end without {', '.join(sorted(self._missing))}")
            self._file.flush()
            os.fsync(self._file.fileno())


def _memory(flat: Tensor) -> memoryview:
    """The bytes of a tensor with one dimension: the same memory, to read or to write."""
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


# ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: where its bytes begin, counted from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)


class TensorFile:
    """A file whose header was read; its tensors are read when they are asked for.

    Attributes:
        path: where it is.
        entries: its tensors, by name.
        metadata: words about them, by name.

    Raises:
        ValueError: the file is not a safetensors file, or does not have the bytes that its header promises.
        OSError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self.entries, self.metadata = _read_header(file)
            self._version = _version(file)

    def read(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out`, which has one dimension, with the elements of a tensor from `start` on."""
        entry = self.entries[name]
        if out.dtype != entry.dtype or not 0 <= start <= start + out.numel() <= entry.numel:
            raise ValueError(f"{self.path.name} does not have {out.numel()} elements of {name} from {start} on")
        if not out.numel():
            return
        with self.path.open("rb", buffering=0) as file:
            if _version(file) != self._version:
                raise ValueError("another file has its place now, or it was written again")
            file.seek(entry.begin + start * entry.dtype.itemsize)
            rest = _memory(out)
            while rest:
                if not (count := file.readinto(rest)):
                    raise ValueError(f"{self.path.name} ends within {name}")
                rest = rest[count:]


def _version(file: IO[bytes]) -> tuple[int, ...]:
    """What changes when a file is written, or another gets its name."""
    about = os.fstat(file.fileno())
    return about.st_ino, about.st_size, about.st_mtime_ns


def _read_header(file: IO[bytes]) -> tuple[dict[str, Entry], dict[str, str]]:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if 8 + length > size:
        raise ValueError(f"its header would have {length} bytes, and the file has {size}")
    entries = {}
    header = json.loads(file.read(length))
    metadata = header.pop("__metadata__", {})
    for name, about in header.items():
        begin, end = about["data_offsets"]
        entry = Entry(_BY_CODE[about["dtype"]], tuple(about["shape"]), 8 + length + begin)
        if not all(isinstance(one, int) and one >= 0 for one in entry.shape):
            raise ValueError(f"{name} would have the shape {about['shape']}")
        if not (0 <= begin <= end <= size - 8 - length and end - begin == entry.numel * entry.dtype.itemsize):
            raise ValueError(f"{name} would have the bytes {begin} to {end}")
        entries[name] = entry
    return entries, metadata
