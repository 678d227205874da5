"""Comparing strategies: what differs is found, also where nothing is a number."""

import math

import pytest
import torch
from torch import nn

import microparallel as mp
from microparallel.train.batch import Batch
from microparallel.train.compare import (
    Outcome,
    _beside,
    _torch_data_parallel,
    compare,
    compare_in_process,
    replica_devices,
)
from microparallel.train.config import TrainConfig


def outcome(loss, weight):
    return Outcome([1.0, loss], {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([weight])}, 0.1)


@pytest.mark.parametrize(
    ("loss", "weight"), [(1.1, 1.0), (1.0, 1.1), (math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0)]
)
def test_what_differs_is_found(loss, weight):
    assert not _beside("naive", 2, outcome(loss, weight), outcome(1.0, 1.0), "float32").agrees


def test_two_runs_that_are_both_lost_do_not_agree():
    assert not _beside("naive", 2, outcome(math.nan, 1.0), outcome(math.nan, 1.0), "float32").agrees
    assert _beside("naive", 2, outcome(1.0, 1.0), outcome(1.0, 1.0), "float32").agrees


def takes_a_dictionary():
    class TakesADictionary(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, inputs):
            return self.layer(inputs["left"]) + self.layer(inputs["right"])

    return TakesADictionary()


def dictionaries():
    generator = torch.Generator().manual_seed(0)
    return [
        ({"left": torch.randn(3, generator=generator), "right": torch.randn(3, generator=generator)}, index % 2)
        for index in range(13)
    ]


DICTIONARIES = {"model": f"{__name__}:takes_a_dictionary", "data": f"{__name__}:dictionaries"}


def test_inputs_may_be_dictionaries(pool):
    """Thirteen samples in batches of four: in the last step only one of three ranks has a sample."""
    config = TrainConfig(**DICTIONARIES, precision="float64", ranks=3, steps=8, batch=4).resolved()
    rows = compare(config, ["naive", "torch-ddp"], pool)
    assert [row.agrees for row in rows] == [True, True, True]


class OwnLoss(nn.Linear):
    """Computes its own loss, and is smooth."""

    def forward(self, inputs, targets):
        return nn.functional.cross_entropy(super().forward(inputs), targets)


def own_loss():
    return OwnLoss(64, 10)


GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize(
    "subject", [DICTIONARIES, {"model": f"{__name__}:own_loss", "data": "digits"}, {"dim": 16, "depth": 3}]
)
def test_replicas_in_one_process_agree_with_plain_training(subject, device):
    """Batches of four and at last of one or two, for three replicas."""
    progress = []
    settings = {"precision": "float64", "ranks": 3, "steps": 5, "batch": 4, "device": device}
    rows = compare_in_process(TrainConfig(**subject, **settings).resolved(), progress.append)
    torchs = {"torch-dp": min(3, torch.cuda.device_count())} if device == "cuda" else {}
    assert {row.strategy: row.ranks for row in rows} == {"single": 1, "replicas-cpu": 3, "replicas-ring": 3} | torchs
    assert all(row.agrees for row in rows)
    assert all(row.losses == pytest.approx(rows[0].losses, rel=1e-12, abs=0) for row in rows)
    assert len(set(rows[0].losses)) == 5
    assert progress[:2] == ["single with 1 replica", "replicas-cpu with 3 replicas"]


def test_replicas_that_average_wrongly_are_found_out(monkeypatch):
    """Means of means: right for equal shares only."""
    right = mp.course.replicas.average_gradients

    def means_of_means(models, weights, average):
        right(models, [1 / len(models)] * len(models), average)

    monkeypatch.setattr("microparallel.course.replicas.average_gradients", means_of_means)
    settings = {"dim": 8, "depth": 2, "precision": "float64", "ranks": 2, "steps": 2, "device": "cpu"}
    assert all(row.agrees for row in compare_in_process(TrainConfig(**settings, batch=4).resolved()))
    rows = compare_in_process(TrainConfig(**settings, batch=5).resolved())
    assert [row.agrees for row in rows] == [True, False, False]


def test_torch_s_losses_are_weighed_where_the_model_computes_its_own(monkeypatch):
    """As nn.DataParallel does on two GPUs: each returns the mean of its share, five samples here and four there."""

    class OnTwoDevices(nn.Module):
        def __init__(self, module, device_ids):
            super().__init__()
            self.module = module

        def forward(self, inputs, targets):
            shares = zip(inputs.chunk(2), targets.chunk(2), strict=True)
            return torch.stack([self.module(*share) for share in shares])

    monkeypatch.setattr(nn, "DataParallel", OnTwoDevices)
    model, inputs, targets = OwnLoss(3, 2), torch.randn(9, 3), torch.arange(9) % 2
    training = type("Training", (), {"model": model})
    loss = _torch_data_parallel(training, [0, 1])([Batch((inputs, targets), {}, targets, 9, own_loss=True)], 9)
    assert loss.item() == pytest.approx(model(inputs, targets).item(), rel=1e-6)
    wanted = torch.autograd.grad(model(inputs, targets), model.weight)[0]
    torch.testing.assert_close(model.weight.grad, wanted)


def test_replicas_go_to_the_gpus_in_turn_or_to_the_cpu(monkeypatch):
    assert [str(device) for device in replica_devices("cpu", 2)] == ["cpu", "cpu"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [str(device) for device in replica_devices("auto", 1)] == ["cpu"]
    with pytest.raises(mp.errors.UsageError, match="--device cuda: torch sees no GPU here; try --device cpu"):
        replica_devices("cuda", 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device in ("auto", "cuda"):
        assert [str(device) for device in replica_devices(device, 3)] == ["cuda:0", "cuda:1", "cuda:0"]
