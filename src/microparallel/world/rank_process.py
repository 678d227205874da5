"""One rank's process, as its parent sees it: started, sent jobs, asked where it stands, and ended."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from microparallel.observe.flight import AFTER_VARIABLE
from microparallel.observe.place import Place, most_relevant
from microparallel.observe.processes import dumped_stack, state_of
from microparallel.text import show_size
from microparallel.topology import BEFORE_TORCH, threads_per_rank
from microparallel.topology.limits import address_limit
from microparallel.world.fork_server import ForkServer
from microparallel.world.output import Unfinished

_SIGNAL = signal.SIGUSR2  # on which a rank dumps its stack; the flight recorder's, SIGUSR1, may be turned off
_OUT_OF_ADDRESSES = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS)  # how C and C++ end when they get no memory
_CUDA_FILE = re.compile(r"cuda\.shm\.[0-9a-f]+\.([0-9a-f]+)\.[0-9a-f]+")
_COMMS = str(Path(__file__).parent.parent / "comms" / "comms.py")


class RankProcess:
    """A Python process that runs jobs, in a process group of its own, so that it ends with all it has started."""

    def __init__(
        self,
        lifeline_fd: int,
        screen_fd: int,
        ranks: int,
        fork_server: ForkServer | None = None,
        *,
        debug: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115  (closed by kill)
        self._unfinished = tempfile.TemporaryFile()  # noqa: SIM115  (closed by kill)
        fds = (theirs.fileno(), lifeline_fd, self._stacks.fileno(), screen_fd, self._unfinished.fileno())
        # The child finds modules where its parent found them.
        path = [str(Path(folder).absolute()) for folder in sys.path]
        program = f"import sys; sys.path[:] = {path!r}; from microparallel.world.child import main; main{fds}"
        start: Any = subprocess.Popen if fork_server is None else fork_server.fork
        try:
            self._process = start(
                [sys.executable, "-u", "-c", program],
                pass_fds=(0, *fds) if debug else fds,
                stdin=None if debug else subprocess.DEVNULL,
                env=_environment(ranks) | ({AFTER_VARIABLE: "0"} if debug else {}) | dict(environment or {}),
                process_group=0,
            )
        except BaseException:
            self.connection.close()
            self._stacks.close()
            self._unfinished.close()
            raise
        finally:
            theirs.close()

    def send(self, message: bytes) -> None:
        """Send a message. That the process has died is noticed where its answer is waited for, not here."""
        with contextlib.suppress(OSError):
            self.connection.send_bytes(message)

    @property
    def pid(self) -> int:
        """The number of the process."""
        return int(self._process.pid)

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.exit_status is None

    @property
    def exit_status(self) -> int | None:
        """How the process ended, as `subprocess` gives it; None while it runs."""
        status: int | None = self._process.poll()
        return status

    @property
    def stopped(self) -> bool:
        """Whether the process was stopped by a signal, and may be continued by another."""
        return self.alive and state_of(self._process.pid)[0] == "stopped"

    def where(self) -> str:
        """Which line the process is at, or how it ended, in one line."""
        if not self.alive:
            return self.how_it_ended()
        if self.stopped:
            return "is stopped (SIGSTOP, or a debugger)"
        return show_stack(dumped_stack(self._process.pid, _SIGNAL, self._stacks, timeout=1.0))

    def how_it_ended(self) -> str:
        """How the process ended without a result, in words that follow "rank 2 …"."""
        self.wait(5.0)
        code = self.exit_status
        if code is None:
            return "closed its connection without a result"
        if code >= 0:
            return f"exited with code {code} before its function had returned"
        name = signal.Signals(-code).name
        hint = {
            signal.SIGKILL: " (was the machine out of memory?)",
            signal.SIGABRT: " (a message of another size than was expected? check=True names it)",
        }.get(signal.Signals(-code), "")
        if code in _OUT_OF_ADDRESSES and (most := address_limit()) is not None:
            hint = f" (out of addresses? a process may have {show_size(most)} of them: ulimit -v {most // 1024})"
        return f"was killed by {name}{hint}"

    def wait(self, timeout: float) -> None:
        """Wait until the process has ended, or the timeout is over."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)

    def disconnect(self) -> None:
        """Close the connection, on which an idle process ends."""
        self.connection.close()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process itself."""
        if self.alive:
            self._process.send_signal(number)

    def kill(self) -> dict[int, bytes]:
        """End the process and everything it has started, at once; returns what it wrote of lines without their ends."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        remove_leftovers(self._process.pid)
        self._stacks.close()
        with self._unfinished:
            return Unfinished(self._unfinished.fileno()).take()


def _environment(ranks: int) -> dict[str, str]:
    """The child's environment: its share of the cores, and no network but this machine's own."""
    environment = BEFORE_TORCH | os.environ
    environment.setdefault("OMP_NUM_THREADS", str(threads_per_rank(ranks)))
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        environment["GLOO_SOCKET_IFNAME"] = environment["NCCL_SOCKET_IFNAME"] = loopback
    # torchrun's own variables would make the child believe it belongs to another world.
    for name in list(environment):
        if name.startswith(("TORCHELASTIC_", "SLURM_")) or name in ("GROUP_RANK", "ROLE_RANK"):
            del environment[name]
    return environment


# ── sockets of the processes that a rank starts ─────────────────────────────────────────────────────────────────────


def keep_sockets_together() -> None:
    """Let processes that this rank starts with `multiprocessing`, as data workers are, put their sockets in one folder.

    Each would make a folder of its own otherwise, which nobody finds and removes after it was killed.
    """
    with contextlib.suppress(OSError):  # then they make their own
        folder = _sockets(os.getpid())
        folder.mkdir(mode=0o700)
        multiprocessing.current_process()._config["tempdir"] = str(folder)  # type: ignore[attr-defined]


def remove_sockets(rank: int) -> None:
    """Remove that folder of the rank with this process number, which has ended or is about to be ended."""
    with contextlib.suppress(OSError):
        shutil.rmtree(_sockets(rank), ignore_errors=True)


def remove_leftovers(rank: int) -> None:
    """Remove what a rank that has ended, or is about to be ended, leaves in folders that others use, too."""
    remove_sockets(rank)
    remove_shared_gpu_files(rank)


def _sockets(rank: int) -> Path:
    return Path(tempfile.gettempdir()) / f"microparallel-rank-{rank}"


# ── files of CUDA ───────────────────────────────────────────────────────────────────────────────────────────────────


def remove_shared_gpu_files(rank: int, folder: Path = Path("/dev/shm")) -> None:
    """Remove the files by which the rank with this process number shared memory and events of a GPU with others.

    CUDA makes them, `cuda.shm.USER.PROCESS.NUMBER` with hexadecimal numbers, and removes them only if a process ends in
    order: not if it was killed, or ended by `os._exit`.
    """
    for path in folder.glob("cuda.shm.*"):
        with contextlib.suppress(OSError):
            found = _CUDA_FILE.fullmatch(path.name)
            if found and int(found[1], 16) == rank and path.lstat().st_uid == os.geteuid():
                path.unlink()


# ── where a rank stands ─────────────────────────────────────────────────────────────────────────────────────────────


def dump_stack_on_signal(file_descriptor: int) -> None:
    """From now on, let this process dump its stack into a file when the parent's signal comes, even inside C code."""
    faulthandler.register(_SIGNAL, file=file_descriptor, all_threads=False)


def show_stack(stack: Sequence[Place]) -> str:
    """The innermost line of the user's in a stack, and the method of Comms that it waits in."""
    place = most_relevant(stack)
    if place is None:
        return "gave no answer (stopped, or not yet started)"
    at = f"{place.function} at {place.file}:{place.line}"
    calls = [one.function for one in stack if one.file == _COMMS]
    return f"in {calls[-1]}, called by {at}" if calls else f"in {at}"
