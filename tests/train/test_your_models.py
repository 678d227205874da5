"""Models of anybody's: what they return, how they are called, and metrics that fail."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from microparallel.train.config import TrainConfig
from microparallel.train.loop import train


def configuration(out, model, data="pairs", **changes):
    settings = {
        **{"out": str(out), "model": f"{__name__}:{model}", "data": f"{__name__}:{data}", "dtype": "float64"},
        **{"batch": 13, "steps": 5, "optimizer": "sgd", "lr": 0.1, "validate_every": 2, "save_every": 100},
    }
    return TrainConfig(**settings | changes).resolved()


def run(pool, config, resume=None):
    return pool.run(train, config.world_size, config, resume, True, timeout=50)[0]


def metrics(folder, name):
    records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [record[name] for record in records if name in record]


def pairs():
    """30 rows of 4 numbers, each with one of 3 classes; 11 of them are held back."""
    inputs = torch.randn(41, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = inputs[:, :3].argmax(1)
    return TensorDataset(inputs[:30], targets[:30]), TensorDataset(inputs[30:], targets[30:])


class Output:
    """What the models of some libraries return: an object."""

    def __init__(self, loss, logits):
        self.loss, self.logits = loss, logits


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs):
        return self.layer(inputs)


class OwnLoss(Plain):
    """Its arguments have any names."""

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.layer(x), y)


class ReturnsObject(Plain):
    def forward(self, x, y):
        logits = self.layer(x)
        return Output(nn.functional.cross_entropy(logits, y), logits)


class ReturnsDict(Plain):
    def forward(self, x, targets=None):
        logits = self.layer(x)
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits, targets)}


class ReturnsTuple(Plain):
    def forward(self, x, y):
        logits = self.layer(x)
        return nn.functional.cross_entropy(logits, y), logits


@pytest.fixture(scope="module")
def plain(pool, tmp_path_factory):
    """What a model that returns a tensor learns in one process."""
    out = tmp_path_factory.mktemp("runs") / "plain"
    run(pool, configuration(out, "Plain"))
    return out


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", ["OwnLoss", "ReturnsObject", "ReturnsDict", "ReturnsTuple"])
def test_a_model_computes_its_own_loss_and_returns_it_in_its_own_way(pool, plain, tmp_path, model, ranks):
    run(pool, configuration(tmp_path / "run", model, ranks=ranks))
    for name in ("loss", "validation_loss"):
        assert metrics(tmp_path / "run", name) == pytest.approx(metrics(plain, name), rel=1e-12)
