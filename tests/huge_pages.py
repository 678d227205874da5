"""A process that forks hundreds of others holds its memory in huge pages, so that a fork copies few entries.

A fork copies the table of its parent's memory, an entry for each page, and frees it again when it ends. The process
that tests fork from has imported torch: 240 MB, which are 60,000 pages of 4 KB, or 100 huge pages and some small ones.
To put them together takes as long as some thirty forks save; who forks a few ranks does better without.
"""

import ctypes
import re
from pathlib import Path

HUGE = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE; Linux before 6.1 does not know it, and says so


def join():
    """Put the private memory of this process into huge pages, where there is enough of it in one place."""
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = re.fullmatch(r"(\w+)-(\w+) rw-p \w+ \S+ 0 *(\[heap\])?", line)  # neither a file's nor a stack
        if found is None:
            continue
        start, end = (int(address, 16) for address in found.group(1, 2))
        for place in range(-(-start // HUGE) * HUGE, end - HUGE + 1, HUGE):  # one by one: some may not be there
            libc.madvise(ctypes.c_void_p(place), ctypes.c_size_t(HUGE), _COLLAPSE)
