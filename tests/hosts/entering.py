"""Run inside a host of `bed.py`: called by a process that was forked, before it becomes a rank or a command."""

import ctypes
import os
import signal
from pathlib import Path

# Time, mount, UTS, IPC, PID, network.
_ALL = 0x00000080 | 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
_PR_SET_PDEATHSIG = 1


def enter(holder: int) -> None:
    """Go on in the namespaces of a host, in the same folder; `holder` is the first process there.

    A process cannot change its own number, so a child of it goes on, and this one waits and ends as the child does.
    """
    folder = Path.cwd()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(os.pidfd_open(holder), _ALL) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter the host of process {holder}")
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(code if code >= 0 else 128 - code)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.chdir(folder)
