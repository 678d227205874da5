"""Ranks that stay warm for the whole session, and new ones in a moment: starting processes is what costs time here."""

import atexit
import contextlib
import gc
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings
from tests.on_gpu import on_gpu, without_device
from tests.pairwise import take_turns

import microparallel as mp
from microparallel.cli.app import VERBS
from microparallel.topology import BEFORE_TORCH
from microparallel.topology.hosts import MIXED, Hosts, transport_between
from microparallel.world.fork_server import NEEDED, ForkServer, can_fork

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background, where Ctrl-C means nothing
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.update(BEFORE_TORCH | os.environ)  # as the command line does, before torch is imported
# Whenever ranks meet, torch asks the name server who ::ffff:127.0.0.1 is, and waits 5 seconds when no answer comes.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# What ranks write down before a test kills them is left where it can be found, which is no place for tests. Ranks
# import this file as well, with the tests' functions that they run, and have the folder of the process that tests.
WHO_TESTS = os.environ.get("PYTEST_XDIST_WORKER", "alone")
if os.environ.get("MICROPARALLEL_WHO_TESTS") != WHO_TESTS:
    os.environ["MICROPARALLEL_WHO_TESTS"] = WHO_TESTS
    os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="microparallel-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_RUNTIME_DIR"], ignore_errors=True)

sys.path.append(str(Path(__file__).parents[1] / "docs" / "tools"))
import torch  # noqa: E402
from commands import forking, meeting_of, program_of  # noqa: E402

# How long an example takes says more about the machine than about the code; pytest's own timeout catches hangs.
settings.register_profile("microparallel", deadline=None)
settings.load_profile("microparallel")


def pytest_addoption(parser):
    words = "run ranks, commands and labs as users do, in new interpreters: each has to import torch"
    parser.addoption("--fresh", action="store_true", help=words)


SERVER = pytest.StashKey["SharedForkServer"]()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Collect without the garbage collector, which would go through ten thousand tests again and again.

    Then start what ranks are forked from, if any test needs it, and wait for it: on a busy machine that takes longer
    than a test may.
    """
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    config = session.config
    used = any("fork_server" in getattr(item, "fixturenames", ()) for item in getattr(session, "items", ()))
    if used and can_fork() and not config.getoption("--fresh") and not config.option.collectonly:
        config.stash[SERVER] = SharedForkServer(WARM)
        config.stash[SERVER].fork(["pass"], pass_fds=[], env=dict(os.environ)).wait()
    return result


@pytest.hookimpl(tryfirst=True)  # before slow tests are left out
def pytest_collection_modifyitems(items):
    take_turns(items)


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


class SharedForkServer(ForkServer):
    """Also serves pools and referees that were made without one, while it is asked to."""

    @contextlib.contextmanager
    def starting_ranks(self):
        """Within this block, `mp.launch` and pools start their ranks here, and learners' answers are judged here."""
        from microparallel.learn import checking
        from microparallel.world import rank_process

        with pytest.MonkeyPatch.context() as patch:
            for module in (rank_process, checking):
                patch.setattr(module, "subprocess", forking(self))
            yield


class NoForkServer:
    """Where ranks cannot be forked (a GPU's driver does not survive it), or should not be."""

    def starting_ranks(self):
        return contextlib.nullcontext()

    def close(self):
        pass


@pytest.fixture(autouse=True)
def one_thread():
    """Models as small as those of the tests only wait for a second thread, and on a busy machine they wait long."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def fresh(request):
    """Whether everything should run in an interpreter of its own."""
    return request.config.getoption("--fresh")


# What is imported once for all: the loop, and with it torch and all that ranks need; what commands need.
WARM = ["microparallel.train.loop", *NEEDED, *(f"microparallel.cli.{verb}" for verb in VERBS)]
WARM += [
    "microparallel.learn.referee",
    "microparallel.learn.exam",
    "microparallel.learn.sandbox:load",
    "typer.rich_utils",
]
# Newer versions of typer import it for every call.
WARM += (
    ["pydantic.type_adapter", "pydantic.types", "pydantic.json_schema"] if importlib.util.find_spec("pydantic") else []
)
WARM += ["pytest", "hypothesis"]  # files with tests, whose functions run on ranks
WARM += ["tests.huge_pages:join"]  # at last, when all the memory is there


@pytest.fixture(scope="session")
def fork_server(request):
    fork_server = request.config.stash.get(SERVER, NoForkServer())
    yield fork_server
    fork_server.close()


@pytest.fixture
def quick_ranks(fork_server):
    """For tests that launch ranks in this process, and do not ask how these started."""
    with fork_server.starting_ranks():
        yield


@pytest.fixture(scope="session")
def warm_ranks(fork_server):
    class WarmRanks(mp.Pool):
        forks = not isinstance(fork_server, NoForkServer)

        def run(self, *arguments, **named_arguments):
            with fork_server.starting_ranks():
                return super().run(*arguments, **named_arguments)

    with WarmRanks() as ranks:
        yield ranks


class Command:
    """A process that runs a command, and what it has printed so far."""

    def __init__(self, process, output, errors):
        self._process, self._output, self._errors = process, output, errors
        self.pid, self.poll, self.wait = process.pid, process.poll, process.wait

    @property
    def output(self):
        return self._output.read_text("utf-8")

    @property
    def errors(self):
        return self._errors.read_text("utf-8")

    def close(self):
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.wait()


@pytest.fixture
def start(fork_server, tmp_path, tmp_path_factory):
    """Start `microparallel …` or `python script.py …` in a process of its own, which need not import torch again."""
    started = []

    def start(*words, module=(), **environment):
        words = [str(word) for word in words]
        environment = os.environ | {name: str(value) for name, value in environment.items()}
        output, errors = (tmp_path_factory.mktemp("printed") / name for name in ("output", "errors"))
        with contextlib.chdir(tmp_path), output.open("wb") as first, errors.open("wb") as second:
            if isinstance(fork_server, NoForkServer) or module:
                command = ["-m", *words] if words[0] == "microparallel" else words[1:]
                process = subprocess.Popen(
                    [sys.executable, *module, *command],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=first,
                    stderr=second,
                    process_group=0,
                )
            else:
                process = fork_server.fork([program_of(words, output, errors)], pass_fds=[], env=environment)
        started.append(Command(process, output, errors))
        return started[-1]

    yield start
    for command in started:
        command.close()


@pytest.fixture
def torchrun(start, fork_server):
    """Run a command on ranks as torchrun starts them; with --fresh, torchrun itself starts them, as in the lessons."""

    def run(ranks, *words):
        if isinstance(fork_server, NoForkServer):
            module = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
            commands = [start(*words, module=module)]
        else:
            with meeting_of(ranks) as environments:
                commands = [start(*words, **variables) for variables in environments]
                for command in commands:
                    command.wait(55)
        code = max((command.wait(55) for command in commands), key=abs)
        printed = ("".join(getattr(command, name) for command in commands) for name in ("output", "errors"))
        return subprocess.CompletedProcess(words, code, *printed)

    return run


class CpuPool:
    """Warm ranks on the CPU, also where there is a GPU, that talk over one transport unless a test says otherwise."""

    def __init__(self, ranks, transport):
        self._ranks = ranks
        self._transport = transport
        self.shares_evenly = transport != MIXED  # on hosts that are not alike, some ranks send more than others

    def run(self, function, ranks, *arguments, **named_arguments):
        defaults = {"transport": self._transport, "device": "cpu"}
        if self._transport == MIXED:  # as on hosts with two ranks each
            defaults["transport"] = transport_between(Hosts.alike(ranks, 2 if ranks > 2 else 1))
        return self._ranks.run(function, ranks, *arguments, **defaults | named_arguments)


@pytest.fixture(scope="session")
def pool(warm_ranks):
    """For tests that do not ask how messages travel: through shared memory, which costs the system less than gloo."""
    return CpuPool(warm_ranks, "shm")


class GpuPool(CpuPool):
    """Warm ranks that share the GPU, on which everything is made that a test does not put elsewhere.

    Without MPS, unless the environment says so: several pools at a time would each start a daemon.
    """

    def run(self, function, ranks, *arguments, **named_arguments):
        named_arguments = {"device": "cuda", "mps": os.environ.get("TEST_MPS", "off")} | named_arguments
        try:
            return super().run(on_gpu, ranks, function, *arguments, **named_arguments)
        except mp.errors.RankFailed as error:
            error.reason, error.args = without_device(error.reason), tuple(map(without_device, map(str, error.args)))
            raise


ON_ONE_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="ranks that share a GPU need one")


@pytest.fixture(
    scope="session",
    params=["gloo", "shm", pytest.param(MIXED, marks=pytest.mark.slow), pytest.param("cuda", marks=ON_ONE_GPU)],
)
def any_pool(request, warm_ranks):
    """For what must hold on every transport."""
    return (GpuPool if request.param == "cuda" else CpuPool)(warm_ranks, request.param)
