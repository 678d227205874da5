"""Where does a rank stand that does not answer? Ask it with a signal, and read the stack it dumps."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from microparallel.observe.place import best_of, read_stack
from microparallel.observe.processes import state_of
from microparallel.topology import DO_NOT_SPIN, threads_per_rank
from microparallel.world.fork_server import ForkServer

SIGNAL = signal.SIGUSR2
_COMMS = str(Path(__file__).parent.parent / "comms" / "comms.py")


def answer_whereabouts_in(file: IO[bytes] | int) -> None:
    """From now on, dump this process's stack into the file whenever the signal comes, even from inside C code."""
    faulthandler.register(SIGNAL, file=file, all_threads=False)


def ask_whereabouts(pid: int, file: IO[bytes], patience: float = 1.0) -> str:
    """Ask a process where it stands, and put the answer in one line."""
    start = os.fstat(file.fileno()).st_size
    os.kill(pid, SIGNAL)
    deadline = time.monotonic() + patience
    dump = b""
    while time.monotonic() < deadline:
        dump = os.pread(file.fileno(), 1 << 20, start)
        if dump.endswith(b"\n") and dump.count(b"\n") > 1:
            break
        time.sleep(0.01)
    return summarise_whereabouts(dump.decode(errors="replace"))


def summarise_whereabouts(dump: str) -> str:
    """The caller's innermost line in a dumped stack, and the call of ours it is waiting in."""
    frames = read_stack(dump)
    place = best_of(frames)
    if place is None:
        return "gave no answer (stopped, or not yet started)"
    at = f"{place.function} at {place.file}:{place.line}"
    calls = [frame.function for frame in frames if frame.file == _COMMS]
    return f"in {calls[-1]}, called by {at}" if calls else f"in {at}"


# One rank's process, seen from its parent.


class RankProcess:
    """A fresh Python process that runs jobs, in a process group of its own so that it ends with all it has started."""

    def __init__(self, lifeline_fd: int, ranks: int, fork_server: ForkServer | None = None) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        self._answers = tempfile.TemporaryFile()  # noqa: SIM115  (closed by kill)
        fds = (theirs.fileno(), lifeline_fd, self._answers.fileno())
        # The child finds modules where its parent found them.
        path = [str(Path(folder).absolute()) for folder in sys.path]
        program = f"import sys; sys.path[:] = {path!r}; from microparallel.world.child import main; main{fds}"
        start: Any = subprocess.Popen if fork_server is None else fork_server.fork
        try:
            self._process = start(
                [sys.executable, "-u", "-c", program],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                env=_environment(ranks),
                process_group=0,
            )
        except BaseException:
            self.connection.close()
            self._answers.close()
            raise
        finally:
            theirs.close()

    def send(self, message: bytes) -> None:
        """Send a message; a process that has died is noticed by who waits for its answer."""
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
        """How it ended, as `subprocess` gives it; None if it runs."""
        status: int | None = self._process.poll()
        return status

    def where(self) -> str:
        """Where the process stands, in one line."""
        if not self.alive:
            return self.how_it_ended()
        if state_of(self._process.pid)[0] == "stopped":
            return "is stopped (SIGSTOP, or a debugger)"
        return ask_whereabouts(self._process.pid, self._answers)

    def how_it_ended(self) -> str:
        """Why there will be no answer, in words that follow "rank 2 …"."""
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
        return f"was killed by {name}{hint}"

    def wait(self, patience: float) -> None:
        """Wait for the process to end, but not for long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)

    def hang_up(self) -> None:
        """Let an idle process know that there is nothing more to do."""
        self.connection.close()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process itself."""
        if self.alive:
            self._process.send_signal(number)

    def kill(self) -> None:
        """End the process and everything it has started, at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._answers.close()


def _environment(ranks: int) -> dict[str, str]:
    """The child's environment: its share of the cores, and no network but this machine's own."""
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(threads_per_rank(ranks)))
    environment.setdefault(*DO_NOT_SPIN)
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        environment["GLOO_SOCKET_IFNAME"] = environment["NCCL_SOCKET_IFNAME"] = loopback
    # torchrun's own variables would make the child believe it belongs to another world.
    for name in list(environment):
        if name.startswith(("TORCHELASTIC_", "SLURM_")) or name in ("GROUP_RANK", "ROLE_RANK"):
            del environment[name]
    return environment
