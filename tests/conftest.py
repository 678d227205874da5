"""Ranks that stay warm for the whole session, and new ones in a moment: starting processes is what costs time here."""

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import settings

import microparallel as mp
from microparallel.topology import DO_NOT_SPIN
from microparallel.world.nursery import NEEDED, Nursery, can_fork

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background, where Ctrl-C means nothing
    signal.signal(signal.SIGINT, signal.default_int_handler)
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


def pytest_terminal_summary(terminalreporter):
    """Say what was skipped, and why: the reason names the command that enables it."""
    reasons = Counter(report.longrepr[2] for report in terminalreporter.getreports("skipped"))
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"skipped {count}: {reason.removeprefix('Skipped: ')}")


@pytest.fixture(scope="session")
def chromium():
    """The browser that is installed here."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip("no browser to look at pages with; `apt-get install chromium` enables these tests")
    return found


class SharedNursery(Nursery):
    """Also serves pools that were made without one, while it is asked to."""

    @contextlib.contextmanager
    def starting_ranks(self):
        """Within this block, `mp.launch` and pools start their ranks here."""
        from microparallel.world import rank_process

        with pytest.MonkeyPatch.context() as patch:
            quick = SimpleNamespace(**vars(subprocess) | {"Popen": self.fork})
            patch.setattr(rank_process, "subprocess", quick)
            yield


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
    # the loop, and with it torch and all that a rank of any test needs
    nursery = SharedNursery(["microparallel.train.loop", *NEEDED]) if can_fork() and not fresh else NoNursery()
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
