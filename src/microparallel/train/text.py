"""Text to train a language model on: any UTF-8 file or folder, or the sources of Python itself.

Tokens are bytes. The text is cut into windows that meet but do not overlap; the input is a window, and the target is
the same window one byte later:

```
context = 4      T h e _ q u i c k _ f …
window 0  input  T h e _           target    h e _ q
window 1  input          q u i c   target            u i c k
```
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch

from microparallel.errors import DataError, UsageError
from microparallel.train.data import Split

_MOST_HELD_BACK = 1000  # windows: measuring on more takes longer and tells no more


class TextData:
    """Windows of text; the bytes are kept as bytes, and become the 64-bit numbers that models take batch by batch."""

    def __init__(self, windows: torch.Tensor) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.windows[index].to(torch.int64)
        return window[:-1], window[1:]

    def batch(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the windows with these numbers as (inputs, targets), both of shape (windows, context)."""
        windows = self.windows.index_select(0, torch.tensor(indices, dtype=torch.int64)).to(torch.int64)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def text(path: Path | str | None = None, context: int = 64) -> Split:
    """Cut text into windows of `context` bytes: the last tenth, at most 1000 windows, is held back.

    A folder gives all files below it, in the order of their paths; hidden ones, `__pycache__` and those that are not
    UTF-8 are left out. No path at all gives the sources of the running Python's standard library, so that there is
    always something to train on.
    """
    if context < 1:
        raise UsageError(f"context={context}: a window needs at least 1 byte")
    try:
        corpus, name = _standard_library() if path is None else _read(Path(path))
    except OSError as error:
        raise DataError(
            f"text {error.filename} cannot be read ({error.strerror}): check its permissions, or name another"
        ) from error
    # Every window but the first begins at the last target of the one before it: one byte is needed beyond the windows.
    count = max(0, len(corpus) - 1) // context
    if count < 2:
        raise DataError(
            f"{name}: {len(corpus)} bytes are fewer than two windows of context={context}, which take "
            f"{2 * context + 1}: give a longer text or a shorter context"
        )
    windows = torch.frombuffer(corpus, dtype=torch.uint8).unfold(0, context + 1, context)
    held_back = max(1, min(_MOST_HELD_BACK, count // 10))
    return Split(
        training=TextData(windows[:-held_back]),
        validation=TextData(windows[-held_back:]),
        description=f"{name}, {len(corpus):,} bytes: {count - held_back} windows of {context} to train on "
        f"and {held_back} held back",
    )


def _read(path: Path) -> tuple[bytearray, str]:
    return _read_folder(path) if path.is_dir() else _read_file(path)


def _standard_library() -> tuple[bytearray, str]:
    """Read the top-level modules of the running Python."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    if not files:
        raise DataError(f"this Python has no sources of its standard library in {folder}: name a text file or folder")
    return _join(files, f"Python {sys.version_info.major}.{sys.version_info.minor}'s standard library")


def _read_folder(folder: Path) -> tuple[bytearray, str]:
    """Read every file below a folder that is text."""
    files = []
    for parent, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    regular = sorted(file for file in files if file.is_file())
    if not regular:
        raise DataError(f"text folder {folder} has no files that are not hidden: name a folder with text in it")
    return _join(regular, str(folder))


def _join(files: Sequence[Path], name: str) -> tuple[bytearray, str]:
    corpus = bytearray()
    skipped = 0
    for file in files:
        content = file.read_bytes()
        if _first_bad_byte(content) is None:
            corpus += content
        else:
            skipped += 1
    if skipped == len(files):
        raise DataError(f"text folder {name}: none of its {len(files)} files is UTF-8 text: name one with text in it")
    left_out = f", {skipped} not UTF-8 left out" if skipped else ""
    return corpus, f"{name} ({len(files) - skipped} files{left_out})"


def _read_file(file: Path) -> tuple[bytearray, str]:
    """Read one file, which must be text."""
    if not file.exists():
        raise DataError(f"text {file} does not exist: check the path (it is taken from {Path.cwd()})")
    if not file.is_file():
        raise DataError(f"text {file} is neither a file nor a folder: name one of these")
    content = file.read_bytes()
    if not content:
        raise DataError(f"text {file} is empty: name a file with text in it")
    offset = _first_bad_byte(content)
    if offset is not None:
        raise DataError(
            f"text {file} is not UTF-8 text: byte {offset} is 0x{content[offset]:02x}; "
            "name a text file, or convert this one to UTF-8"
        )
    return bytearray(content), str(file)


def _raise(error: OSError) -> None:
    """Make `os.walk` report a folder it cannot enter, which it would pass over in silence."""
    raise error


def _first_bad_byte(content: bytes) -> int | None:
    """Find the first byte that no text has: one that breaks UTF-8, or a zero, which UTF-8 allows and text does not."""
    zero = content.find(0)
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start if zero == -1 else min(zero, error.start)
    return None if zero == -1 else zero
