"""The fixture `hosts`: several machines inside this one, where that is permitted (`bed.py`)."""

import os
from pathlib import Path

import pytest
from tests.hosts.bed import Bed, starter, why_not


@pytest.fixture
def hosts(fork_server, tmp_path, tmp_path_factory, monkeypatch):
    """`hosts(2)`: a bed of that many hosts, which is removed after the test. Processes start in `tmp_path`.

    With `own_files=True`, each host has `tmp_path` and the folder of flight recorders for itself, else all share them.
    With `ahead=1000`, each host's monotonic clock shows so many seconds more than that of the host before.
    """
    if reason := why_not():
        pytest.skip(reason)
    for name in os.environ:
        if name.startswith(("SLURM", "MASTER", "GLOO", "NCCL", "TORCHELASTIC")):
            monkeypatch.delenv(name)
    printed = tmp_path_factory.mktemp("printed")
    start, beds = starter(fork_server, tmp_path, printed), []

    def make(count, *, own_files=False, ahead=0):
        private = [tmp_path, Path(os.environ["XDG_RUNTIME_DIR"])] if own_files else []
        beds.append(Bed(count, start, private, ahead))
        return beds[-1]

    yield make
    for running in start.started:
        running.close()
    for bed in beds:
        bed.close()
