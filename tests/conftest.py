"""Ranks that stay warm for the whole session, and new ones in a moment: starting processes is what costs time here."""

import atexit
import contextlib
import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings

import microparallel as mp
from microparallel.topology import DO_NOT_SPIN

os.environ.setdefault(*DO_NOT_SPIN)  # as the command line does, before torch is imported
# Whenever ranks meet, torch asks the name server who ::ffff:127.0.0.1 is, and waits 5 seconds when no answer comes.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# What ranks write down before a test kills them is left where it can be found, which is no place for tests.
os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="microparallel-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_RUNTIME_DIR"], ignore_errors=True)

# How long an example takes says more about the machine than about the code; pytest's own timeout catches hangs.
settings.register_profile("microparallel", deadline=None)
settings.load_profile("microparallel")


def pytest_addoption(parser):
    words = "run ranks, commands and labs as users do, in new interpreters: each has to import torch"
    parser.addoption("--fresh", action="store_true", help=words)


class Nursery:
    """Starts ranks by forking a process that has imported torch already; see nursery.py."""

    def __init__(self):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-uP", Path(__file__).with_name("nursery.py"), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"},  # no threads: they would not survive a fork
            process_group=0,
        )
        theirs.close()

    def fork(self, command, *, pass_fds, env, **same_for_all):
        """What `subprocess.Popen` does for a rank, without a new interpreter."""
        files = [1, 2, *pass_fds]
        request = {"program": command[-1], "places": files, "environment": env, "folder": str(Path.cwd())}
        with adopting_orphans():
            socket.send_fds(self._socket, [json.dumps(request).encode()], files)
            pid = self._socket.recv(100)
            assert pid, "nursery.py has ended; its error stands above"
            self._socket.recv(100)  # it is ours
        return Fork(int(pid))

    @contextlib.contextmanager
    def starting_ranks(self):
        """Within this block, `mp.launch` and pools start their ranks here."""
        from microparallel.world import rank_process

        with pytest.MonkeyPatch.context() as patch:
            quick = SimpleNamespace(**vars(subprocess) | {"Popen": self.fork})
            patch.setattr(rank_process, "subprocess", quick)
            yield

    def close(self):
        self._socket.close()
        self._process.wait()


class Fork:
    """A process that was forked for us: as much of `subprocess.Popen` as it takes to watch over a rank."""

    def __init__(self, pid):
        self.pid = pid
        self.returncode = None

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout=float("inf")):
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a rank", timeout)
            time.sleep(0.002)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)


@contextlib.contextmanager
def adopting_orphans():
    """Become the parent of what a descendant leaves behind when it ends (PR_SET_CHILD_SUBREAPER, which is 36)."""
    prctl = ctypes.CDLL(None).prctl
    prctl(36, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(36, 0, 0, 0, 0)


class NoNursery:
    """Where ranks cannot be forked (a GPU's driver does not survive it), or should not be."""

    def starting_ranks(self):
        return contextlib.nullcontext()

    def close(self):
        pass


@pytest.fixture(scope="session")
def fresh(request):
    """Whether everything should run in an interpreter of its own."""
    return request.config.getoption("--fresh")


@pytest.fixture(scope="session")
def nursery(fresh):
    import torch

    can_fork = sys.platform == "linux" and not torch.cuda.is_available()
    nursery = Nursery() if can_fork and not fresh else NoNursery()
    yield nursery
    nursery.close()


@pytest.fixture
def quick_ranks(nursery):
    """For tests that launch ranks in this process, and do not ask how these started."""
    with nursery.starting_ranks():
        yield


@pytest.fixture(scope="session")
def warm_ranks(nursery):
    class WarmRanks(mp.Pool):
        def run(self, *arguments, **named_arguments):
            with nursery.starting_ranks():
                return super().run(*arguments, **named_arguments)

    with WarmRanks() as ranks:
        yield ranks


class CpuPool:
    """Warm ranks on the CPU, also where there is a GPU, that talk over one transport unless a test says otherwise."""

    def __init__(self, ranks, transport):
        self._ranks = ranks
        self._transport = transport

    def run(self, function, ranks, *arguments, **named_arguments):
        defaults = {"transport": self._transport, "device": "cpu"}
        return self._ranks.run(function, ranks, *arguments, **defaults | named_arguments)


@pytest.fixture(scope="session")
def pool(warm_ranks):
    return CpuPool(warm_ranks, "gloo")


@pytest.fixture(scope="session", params=["gloo", "shm"])
def any_pool(request, warm_ranks):
    """For what must hold on every transport."""
    return CpuPool(warm_ranks, request.param)
