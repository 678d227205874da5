"""A run that goes on with other code, data or parameters says so."""

import sys

import pytest
import torch

from microparallel.errors import CheckpointError
from microparallel.train import checkpoint
from microparallel.train.build import build
from microparallel.train.config import TrainConfig
from microparallel.world import connect

SOURCE = """
import torch
from torch.utils.data import TensorDataset

SAMPLES, SCALE = 40, 1.0

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("one", "two"):
            setattr(self, name, torch.nn.Linear(3, 3))

    def forward(self, inputs):
        return self.two(self.one(inputs))

def make_model():
    return Model()

def make_data():
    inputs = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(0)) * SCALE
    return TensorDataset(inputs, inputs.clone())
"""


@pytest.fixture
def remark(tmp_path, monkeypatch):
    """Save after a step, go on with the module changed, and return what is said."""
    monkeypatch.syspath_prepend(tmp_path)
    config = TrainConfig(model="mine_fp:make_model", data="mine_fp:make_data", loss="mse", batch=8, steps=4)

    def run(source):
        sys.modules.pop("mine_fp", None)
        (tmp_path / "mine_fp.py").write_text(source)
        torch.manual_seed(0)
        return build(config, comms)

    def go_on(*change):
        with_change = SOURCE.replace(*change) if change else SOURCE
        training = run(SOURCE)
        training.step()
        training.save(tmp_path / "checkpoints", keep=1)
        return run(with_change).load(checkpoint.latest(tmp_path / "checkpoints")[0])

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    with connect("gloo") as comms:
        yield go_on
    sys.modules.pop("mine_fp", None)


def test_nothing_changed(remark):
    assert remark() is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("SAMPLES, SCALE = 40", "SAMPLES, SCALE = 50"), "40 samples then, 50 now; other code in mine_fp"),
        (("SCALE = 40, 1.0", "SCALE = 40, 2.0"), "other samples of the same number; other code in mine_fp"),
        (("self.two(self.one(inputs))", "self.one(self.two(inputs))"), "other code in mine_fp"),
    ],
    ids=["samples", "data", "code"],
)
def test_what_changed_is_one_line(remark, change, said):
    expected = f"warning: the run goes on with something else than it was saved with: {said}"
    assert remark(*change) == expected


def test_another_order_of_parameters_is_refused(remark):
    with pytest.raises(CheckpointError, match=r"another order .*: one\.weight stood where now two\.weight is"):
        remark('("one", "two")', '("two", "one")')
