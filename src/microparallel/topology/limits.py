"""The limits that the system sets to a process (`ulimit`): which one an error comes from, and how to raise it."""

from __future__ import annotations

import errno
import re
from pathlib import Path

from microparallel.errors import LaunchError

# What libraries say when the system refuses; C++ code and the dynamic linker hand over nothing but text.
_NO_FILES = ("Too many open files",)
_NO_ADDRESSES = (
    *("annot allocate memory", "can't allocate memory", "not enough memory", "bad_alloc"),
    *("failed to map segment", "cannot create shared object descriptor"),
)
_NO_THREADS = ("can't start new thread", "Resource temporarily unavailable")
_WANTED = re.compile(r"tried to allocate (\d+) bytes")  # torch's words
_ADDRESSES = 2**30  # a rank that trains a small model with torch's CPU build was seen to need 0.87 GB


def open_files_limit() -> int | None:
    """How many files, sockets and pipes this process may have open at once; None for no limit."""
    return _limit("RLIMIT_NOFILE")


def address_limit() -> int | None:
    """How many bytes of addresses this process may have, used or not; None for no limit."""
    return _limit("RLIMIT_AS")


def addresses_in_use(system: Path = Path("/proc/self/statm")) -> int | None:
    """How many bytes of addresses this process has; None where the system does not say."""
    try:
        import resource

        return int(system.read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    except (OSError, ValueError, ImportError):
        return None


def limit_behind(error: BaseException | None, needed: str = "more") -> str | None:
    """The limit that an error comes from, what it is, and how to raise it, in one line; None if it comes from none."""
    while error is not None:
        if isinstance(error, Exception) and (line := _limit_behind_this(error, needed)) is not None:
            return line
        error = error.__cause__
    return None


def _limit_behind_this(error: Exception, needed: str) -> str | None:
    number, text = getattr(error, "errno", None), str(error)
    if number == errno.EMFILE or _says(text, _NO_FILES):
        return too_few_files(None)
    no_memory = number == errno.ENOMEM or isinstance(error, MemoryError) or _says(text, _NO_ADDRESSES)
    no_thread = _says(text, _NO_THREADS)
    if (no_memory or no_thread) and address_limit() is not None:
        if (wanted := _WANTED.search(text)) is not None:
            needed = f"{int(wanted[1]):,} bytes more"
        return too_few_addresses(needed if no_memory else "those of one more thread")
    if (no_thread or number == errno.EAGAIN) and (most := _limit("RLIMIT_NPROC")) is not None:
        return f"this user may run {most:,} processes and threads (ulimit -u), and no more can be started; raise it"
    return None


def require_files(more: int) -> None:
    """Refuse to go on if this process may not open so many more files; raise its own limit first where it may.

    Each process has a limit that it may raise (the soft one) up to another that it may not.
    """
    most = open_files_limit()
    if most is None or (needed := _open_files() + more) <= most:
        return
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise LaunchError(too_few_files(needed))
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def require_addresses() -> None:
    """Refuse to go on if this process may not have the addresses of torch and a few threads.

    Without them Python ends in as many ways as there are places to run out of memory; some show no error at all.
    """
    most = address_limit()
    if most is not None and most < _ADDRESSES:
        raise LaunchError(too_few_addresses("about 1 GiB with torch"))


def _open_files() -> int:
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            return sum(1 for _ in Path(folder).iterdir())
        except OSError:
            continue
    return 32  # a guess


def too_few_files(needed: int | None) -> str:
    """The line for a process that may open too few files."""
    want = max(1024, 2 * (needed or 0))
    more = "more are needed" if needed is None else f"about {needed:,} are needed"
    return (
        f"this process may have {open_files_limit():,} files open (ulimit -n), and {more}; raise it: ulimit -n {want}"
    )


def too_few_addresses(needed: str) -> str:
    """The line for a process that may have too few addresses; `needed` follows "and needs"."""
    from microparallel.text import show_size

    most, used = address_limit() or 0, addresses_in_use()
    has = "" if used is None else f"has {show_size(used)} "
    return (
        f"this process may have {show_size(most)} of addresses (ulimit -v {most // 1024}), {has}and needs {needed}; "
        "raise it: ulimit -v unlimited"
    )


def _says(text: str, phrases: tuple[str, ...]) -> bool:
    return any(phrase in text for phrase in phrases)


def _limit(name: str) -> int | None:
    """The limit that holds now (the soft one); None if there is none."""
    try:
        import resource
    except ImportError:  # not on this system
        return None
    soft = resource.getrlimit(getattr(resource, name))[0]
    return None if soft == resource.RLIM_INFINITY else soft
