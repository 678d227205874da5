"""`--precision`: a run computes in 16 bits, keeps its parameters in 32, and goes on bit for bit."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from microparallel.errors import ConfigError, RankFailed
from microparallel.train.build import build
from microparallel.train.config import TrainConfig, read_config
from microparallel.train.loop import train_on_rank as train


def configuration(**changes):
    settings = {
        **{"batch": 90, "steps": 6, "lr": 0.01, "schedule_lr": "constant", "validate_every": 100},
        **({} if "model" in changes else {"dim": 16, "depth": 3}),
    }
    return TrainConfig(**settings | changes).resolved()


def run(pool, config, resume=None):
    return pool.run(train, config.world_size, config, resume, True, timeout=50)[0]


def records_of(folder):
    records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [{name: one for name, one in record.items() if name != "samples_per_second"} for record in records]


class Louder(nn.Module):
    """Makes gradients large enough to overflow with the first loss scale."""

    def forward(self, inputs):
        return inputs * 8


def layers():
    return nn.Sequential(nn.Linear(64, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(0.3), nn.Linear(12, 10), Louder())


@pytest.mark.in_turn
@pytest.mark.parametrize("shard", [None, "optimizer", "gradients", "parameters"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_run_goes_on_bit_for_bit(pool, tmp_path, precision, shard):
    """In float16 steps are skipped before the checkpoint, so the scale that it keeps is another than at first."""
    settings = {"shard": shard, "ranks": 2, "precision": precision, "model": f"{__name__}:layers", "data": "digits"}
    settings |= {"clip": 0.5, "accumulate": 2, "lr": 1.0, "optimizer": "sgd"}
    run(pool, configuration(out=str(tmp_path / "whole"), **settings))
    run(pool, configuration(out=str(tmp_path / "parts"), **settings | {"steps": 3}))
    summary = run(pool, configuration(out=str(tmp_path / "parts"), **settings), tmp_path / "parts")
    mine, whole = ([one for one in records_of(tmp_path / name) if "loss" in one] for name in ("parts", "whole"))
    assert mine == whole
    assert summary["precision"] == precision and summary["replicas_identical"]
    assert ("loss_scale" in summary) == ("loss_scale" in mine[-1]) == (precision == "fp16")
    if precision == "fp16":
        assert 1 <= mine[2]["skipped_steps"] < 3


def loud_layers():
    """With the first loss scales, gradients of one process and of pipelines overflow."""
    return nn.Sequential(nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10), Louder(), Louder())


@pytest.mark.parametrize(
    ("precision", "layout"),
    [("bf16", {"dp": 1}), ("fp16", {"dp": 1, "schedule": "zb-h1"}), ("fp16", {"dp": 2, "shard": "optimizer"})],
)
def test_a_run_of_pipelines_goes_on_bit_for_bit_and_without_them(pool, tmp_path, precision, layout):
    """Its checkpoints are also those of one process, in which the loss scale goes on."""
    settings = {"precision": precision, "model": f"{__name__}:loud_layers", "data": "digits", "clip": 0.5}
    settings |= {"lr": 0.01, "optimizer": "sgd"}
    pipelines = settings | {"pp": 2, "microbatches": 2, **layout}
    run(pool, configuration(out=str(tmp_path / "whole"), **pipelines))
    run(pool, configuration(out=str(tmp_path / "parts"), **pipelines | {"steps": 3}))
    shutil.copytree(tmp_path / "parts", tmp_path / "alone")
    summary = run(pool, configuration(out=str(tmp_path / "parts"), **pipelines), tmp_path / "parts")
    alone = run(pool, configuration(out=str(tmp_path / "alone"), **settings | {"steps": 4}), tmp_path / "alone")
    mine, whole, other = (
        [one for one in records_of(tmp_path / name) if "loss" in one] for name in ("parts", "whole", "alone")
    )
    assert mine == whole
    assert summary["replicas_identical"] and summary["precision"] == precision
    assert other[3]["loss"] == pytest.approx(mine[3]["loss"], rel=0.01)
    if precision == "fp16":
        assert 1 <= mine[2]["skipped_steps"] <= mine[-1]["skipped_steps"] < 6
        scale = mine[2]["loss_scale"]
        assert alone["loss_scale"] in (scale, scale / 2)  # larger micro-batches have larger gradients


def scaled(comms, config):
    """Two steps with a scale that is far too large, and what comes of it."""
    training = build(config, comms)
    training.loss_scale.value = 2.0**30
    before = [one.detach().clone() for one in training.model.parameters()]
    training.step()
    same = all(map(torch.equal, before, training.model.parameters()))
    state = training.state()["loss_scale"]
    training.validate()
    return same, state, {one.dtype for one in training.model.state_dict().values()}


@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_a_step_that_is_not_taken(pool, model):
    sizes = {} if model == "mlp" else {"heads": 2, "context": 8}
    config = configuration(model=model, dim=16, depth=2, precision="fp16", ranks=2, **sizes)
    wanted = {"value": 2.0**29, "good_steps": 0, "skipped": 1}
    assert pool.run(scaled, 2, config, transport="shm", timeout=50) == [(True, wanted, {torch.float32})] * 2


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_short_run_learns_about_what_float32_does(pool, tmp_path, precision, ranks):
    config = configuration(steps=30, ranks=ranks, out=str(tmp_path / "run"), precision=precision)
    short = run(pool, config)
    plain = run(pool, replace(config, precision="float32", out=str(tmp_path / "plain")))
    first = records_of(tmp_path / "plain")[0]["loss"]
    assert abs(short["validation_loss"] - plain["validation_loss"]) < 0.1 * (first - plain["validation_loss"])


class Answer:
    """Outputs that torch cannot look into."""

    def __init__(self, loss):
        self.loss = loss


class OwnLoss(nn.Module):
    """A model that computes its loss itself, and returns it in an object."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, inputs, targets):
        return Answer(nn.functional.cross_entropy(self.layer(inputs), targets))


@pytest.mark.parametrize("shard", [None, "parameters"])
def test_outputs_in_an_object(pool, tmp_path, shard):
    settings = {
        "shard": shard,
        "model": f"{__name__}:OwnLoss",
        "data": "digits",
        "ranks": 2,
        "out": str(tmp_path / "run"),
    }
    assert run(pool, configuration(precision="bf16", **settings))["loss"] < 2.5
    with pytest.raises(RankFailed, match="let the model return tensors"):
        run(pool, configuration(precision="fp16", **settings | {"out": str(tmp_path / "other")}))


def test_a_run_of_before_says_dtype(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text('dtype = "float64"\n')
    assert read_config(file) == {"precision": "float64"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ranks": 2, "strategy": "naive"}, "--precision bf16 is for --strategy ddp, and it is naive"),
        ({"ranks": 2, "average_every": 2}, "--average-every 2 computes in float32 or float64"),
    ],
)
def test_refusals(changes, words):
    with pytest.raises(ConfigError, match=words):
        TrainConfig(precision="bf16", **changes)
