"""Asking nvidia-smi how busy a GPU is: with one that answers, one that fails, and none."""

import contextlib
import sys
import threading
from pathlib import Path

import pytest

import microparallel as mp
from microparallel.analyze.gpu_meter import GpuMeter, Sample

FOREVER = """
import itertools, os, sys, time
print(" ".join(sys.argv[1:]), file=open(__file__ + ".arguments", "w"))
print(os.getpid(), file=open(__file__ + ".pid", "w"))
for percent in itertools.cycle([40, 60]):
    print(f"{percent}, 1024", flush=True)
    time.sleep(0.001)
"""


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Put a script of this name on the PATH, and nothing else."""
    monkeypatch.setenv("PATH", str(tmp_path))
    script = tmp_path / "nvidia-smi"

    def write(program):
        script.write_text(f"#!{sys.executable} -S\n{program}")
        script.chmod(0o755)
        return script

    return write


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def wait_for_samples(meter, least=10):
    """Until the reader has seen so many; the test's own time limit is the watchdog."""
    while len(meter.samples) < least:
        threading.Event().wait(0.001)


def status(script):
    """Where the kernel tells of the process that ran a script; a zombie still has one."""
    return Path(f"/proc/{Path(f'{script}.pid').read_text().strip()}/status")


def gone(script):
    return not status(script).exists()


def test_samples_while_the_block_runs(nvidia_smi):
    script = nvidia_smi(FOREVER)
    with GpuMeter(index=3, interval=0.02) as meter:
        wait_for_samples(meter)
    assert set(meter.samples) == {Sample(40, 1024), Sample(60, 1024)}
    assert 40 < meter.mean < 60
    assert meter.problem is None
    assert gone(script)
    query = "--query-gpu=utilization.gpu,memory.used --format=csv,noheader,nounits -lms 20 -i 3\n"
    assert Path(f"{script}.arguments").read_text() == query


def test_nothing_is_left_when_the_block_raises(nvidia_smi):
    script = nvidia_smi(FOREVER)
    with pytest.raises(ZeroDivisionError), GpuMeter() as meter:
        1 / 0  # noqa: B018
    assert gone(script)
    assert meter.mean is None or 40 <= meter.mean <= 60


def test_one_that_does_not_end_when_asked_to(nvidia_smi):
    script = nvidia_smi("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FOREVER)
    with GpuMeter() as meter:
        wait_for_samples(meter)
    assert gone(script)


def test_one_that_starts_another_process(nvidia_smi):
    script = nvidia_smi(f"import subprocess, sys\nif 'again' not in sys.argv:\n"
                        f"    subprocess.run([sys.executable, '-S', __file__, 'again'])\nelse:\n"
                        f"    exec({FOREVER!r})\n")  # fmt: skip
    with GpuMeter() as meter:
        wait_for_samples(meter)
    # An orphan ends without us, and its new parent may leave it a zombie: wait until it is no more than that.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while "(zombie)" not in status(script).read_text():
            threading.Event().wait(0.001)


def test_one_that_fails(nvidia_smi):
    nvidia_smi("print('NVIDIA-SMI has failed because it could not talk to the driver.')\nraise SystemExit(9)\n")
    with GpuMeter() as meter:
        pass
    assert meter.samples == []
    assert meter.mean is None
    assert meter.problem == (
        "nvidia-smi gave no numbers: NVIDIA-SMI has failed because it could not talk to the driver."
    )


def test_one_that_says_nothing(nvidia_smi):
    nvidia_smi("")
    with GpuMeter() as meter:
        pass
    assert meter.mean is None
    assert meter.problem == "nvidia-smi gave no numbers: it said nothing"


def test_none_at_all(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with GpuMeter() as meter:
        pass
    assert meter.mean is None
    assert meter.problem == "nvidia-smi cannot be run: No such file or directory"


def test_a_gpu_that_does_not_tell(nvidia_smi):
    """Parts of a GPU (MIG) have no utilisation, and where memory is the machine's, no memory of their own."""
    nvidia_smi(FOREVER.replace("{percent}, 1024", "[N/A], [N/A]"))
    with GpuMeter() as meter:
        pass
    assert meter.mean is None
    assert meter.problem == "nvidia-smi gave no numbers: [N/A], [N/A]"
    nvidia_smi(FOREVER.replace("1024", "[N/A]"))
    with meter:
        wait_for_samples(meter)
    assert set(meter.samples) == {Sample(40, None), Sample(60, None)}
    assert meter.problem is None


def test_too_short_a_time(nvidia_smi):
    nvidia_smi("import time\nprint('7, 1', flush=True)\ntime.sleep(60)\n")
    with GpuMeter() as meter:
        pass
    assert meter.mean is None
    assert meter.problem == "nvidia-smi gave no sample in this time; measure for longer"


def test_explains_in_one_line_why_the_number_flatters():
    assert "at least one kernel ran, however small" in GpuMeter.explain()
    assert "add up to one number" in GpuMeter.explain()
    assert "\n" not in GpuMeter.explain()


@pytest.mark.parametrize("wrong", [{"index": -1}, {"interval": 0}, {"interval": float("nan")}])
def test_a_wrong_call(wrong):
    with pytest.raises(mp.errors.UsageError, match="index from 0"):
        GpuMeter(**wrong)
