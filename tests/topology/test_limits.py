"""The limits that the system sets to a process: which one is behind an error."""

import errno
import resource

import pytest

from microparallel.errors import LaunchError
from microparallel.topology import limits


@pytest.fixture
def addresses(monkeypatch):
    """A limit of 4 GB of addresses; nothing really is refused."""
    real = limits._limit
    monkeypatch.setattr(limits, "_limit", lambda name: 4 * 10**9 if name == "RLIMIT_AS" else real(name))


def test_too_many_open_files_by_number_and_by_text():
    for error in (OSError(errno.EMFILE, "x"), RuntimeError("socket: Too many open files")):
        line = limits.limit_behind(error)
        assert "files open (ulimit -n), and more are needed; raise it: ulimit -n" in line and "\n" not in line


@pytest.mark.usefixtures("addresses")
@pytest.mark.parametrize(
    ("error", "needed"),
    [
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "needs more;"),
        (MemoryError(), "needs more;"),
        (RuntimeError("can't start new thread"), "needs those of one more thread;"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "needs more;"),
        (
            RuntimeError("can't allocate memory: you tried to allocate 9000000 bytes. Error code 12"),
            "needs 9,000,000 bytes more;",
        ),
    ],
)
def test_too_few_addresses(error, needed):
    line = limits.limit_behind(error)
    assert line.startswith("this process may have 4 GB of addresses (ulimit -v 3906250), has ")
    assert needed in line and line.endswith("raise it: ulimit -v unlimited")


@pytest.mark.usefixtures("addresses")
def test_the_cause_of_an_error_counts():
    try:
        raise ValueError("no") from MemoryError()
    except ValueError as error:
        assert "ulimit -v" in limits.limit_behind(error)


def test_other_errors_and_memory_without_a_limit_are_left_alone(monkeypatch):
    monkeypatch.setattr(limits, "_limit", lambda name: None)
    for error in (ValueError("no"), MemoryError(), OSError(errno.ENOENT, "no such file"), None):
        assert limits.limit_behind(error) is None


def test_the_process_raises_its_own_limit_where_it_may():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = limits._open_files() + 2
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, before[1]))
        limits.require_files(10)
        assert few < resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= few + 16
        if before[1] != resource.RLIM_INFINITY:
            with pytest.raises(LaunchError, match=r"\(ulimit -n\), and about [\d,]+ are needed; raise it: ulimit -n"):
                limits.require_files(before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
