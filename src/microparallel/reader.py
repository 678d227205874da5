"""Who reads standard output: when `| head` has seen enough, the program ends and says nothing about it."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def ends_with_its_reader() -> Iterator[None]:
    """Around a program's main function, or above it as a decorator: once nobody reads on, it ends quietly, with 1.

    Python raises BrokenPipeError where the main process prints. Where a rank prints, that rank fails, and the main
    process exits with its words: then the pipe itself says that they are for nobody.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # here, where the error can be caught: at Python's own end it would be shown
    except (BrokenPipeError, SystemExit) as error:
        failed = not isinstance(error, SystemExit) or error.code
        if not failed or not _reader_has_left():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still has to flush
        sys.exit(1)


def _reader_has_left() -> bool:
    """Whether standard output is a pipe whose other end is closed."""
    pipe = select.poll()
    try:
        pipe.register(sys.stdout.fileno(), 0)  # errors are told without being asked for
    except (io.UnsupportedOperation, ValueError):
        return False
    return any(event & select.POLLERR for _, event in pipe.poll(0))
