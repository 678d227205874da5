"""Write files so that a crash at any moment leaves the old one or the new one, never a half of each.

```
write aside ─▶ fsync the file ─▶ rename over the old one ─▶ fsync the folder
               its bytes last    readers see old or new     the new name lasts
```

Without the first fsync a power cut can leave the new name with no bytes behind it; without the second, the old name.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_durably(path: Path, data: bytes) -> None:
    """Write a file and return only when its bytes are on the disk; its name still needs `sync_folder`."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Return only when the names in this folder (files made, renamed, removed) are on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems cannot sync a folder; they keep names safe in their own way, or not at all.
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def write_atomically(path: Path, data: bytes) -> None:
    """Put these bytes at this path at once: a reader sees all of the old file or all of the new one."""
    with written_aside(path) as aside:
        write_durably(aside, data)


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Yield a path beside this one, to write a file there durably; after the block, the file is at this path.

    After an error there is what was there before.
    """
    path = path.resolve()  # a link stays one, and what it leads to is replaced
    aside = path.with_name(f".{path.name}-writing")
    try:
        yield aside
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
