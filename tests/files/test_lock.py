"""A folder is locked by one process, and never by one that has ended."""

import os
import signal
import subprocess
import sys

import pytest

from microparallel.errors import ConfigError
from microparallel.files.lock import FolderLock

HOLDS = """
import sys
from pathlib import Path
from microparallel.files.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]), "it")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock."""
    command = [sys.executable, "-c", HOLDS, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_who_holds_it_is_named(tmp_path, holder):
    with pytest.raises(ConfigError, match=rf"^runs/x is in use by process {holder.pid} on \S+ \(since "):
        FolderLock(tmp_path / "lock", "runs/x")


def test_a_holder_that_was_killed_holds_nothing(tmp_path, holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "lock").exists()
    FolderLock(tmp_path / "lock", "runs/x").release()
    assert not (tmp_path / "lock").exists()


def test_a_child_does_not_inherit_it(tmp_path):
    """A worker that loads data, forked by the holder, may live a moment longer."""
    lock = FolderLock(tmp_path / "lock", "runs/x")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        lock.release()
        other = [sys.executable, "-c", HOLDS, str(tmp_path / "lock")]
        assert subprocess.run(other, input="", capture_output=True, text=True, timeout=30, check=True).stdout
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)
