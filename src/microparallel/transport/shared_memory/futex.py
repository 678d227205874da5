"""Sleep until another process changes a number: Linux's futex, called without a compiler.

`wait` puts the calling thread to sleep only if the number still is what the caller last saw; the kernel compares and
sleeps in one step, so that a `wake` in between is never missed. Both calls are full memory barriers.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from typing import Any

_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_WAIT, _WAKE = 0, 1
_ALL_THREADS = 2**31 - 1


def why_not() -> str:
    """Why this library cannot use a futex on this machine; empty where it can."""
    if sys.platform != "linux":
        return f"it needs Linux, and this is {sys.platform}"
    if platform.machine() not in _NUMBERS:
        return f"it does not know the futex call of a {platform.machine()} processor"
    return ""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_NUMBER = _NUMBERS.get(platform.machine(), -1)


def _futex(library: ctypes.CDLL) -> Any:
    call = library.syscall
    call.restype = ctypes.c_long
    call.argtypes = (
        *(ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.c_uint32),
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long),
    )
    return call


_sleeping_call = _futex(ctypes.CDLL(None))  # other threads may run Python meanwhile
_quick_call = _futex(ctypes.PyDLL(None))


def wait(address: int, seen: int, timeout: float) -> None:
    """Sleep while the 32-bit number at this address is `seen`, at most `timeout` seconds; may also return early."""
    limit = _Timespec(int(timeout), int(timeout % 1 * 1e9))
    _sleeping_call(_NUMBER, address, _WAIT, seen, ctypes.byref(limit), None, 0)


def wake(address: int) -> None:
    """Wake all threads, of all processes, that sleep on the number at this address."""
    _quick_call(_NUMBER, address, _WAKE, _ALL_THREADS, None, None, 0)


# A thread that spins reads a number without a memory barrier. On x86 stores become visible in the order they were made,
# so a thread that sees the number change also sees what was written before it; other processors do not promise that.
SPINNING_IS_SAFE = platform.machine() == "x86_64"


def page_size() -> int:
    """The unit in which memory is mapped."""
    return os.sysconf("SC_PAGE_SIZE")
