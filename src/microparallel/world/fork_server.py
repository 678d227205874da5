"""A fork server: a process that has imported torch already and forks ranks, so that they start at once.

    parent ──── "start" ────▶ fork server
       │                         │ fork
       │                     in between   ends at once, so that its child becomes the parent's, which adopts orphans
       │                         │ fork
       └──── adopts ────────▶ the rank    a child of the parent, which can wait for it as for any other

The parent asks with one message: a program as `python -c` takes it, the variables of the rank's environment and its
folder, together with its output, its errors and the files it shares with its parent. What it costs: Linux only, and no
CUDA, whose driver does not survive a fork. The checks of the course's exercises use it, and the tests of this library.

The fork server of `multiprocessing` is as quick, but does not fit. Its forks import the script that started them, which
runs a script without a main guard a second time. A process has only one of it, which cannot be closed and has imported
what its first user asked for. And its forks are its own children: the system may give the number of a rank that died to
another process before the pool has ended what that rank had started.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from microparallel.errors import LaunchError

# What every rank imports, and what a process's first optimizer imports, which takes as long again.
NEEDED = ("microparallel.world.connect", "microparallel.models", "microparallel.torch_private:load_for_optimizers")
_TAKE_ORPHANS, _DOES_IT_TAKE_ORPHANS = 36, 37  # PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER
_SIGNAL_WHEN_PARENT_ENDS = 1  # PR_SET_PDEATHSIG
_GPUS = "CUDA_VISIBLE_DEVICES"
# Held by the thread that asks a fork server for a rank: answers come in the order of requests, and adopting orphans is
# a property of the whole process.
_asking = threading.Lock()


def can_fork() -> bool:
    """Whether ranks may be forked here."""
    import torch

    return sys.platform == "linux" and not torch.cuda.is_available()


@contextlib.contextmanager
def hidden_gpus() -> Iterator[None]:
    """Processes that are started within this block see no GPU: then they may be forked, for ranks on the CPU."""
    before = os.environ.get(_GPUS)
    os.environ[_GPUS] = ""
    try:
        yield
    finally:
        del os.environ[_GPUS]
        if before is not None:
            os.environ[_GPUS] = before


# ── the parent's side ───────────────────────────────────────────────────────────────────────────────────────────────


class ForkServer:
    """Starts ranks by forking a process that has imported `modules`; `module:function` also calls a function of it.

    Several threads of the parent may use it at once.
    """

    def __init__(self, modules: Sequence[str] = NEEDED) -> None:
        self._process: subprocess.Popen[bytes] | Fork
        self._due = 0  # answers that are still to come
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = [str(Path(folder).absolute()) for folder in sys.path]
        imports = "import socket; from microparallel.world.fork_server import serve"
        program = f"{imports}; serve(socket.socket(fileno={theirs.fileno()}), {list(modules)})"
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-c", program],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # no threads: they would not survive a fork
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)},
            process_group=0,
        )
        theirs.close()

    @classmethod
    def of_process(cls, connection: socket.socket, process: Fork) -> ForkServer:
        """Use a fork server that runs already: a process that runs `serve` at the other end of this socket."""
        server = cls.__new__(cls)
        server._socket, server._process, server._due = connection, process, 0
        return server

    def fork(self, command: Sequence[str], *, pass_fds: Sequence[int], env: dict[str, str], **_: object) -> Fork:
        """Start a rank as `subprocess.Popen` does, but by forking the fork server."""
        files = [1, 2, *pass_fds]
        request = {"program": command[-1], "places": files, "environment": env, "folder": str(Path.cwd())}
        with _asking, _adopting_orphans():
            try:
                while self._due:  # to a call that was interrupted; its rank ends by itself, as nobody talks to it
                    self._answer()
                socket.send_fds(self._socket, [json.dumps(request).encode()], files)
                self._due = 2
                pid = self._answer()
                self._answer()  # the process in between has ended, so the rank is a child of this process
            except OSError:
                self._due = 0
                raise LaunchError(
                    "the process that ranks are forked from has ended; its error is printed above"
                ) from None
        return Fork(int(pid))

    def _answer(self) -> bytes:
        answer = self._socket.recv(100)
        if not answer:
            raise ConnectionError
        self._due -= 1
        return answer

    @property
    def pid(self) -> int:
        """The number of the process that forks."""
        return self._process.pid

    def close(self) -> None:
        """End the process that forks."""
        self._socket.close()
        self._process.wait()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Fork:
    """A process that a fork server has forked, with those methods of `subprocess.Popen` that a `RankProcess` needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status of the process; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        """Wait until the process has ended; returns its exit status."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a rank", timeout)
            time.sleep(0.002)
        return code

    def send_signal(self, number: int) -> None:
        """Send the process a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Within this block, processes whose parent ends become children of this process, if they descend from it."""
    before = _takes_orphans()
    take_orphans(True)
    try:
        yield
    finally:
        take_orphans(before)


def take_orphans(wanted: bool) -> None:
    """Whether this process shall become the parent of its descendants whose own parent has ended."""
    ctypes.CDLL(None).prctl(_TAKE_ORPHANS, int(wanted), 0, 0, 0)


def _takes_orphans() -> bool:
    answer = ctypes.c_int()
    ctypes.CDLL(None).prctl(_DOES_IT_TAKE_ORPHANS, ctypes.byref(answer), 0, 0, 0)
    return bool(answer.value)


def wake_when_parent_ends() -> None:
    """Let the system continue this process when its parent ends: if it was stopped, it could not notice, and end, too.

    A process that runs is not disturbed by that signal. Without this the system does so in some cases alone: not if the
    process that takes orphans is in this session, as it is in a container without an init.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SIGNAL_WHEN_PARENT_ENDS, signal.SIGCONT, 0, 0, 0)


# ── in the process that forks, and in the ranks ─────────────────────────────────────────────────────────────────────


def serve(parent: socket.socket, modules: Sequence[str]) -> None:
    """Import what ranks will need, and fork one for every message until the parent closes the socket."""
    wake_when_parent_ends()
    for module in modules:
        name, _, function = module.partition(":")
        imported = importlib.import_module(name)
        if function:
            getattr(imported, function)()
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        sys.exit(f"only a process with a single thread may be forked, and after importing {modules} this has {threads}")
    gc.freeze()  # so that the garbage collector of a rank does not write to, and so copy, memory that it shares
    program = _wait_for_work(parent)
    if program is not None:
        sys.modules["__main__"] = types.ModuleType("__main__")
        run_and_end(lambda: exec(program, sys.modules["__main__"].__dict__))


def run_and_end(function: Callable[[], Any]) -> NoReturn:
    """Run a function as all that a process does, and end the process without Python's clean-up.

    A fork shares its memory with its parent as long as it does not write there. Python's clean-up frees every object of
    every module, torch's too, and so copies all of that memory: 0.3 s for a rank that did nothing. What was registered
    to be called at the end is called, but for finalizers that the parent has made.
    """
    code = 0
    try:
        function()
    except SystemExit as ended:
        if ended.code is not None:
            code = ended.code if isinstance(ended.code, int) else 1
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def _wait_for_work(parent: socket.socket) -> str | None:
    """Fork a rank for every message. Returns the program in a rank, and None here when the parent has ended."""
    with contextlib.suppress(ConnectionError):  # the parent has ended, with or without having read the last answer
        while True:
            message, files, _, _ = socket.recv_fds(parent, 2**20, 8)
            if not message:
                break
            if os.fork() == 0:
                rank = os.fork()
                if rank == 0:
                    parent.close()
                    return _prepare(files, **json.loads(message))
                try:
                    os.setpgid(rank, rank)
                    parent.send(str(rank).encode())
                finally:
                    os._exit(0)
            for file in files:
                os.close(file)
            os.wait()
            parent.send(b"it is yours")
    return None


def _prepare(files: list[int], program: str, places: list[int], environment: dict[str, str], folder: str) -> str:
    """Give this process what `subprocess.Popen` would have: folder, environment, and files under their numbers."""
    for inherited in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        inherited.atexit = False  # the parent's to do: torch would take its kernels out of its tables, and so copy them
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    above = max(*places, *files) + 1  # a place may be taken by a file that has yet to be moved
    for offset, file in enumerate(files):
        os.dup2(file, above + offset)
        os.close(file)
    for offset, place in enumerate(places):
        os.dup2(above + offset, place)
        os.close(above + offset)
    sys.argv = ["-c"]
    return program
