"""Map a part of a file into memory, without keeping its descriptor, as Python's own `mmap` would do."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any

_library = ctypes.CDLL(None, use_errno=True)
_library.mmap.restype = ctypes.c_void_p
_library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_long)
_library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value


def mapped(descriptor: int, size: int, start: int = 0, *, writable: bool = False) -> ctypes.Array[Any]:
    """Map a part of a file; it is unmapped when the array, and all that was made of it, is gone.

    Raises:
        OSError: the system refuses; ENOMEM if the process may have no more addresses.
    """
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = _library.mmap(None, size, protection, mmap.MAP_SHARED, descriptor, start)
    if address == _FAILED:
        raise _error()
    memory = (ctypes.c_char * size).from_address(address)
    weakref.finalize(memory, _library.munmap, address, size).atexit = False
    return memory


def return_pages(address: int, size: int) -> None:
    """Give whole pages of a mapped file back to the system; they read as zeros from now on."""
    if _library.madvise(address, size, mmap.MADV_REMOVE):
        raise _error()


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
