"""Comparing strategies: what differs is found, also where nothing is a number."""

import math

import pytest
import torch

from microparallel.train.compare import Outcome, _beside, compare
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
    from torch import nn

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


def test_inputs_may_be_dictionaries(pool):
    """Thirteen samples in batches of four: in the last step only one of three ranks has a sample."""
    config = TrainConfig(
        **{"model": f"{__name__}:takes_a_dictionary", "data": f"{__name__}:dictionaries", "dtype": "float64"},
        **{"ranks": 3, "steps": 8, "batch": 4},
    ).resolved()
    rows = compare(config, ["naive", "torch-ddp"], pool)
    assert [row.agrees for row in rows] == [True, True, True]
