"""Metrics also go to TensorBoard and wandb, where these are installed; a log that fails costs nothing but its line."""

import sys
import types
from pathlib import Path

import pytest

from microparallel.errors import ConfigError
from microparallel.train.config import TrainConfig
from microparallel.train.logs import Logs, require_installed
from microparallel.train.loop import train_on_rank as train

SETTINGS = {"dim": 8, "depth": 2, "batch": 700, "validate_every": 2, "schedule_lr": "constant"}


class FakeWandb(types.ModuleType):
    """As much of wandb as is used."""

    def __init__(self):
        super().__init__("wandb")
        self.started, self.logged, self.finished = [], [], 0

    def init(self, **settings):
        self.started.append(settings)
        return self

    def log(self, numbers, step):
        self.logged.append((step, numbers))

    def finish(self):
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


@pytest.fixture
def alone():
    import microparallel as mp

    with mp.connect("gloo", device="cpu") as comms:
        yield comms


def scalars(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_has_the_numbers_of_metrics_jsonl_after_a_resume_too(alone, tmp_path):
    pytest.importorskip("tensorboard")
    out = tmp_path / "run"
    train(alone, TrainConfig(out=str(out), steps=3, log="tensorboard", **SETTINGS).resolved(), None, True)
    longer = TrainConfig(out=str(out), steps=5, log="tensorboard", **SETTINGS).resolved()
    summary = train(alone, longer, out, True)
    found = scalars(out / "tensorboard")
    assert [step for step, _ in found["loss"]] == [1, 2, 3, 4, 5]
    assert found["loss"][-1][1] == pytest.approx(summary["loss"])
    assert [step for step, _ in found["validation_accuracy"]] == [2, 3, 4, 5]
    assert {"samples_per_second", "epoch", "validation_loss"} <= found.keys()


def test_wandb_gets_the_run_and_its_numbers(alone, wandb, tmp_path):
    out = tmp_path / "mine"
    train(alone, TrainConfig(out=str(out), steps=2, log="wandb", **SETTINGS).resolved(), None, True)
    [started] = wandb.started
    assert (started["project"], started["id"], started["resume"]) == ("microparallel", "mine", "allow")
    assert started["config"]["batch"] == 700 and Path(started["dir"]) == out
    assert [(step, "loss" in numbers) for step, numbers in wandb.logged] == [(1, True), (2, True), (2, False)]
    assert wandb.finished == 1


def test_a_log_that_fails_is_left_out_with_one_line(wandb, tmp_path):
    def gone(numbers, step):
        raise ConnectionError("the network\nis gone")

    wandb.log = gone
    notes = []
    logs = Logs(tmp_path, TrainConfig(log="wandb"), 0, notes.append)
    for step in (1, 2):
        logs.write({"step": step, "loss": 1.0})
    logs.close()
    assert notes == ["warning: --log wandb failed (ConnectionError: the network); metrics.jsonl has everything"]


def test_what_is_not_a_finite_number_is_not_logged(wandb, tmp_path):
    logs = Logs(tmp_path, TrainConfig(log="wandb"), 0, print)
    logs.write({"step": 3, "loss": float("nan"), "validation_accuracy": None, "epoch": 1})
    assert wandb.logged == [(3, {"epoch": 1.0})]


def test_a_missing_package_is_refused_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in ("tensorboard", "wandb"):
        with pytest.raises(ConfigError, match=f"--log {name}: the package {name} is not installed; pip install {name}"):
            require_installed(name)
    require_installed(None)
