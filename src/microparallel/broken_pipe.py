"""End a program quietly when the reader of its output has left, as `| head` does.

Here, and not in `cli`, because the examples use it, too, and importing `cli` imports the command line's libraries.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_broken_pipe() -> Iterator[None]:
    """Use it around a program's main function, or as its decorator: when the pipe breaks, exit with 1 and no message.

    Python raises BrokenPipeError where the main process prints. Where a rank prints, that rank fails, and the main
    process exits with the rank's error: then this looks whether standard output is a pipe without a reader.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # here, where the error can be caught: when Python flushes at its end, it is printed
    except (BrokenPipeError, SystemExit) as error:
        failed = not isinstance(error, SystemExit) or error.code
        if not failed or not _reader_has_left():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        sys.exit(1)


def _reader_has_left() -> bool:
    """Whether standard output is a pipe whose other end is closed."""
    pipe = select.poll()
    try:
        pipe.register(sys.stdout.fileno(), 0)  # poll reports errors in any case
    except (io.UnsupportedOperation, ValueError):
        return False
    return any(event & select.POLLERR for _, event in pipe.poll(0))
