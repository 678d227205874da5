"""Ranks that are forked from a process which has imported torch already: see nursery_process.py.

A rank of `Pool(Nursery())` starts in a moment, where a fresh process needs seconds. What it costs: Linux only, and no
CUDA, whose driver does not survive a fork. Whoever checks the same small thing again and again uses it: the exercises
of the course, and the tests of this library.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from microparallel.errors import LaunchError

# What every rank needs, and what a process's first optimizer imports, which takes as long again.
NEEDED = ("microparallel.world.connect", "microparallel.models", "microparallel.torch_private:load_for_optimizers")
_TAKE_ORPHANS, _DOES_IT_TAKE_ORPHANS = 36, 37  # PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER


def can_fork() -> bool:
    """Whether ranks may be forked here."""
    import torch

    return sys.platform == "linux" and not torch.cuda.is_available()


class Nursery:
    """Starts ranks by forking a process that has imported `modules`; one may name a function of it to call, too."""

    def __init__(self, modules: Sequence[str] = NEEDED) -> None:
        self._process: subprocess.Popen[bytes] | Fork
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = [str(Path(folder).absolute()) for folder in sys.path]
        self._process = subprocess.Popen(
            [sys.executable, "-um", "microparallel.world.nursery_process", str(theirs.fileno()), *modules],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # no threads: they would not survive a fork
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)},
            process_group=0,
        )
        theirs.close()

    @classmethod
    def of_process(cls, talks: socket.socket, process: Fork) -> Nursery:
        """One that is there already: a process that runs `nursery_process.main` at the other end of a socket."""
        nursery = cls.__new__(cls)
        nursery._socket, nursery._process = talks, process
        return nursery

    def fork(self, command: Sequence[str], *, pass_fds: Sequence[int], env: dict[str, str], **_: object) -> Fork:
        """What `subprocess.Popen` does for a rank, without a new interpreter."""
        files = [1, 2, *pass_fds]
        request = {"program": command[-1], "places": files, "environment": env, "folder": str(Path.cwd())}
        with _adopting_orphans():
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], files)
                pid = self._socket.recv(100)
            except OSError:
                pid = b""
            if not pid:
                raise LaunchError("the process that ranks are forked from has ended; its error stands above")
            self._socket.recv(100)  # it is ours
        return Fork(int(pid))

    @property
    def pid(self) -> int:
        """The process that forks."""
        return self._process.pid

    def close(self) -> None:
        """Let the process that forks end."""
        self._socket.close()
        self._process.wait()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Fork:
    """A process that was forked for us: as much of `subprocess.Popen` as it takes to watch over a rank."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """How it ended; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        """Wait until it has ended."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a rank", timeout)
            time.sleep(0.002)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Be the parent of what a descendant leaves behind when it ends; afterwards as before."""
    before = _takes_orphans()
    take_orphans(True)
    try:
        yield
    finally:
        take_orphans(before)


def take_orphans(wanted: bool) -> None:
    """Say whether this process becomes the parent of what its descendants leave behind."""
    ctypes.CDLL(None).prctl(_TAKE_ORPHANS, int(wanted), 0, 0, 0)


def _takes_orphans() -> bool:
    answer = ctypes.c_int()
    ctypes.CDLL(None).prctl(_DOES_IT_TAKE_ORPHANS, ctypes.byref(answer), 0, 0, 0)
    return bool(answer.value)
