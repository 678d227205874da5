"""Whole runs: what they leave behind, and how they go on."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import microparallel as mp
from microparallel.train import checkpoint
from microparallel.train.config import TrainConfig
from microparallel.train.loop import train_on_rank as train


def configuration(out, **changes):
    settings = {"out": str(out), "dim": 32, "depth": 4, "batch": 300, "steps": 8, "save_every": 3, "ranks": 2}
    return TrainConfig(**settings | changes)


def losses(folder):
    records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


def run(pool, config, resume=None):
    return pool.run(train, config.ranks, config, resume, True, timeout=50)[0]


@pytest.fixture(scope="module")
def whole_run(pool, tmp_path_factory):
    """A run from its first step to its last."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    return out, run(pool, configuration(out))


def test_what_a_run_leaves_behind(whole_run):
    out, summary = whole_run
    assert {path.name for path in out.iterdir()} == {"config.toml", "metrics.jsonl", "summary.json", "checkpoints"}
    assert json.loads((out / "summary.json").read_text()) == summary
    assert summary["steps"] == 8 and summary["replicas_identical"] and not summary["stopped_early"]
    assert 0 <= summary["validation_accuracy"] <= 1
    assert len(losses(out)) == 8
    names = sorted(path.name for path in (out / "checkpoints").glob("step-*"))
    assert names == ["step-00000003", "step-00000006", "step-00000008"]
    files = {path.suffix for path in (out / "checkpoints" / names[0]).iterdir()}
    assert files == {".safetensors", ".json"}  # never pickle


@pytest.mark.parametrize("damage", [False, True])
def test_resuming_repeats_the_losses_bit_for_bit(pool, whole_run, tmp_path, damage):
    """As if the run had been killed after step 7, with its newest checkpoint whole or damaged."""
    out, summary = whole_run
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    shutil.rmtree(copy / "checkpoints" / "step-00000008")
    if damage:
        weights = copy / "checkpoints" / "step-00000006" / "part-00001.safetensors"
        weights.write_bytes(weights.read_bytes()[:-5] + b"\0" * 5)
    resumed = run(pool, configuration(out), resume=copy)
    assert losses(copy) == losses(out)
    assert resumed["loss"] == summary["loss"]
    assert resumed["validation_loss"] == summary["validation_loss"]


def test_a_finished_run_stays_as_it_is_and_can_be_made_longer(pool, whole_run, tmp_path):
    out, summary = whole_run
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    again = run(pool, configuration(out), resume=copy)
    for name in ("steps", "loss", "validation_loss"):
        assert again[name] == summary[name]
    assert losses(copy) == losses(out)
    longer = run(pool, configuration(out, steps=10), resume=copy)
    assert longer["steps"] == 10 and len(losses(copy)) == 10
    assert "steps = 10" in (copy / "config.toml").read_text()


def test_resuming_with_dropout_and_another_order_of_epochs(pool, tmp_path):
    """The random state of every rank and the position in the middle of an epoch are part of a checkpoint."""
    settings = {
        "model": f"{__name__}:with_dropout",
        "data": "digits",
        "dim": None,
        "depth": None,
        "loss": "cross-entropy",
    }
    whole = run(pool, configuration(tmp_path / "whole", **settings))
    first = run(pool, configuration(tmp_path / "parts", **settings | {"steps": 4}))
    assert first["steps"] == 4
    run(pool, configuration(tmp_path / "parts", **settings), resume=tmp_path / "parts")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert len(set(losses(tmp_path / "whole"))) == 8
    assert whole["replicas_identical"]


def with_dropout():
    from torch import nn

    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10))


def test_resuming_with_another_number_of_ranks(pool, whole_run, tmp_path):
    out, _ = whole_run
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    shutil.rmtree(copy / "checkpoints" / "step-00000008")
    run(pool, configuration(out, ranks=3), resume=copy)
    assert losses(copy) == pytest.approx(losses(out), rel=1e-4)


def explodes():
    from torch import nn

    class Explodes(nn.Linear):
        def forward(self, inputs):
            raise RuntimeError("deliberate")

    return Explodes(64, 10)


def test_nothing_is_left_behind_when_the_first_step_fails(pool, tmp_path):
    settings = {"model": f"{__name__}:explodes", "data": "digits", "dim": None, "depth": None, "ranks": 1}
    with pytest.raises(mp.errors.RankFailed, match="deliberate"):
        run(pool, configuration(tmp_path / "out", **settings))
    assert not (tmp_path / "out").exists()


def test_speed_counts_the_samples_there_are(pool, tmp_path):
    """1438 samples in batches of 1000: the second step has 438."""
    summary = run(pool, configuration(tmp_path / "out", batch=1000, steps=2, ranks=1))
    assert summary["samples_per_second"] * summary["seconds"] == pytest.approx(1438, rel=0.2)  # not 2000


class UsedInAnotherOrder(torch.nn.Module):
    """DDP arranges its buckets anew when it has seen in which order gradients come."""

    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(32, 10)
        self.first, self.normed = torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(32)
        self.dropout = torch.nn.Dropout(0.2)

    def forward(self, inputs):
        return self.last(self.dropout(self.normed(self.first(inputs)).tanh()))


def test_torchs_ddp_on_three_ranks_goes_on_bit_for_bit(pool, tmp_path):
    settings = {"model": f"{__name__}:UsedInAnotherOrder", "data": "digits", "dim": None, "depth": None}
    settings |= {"strategy": "torch-ddp", "ranks": 3, "save_every": 1}
    run(pool, configuration(tmp_path / "whole", steps=6, **settings))
    for steps in (2, 3, 6):
        run(pool, configuration(tmp_path / "run", steps=steps, **settings), "auto")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    ended = [checkpoint.latest(tmp_path / name / "checkpoints")[0].model for name in ("whole", "run")]
    assert all(torch.equal(ended[1][name], one) for name, one in ended[0].items())
