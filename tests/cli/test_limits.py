"""Limits of the system (`ulimit`) that are too low for a run are said in one line."""

import subprocess
import sys

import pytest

TRAIN = ["-m", "microparallel", "train", "--ranks", "2", "--steps", "2", "--quiet", "--out"]


def train_under(limit, folder):
    words = " ".join([sys.executable, *TRAIN, str(folder)])
    return subprocess.run(["bash", "-c", f"{limit}; {words}"], capture_output=True, text=True, timeout=55)


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("ulimit -n 40", "this process may have 40 files open (ulimit -n), and about"),
        pytest.param(
            "ulimit -n 14", "this process may have 14 files open (ulimit -n), and about", marks=pytest.mark.slow
        ),
        ("ulimit -v 400000", "this process may have 409.6 MB of addresses (ulimit -v 400000), has"),
        pytest.param(
            "ulimit -v 800000",
            "this process may have 819.2 MB of addresses (ulimit -v 800000), has",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_too_low(limit, said, tmp_path):
    ended = train_under(limit, tmp_path / "run")
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"error: {said}") and "raise it: ulimit" in line


@pytest.mark.slow
def test_enough(tmp_path):
    """Shared memory takes addresses for what is sent, and not for all memory of the machine."""
    ended = train_under("ulimit -n 64; ulimit -v 4000000", tmp_path / "run")
    assert ended.returncode == 0, ended.stderr
