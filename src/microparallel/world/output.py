"""What ranks print stays in whole lines, although all of them write to one terminal, pipe or file.

    rank 0   print("loss", 0.3)    →  loss 0.3⏎       one write, with the lock of the screen
    rank 1   print("loss", 0.2)    →  loss 0.2⏎
    rank 0   tqdm's "\\r 40%"        →  \\r 40%           an unfinished line is shown when it is flushed
    rank 1   print("saved")        →  ⏎saved⏎         another rank's line does not go on in it

`print` writes its arguments one by one. So `WholeLines` keeps what a thread has written of a line until the line ends
or the thread flushes. It also copies what it keeps into a file (`Unfinished`), from which the parent shows it if the
rank is killed. What C libraries and other programs write does not come through here; `let_c_write_lines` makes C's own
output arrive in lines, too.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import io
import mmap
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import IO, Any
from weakref import WeakSet

_MOST_KEPT = 1 << 16  # bytes of a line without an end, after which its beginning is shown
_SPACE = 1 << 20  # in the file of unfinished lines, for each stream
_C_LINE_BUFFERED = 1  # _IOLBF
_C_BUFFER = 1 << 16
_LINES_WITHIN = re.compile(rb"(?<=[\r\n])(?=[^\r\n])")  # a carriage return goes back to where a line begins


class Screen:
    """Where ranks and their parent write, one after another: a lock, and whose unfinished line is shown there.

    All of them share one file without a name: its lock is the lock, and it holds a number for each of the places that
    stdout and stderr lead to, the process that has left an unfinished line there.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._open_lines = memoryview(mmap.mmap(descriptor, 8)).cast("i")
        self._process_lock = threading.RLock()
        _with_locks.add(self)

    @staticmethod
    def file() -> IO[bytes]:
        """A new file for ranks to share."""
        file = tempfile.TemporaryFile()  # noqa: SIM115  (closed by the pool)
        file.truncate(8)
        return file

    def show(self, number: int, text: bytes, writer: int, prefix: bytes = b"") -> None:
        """Write to a file descriptor, with the prefix before each line that begins here."""
        place = 0 if _same_place(1, 2) else number - 1
        with self.locked():
            open_line = self._open_lines[place]
            begins = not open_line
            if open_line and open_line != writer:
                text, begins = b"\n" + text, False
            text = _prefixed(text, prefix, begins)
            # Before the bytes are gone: a rank that is killed in between leaves a line that others do not go on in.
            self._open_lines[place] = writer
            _write_all(number, text)
            if text.endswith(b"\n"):
                self._open_lines[place] = 0

    def mark(self, number: int, writer: int) -> None:
        """Say which process's unfinished line is there (0: none), where something else than `show` has written."""
        with self.locked():
            self._open_lines[0 if _same_place(1, 2) else number - 1] = writer

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Within this block no other thread or process writes."""
        with self._process_lock:
            with contextlib.suppress(OSError):  # a system without such locks: then lines may mix
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def after_fork(self) -> None:
        """Take a new lock: a thread that is not in this process may have held the old one."""
        self._process_lock = threading.RLock()


class Unfinished:
    """What one rank has written of lines that have not ended, in a file that its parent reads when the rank is gone."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def keep(self, number: int, text: bytes) -> None:
        """Remember this as all that is unfinished on a stream."""
        text = text[: _SPACE - 4]
        os.pwrite(self._descriptor, len(text).to_bytes(4, "little") + text, (number - 1) * _SPACE)

    def take(self) -> dict[int, bytes]:
        """What is unfinished on each stream; from now on, nothing."""
        found = {}
        for number in (1, 2):
            place = (number - 1) * _SPACE
            length = int.from_bytes(os.pread(self._descriptor, 4, place), "little")
            if text := os.pread(self._descriptor, length, place + 4):
                found[number] = text
                self.keep(number, b"")
        return found


class WholeLines(io.RawIOBase):
    """The binary stream beneath a rank's `sys.stdout` or `sys.stderr`. Any thread may write to it."""

    def __init__(self, number: int, screen: Screen, unfinished: Unfinished) -> None:
        self.prefix = b""
        self._number = number
        self._screen = screen
        self._unfinished = unfinished
        self._kept: dict[int, bytes] = {}  # a thread → what it has written of a line
        self._lock = threading.RLock()  # around `_kept`; a signal's handler may print while its thread prints
        self._pid = os.getpid()
        _with_locks.add(self)

    def write(self, data: Any) -> int:
        """Show the lines that end here, and keep the rest."""
        written = bytes(data)
        thread = threading.get_ident()
        with self._lock:
            before = self._kept.pop(thread, b"")
            lines, newline, rest = (before + written).rpartition(b"\n")
            if len(rest) > _MOST_KEPT:
                lines, newline, rest = lines + newline + rest, b"", b""
            if rest:
                self._kept[thread] = rest
            if lines or newline:
                self._screen.show(self._number, lines + newline, os.getpid(), self.prefix)
            if before or rest:
                self._remember()
        return len(written)

    def flush(self) -> None:
        """Show what this thread has written of a line."""
        with self._lock:
            self._show_kept(threading.get_ident())

    def flush_all_threads(self) -> None:
        """Show what all threads have written of lines, each in one of its own."""
        with self._lock, contextlib.suppress(OSError):
            for thread in list(self._kept):
                self._show_kept(thread)

    def _show_kept(self, thread: int) -> None:
        if rest := self._kept.pop(thread, b""):
            self._screen.show(self._number, rest, os.getpid(), self.prefix)
            self._remember()

    def _remember(self) -> None:
        if os.getpid() == self._pid:  # a fork of the rank has its own lines, which the parent does not read
            self._unfinished.keep(self._number, b"\n".join(self._kept.values()))

    def after_fork(self) -> None:
        """Take a new lock, and leave unfinished lines to the process that wrote them."""
        self._lock = threading.RLock()
        self._kept.clear()

    def writable(self) -> bool:
        """It is."""
        return True

    def fileno(self) -> int:
        """The file descriptor, which subprocesses inherit, and by which libraries ask about the terminal."""
        return self._number

    def isatty(self) -> bool:
        """Whether this leads to a terminal."""
        return os.isatty(self._number)


_with_locks: WeakSet[Screen | WholeLines] = WeakSet()


def _after_fork() -> None:
    for one in list(_with_locks):
        one.after_fork()


os.register_at_fork(after_in_child=_after_fork)  # there is no way to take this back, so it is done once for all


# ── in a rank ───────────────────────────────────────────────────────────────────────────────────────────────────────


class RankOutput:
    """A rank's `sys.stdout` and `sys.stderr`, from now on in whole lines."""

    def __init__(self, screen_descriptor: int, unfinished_descriptor: int) -> None:
        self._screen = Screen(screen_descriptor)
        unfinished = Unfinished(unfinished_descriptor)
        self._streams = [WholeLines(number, self._screen, unfinished) for number in (1, 2)]
        for name, stream in zip(("stdout", "stderr"), self._streams, strict=True):
            before = getattr(sys, name)
            if before is None:  # it was closed before this process began
                continue
            before.flush()
            encoding, errors = before.encoding, before.errors
            # Our stream has no buffer, where one is expected: `write_through` hands every piece on at once.
            wrapper: Any = io.TextIOWrapper
            setattr(sys, name, wrapper(stream, encoding, errors, newline="\n", write_through=True))
        atexit.register(self.finish_lines)
        let_c_write_lines()

    def begin(self, rank: int, prefix: bool) -> None:
        """From now on this process is that rank."""
        for stream in self._streams:
            stream.prefix = prefix_of(rank) if prefix else b""

    @contextlib.contextmanager
    def prompting(self) -> Iterator[None]:
        """Within this block a debugger writes prompts, and its user ends these lines by typing a command."""
        sys.stdout.flush()
        self._screen.mark(1, os.getpid())
        try:
            yield
        finally:
            if os.isatty(0):  # which has shown what was typed, with the end of its line
                self._screen.mark(1, 0)

    def finish_lines(self) -> None:
        """Show what has been written of lines: the rank's function has ended."""
        for stream in self._streams:
            stream.flush_all_threads()


def let_c_write_lines() -> None:
    """Let C's stdout hand over whole lines: `python -u`, which ranks run, makes it hand over piece by piece."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p  # C writes what is left when Python has gone, so this is never freed
        buffer = ctypes.c_void_p(libc.malloc(_C_BUFFER))
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), buffer, _C_LINE_BUFFERED, ctypes.c_size_t(_C_BUFFER))


def prefix_of(rank: int) -> bytes:
    """What stands before each line of a rank, if the caller of `launch` wants it."""
    return f"[rank {rank}] ".encode()


# ── small parts ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _same_place(first: int, second: int) -> bool:
    """Whether two file descriptors lead to the same terminal, pipe or file."""
    try:
        one, other = os.fstat(first), os.fstat(second)
    except OSError:
        return False
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)


def _prefixed(text: bytes, prefix: bytes, begins: bool) -> bytes:
    """Put the prefix before each line; what comes first begins a line or goes on with one."""
    prefixed = _LINES_WITHIN.sub(prefix, text)
    return prefix + prefixed if begins and text[:1] not in (b"\r", b"\n") else prefixed


def _write_all(number: int, text: bytes) -> None:
    view = memoryview(text)
    while view:
        try:
            view = view[os.write(number, view) :]
        except BlockingIOError:  # another program that shares the terminal has made it non-blocking
            import select

            select.select([], [number], [])
