"""What the launcher does when it is told to stop: its ranks save first, however long that takes, or end at once."""

import os
import signal
import time
from pathlib import Path

import pytest

from microparallel.cli.train import _say_what_is_lost

MODEL = """
import time
from pathlib import Path
import torch

class SlowToSave(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, 10))

    def get_extra_state(self):  # called by each save
        if (seconds := Path("seconds")).exists():
            Path("saves-slowly").touch()
            time.sleep(float(seconds.read_text()))
            Path("saved-slowly").touch()
        return torch.zeros(1)

    def set_extra_state(self, state):
        pass

def make_model(): return SlowToSave()
"""
# The launcher speaks after each half second instead of each ten.
PROGRAM = """
import importlib, os, sys
sys.path.insert(0, os.getcwd())
importlib.import_module("microparallel.world.launch")._SAY_WHO_IS_BUSY = 0.5
from microparallel.cli import main
main()
"""


@pytest.fixture
def training(tmp_path, start):
    """A run of two ranks that has begun, and whose next save takes as many seconds as the argument says."""
    (tmp_path / "slow_to_save.py").write_text(MODEL)
    (tmp_path / "program.py").write_text(PROGRAM)

    def begin(seconds, *, ranks=2):
        flags = ["--ranks", ranks, "--steps", 1_000_000, "--batch", 20, "--save-every", 1_000_000]
        model = ["--model", "slow_to_save:make_model", "--data", "digits"]
        process = start("python", "program.py", "train", *model, *flags, "--out", "run", "--quiet")
        metrics = tmp_path / "run" / "metrics.jsonl"
        deadline = time.monotonic() + 40
        while not (metrics.exists() and metrics.read_text().count("\n") > 20):
            assert time.monotonic() < deadline and process.poll() is None, process.errors
            time.sleep(0.02)
        (tmp_path / "seconds").write_text(str(seconds))
        return process

    return begin


def steps_saved(folder):
    return sorted(int(path.name[5:]) for path in (folder / "run" / "checkpoints").glob("step-*"))


def steps_done(folder):
    return (folder / "run" / "metrics.jsonl").read_text().count('"loss"')


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_the_ranks_save_first_however_long_that_takes(tmp_path, training, number):
    process = training(2.0)
    begun = time.monotonic()
    os.kill(process.pid, number)
    assert process.wait(20) == 130
    seconds = time.monotonic() - begun
    assert (tmp_path / "saved-slowly").exists()
    assert steps_saved(tmp_path)[-1] == steps_done(tmp_path)
    told = [line for line in process.errors.splitlines() if line.startswith("waiting for rank")]
    assert 2 <= len(told) <= seconds / 0.5, process.errors  # each half second: a copy may have begun before the save
    assert told[0] == "waiting for ranks 0, 1 to stop; Ctrl-C again ends them at once"
    assert "Traceback" not in process.errors and "kept in run" in process.output


def test_a_second_interrupt_ends_the_ranks_at_once_and_says_what_is_lost(tmp_path, training):
    process = training(100.0)
    before = steps_saved(tmp_path)
    os.kill(process.pid, signal.SIGINT)
    deadline = time.monotonic() + 10
    while "waiting for ranks" not in process.errors:
        assert time.monotonic() < deadline, process.errors
        time.sleep(0.02)
    again = time.monotonic()
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(10) == 130
    assert time.monotonic() - again < 5
    kept = steps_saved(tmp_path)[-1]  # a copy in memory is saved, if there was one
    assert before[-1] <= kept < steps_done(tmp_path)
    assert process.errors.splitlines()[-1] == (
        f"ended at once; what was done after step {kept} is lost; go on with: microparallel train --resume run"
    )
    assert "Traceback" not in process.errors


def test_a_second_interrupt_ends_a_single_rank(tmp_path, training):
    process = training(100.0, ranks=1)
    os.kill(process.pid, signal.SIGINT)
    deadline = time.monotonic() + 20
    while not (tmp_path / "saves-slowly").exists():
        assert process.poll() is None and time.monotonic() < deadline, process.errors
        time.sleep(0.02)
    kept = steps_saved(tmp_path)[-1]  # there may have been a validation, before which a run saves
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(10) == 130
    assert f"ended at once; what was done after step {kept} is lost" in process.errors
    assert "Traceback" not in process.errors


def test_a_save_that_fails_after_an_interrupt_is_said(training):
    process = training(-1.0)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(20) == 1
    assert "raised ValueError: sleep length must be non-negative" in process.errors
    assert "ended at once" not in process.errors


def test_a_second_interrupt_after_the_last_save_loses_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "checkpoints" / "step-00000008").mkdir(parents=True)
    (tmp_path / "run" / "config.toml").touch()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 8, "loss": 1.0}\n')
    _say_what_is_lost(Path("run"))
    said = capsys.readouterr().err
    assert said.startswith("ended at once; step 8 is saved, and nothing is lost; go on with: ") and "\n" in said
