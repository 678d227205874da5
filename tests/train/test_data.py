"""The digits are whole, and a user's dataset is checked before training starts."""

import sys
import textwrap

import pytest
import torch

from microparallel.errors import DataError
from microparallel.train.data import CollatedData, TensorData, digits, from_user


@pytest.fixture
def write_module(tmp_path, monkeypatch):
    """Write my_module.py into the current directory, and forget it afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(source):
        (tmp_path / "my_module.py").write_text(textwrap.dedent(source))

    yield write
    sys.modules.pop("my_module", None)


def test_digits_are_whole_scaled_and_split_the_same_each_time():
    split, again = digits(), digits()
    assert (len(split.training), len(split.validation)) == (1438, 359)
    images = torch.cat([split.training.inputs, split.validation.inputs])
    labels = torch.cat([split.training.targets, split.validation.targets])
    assert images.shape == (1797, 64)
    assert abs(images.mean()) < 0.02
    assert images.max() - images.min() == 1
    # how many of each digit the dataset's own description says its test set has
    assert torch.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert torch.equal(split.validation.inputs, again.validation.inputs)
    assert not torch.equal(split.validation.inputs, digits(seed=1).validation.inputs)
    assert len(images.unique(dim=0)) == len(images)  # so nothing is both trained on and held back
    assert "1438" in split.description


def test_digits_in_float64():
    inputs, targets = digits(dtype=torch.float64).training.batch([3, 1])
    assert inputs.dtype == torch.float64
    assert targets.dtype == torch.int64


def test_a_batch_is_the_rows_asked_for():
    data = TensorData(torch.arange(12).view(4, 3), torch.arange(4))
    inputs, targets = data.batch([2, 0])
    assert inputs.tolist() == [[6, 7, 8], [0, 1, 2]]
    assert targets.tolist() == [2, 0]
    assert data[1][0].tolist() == [3, 4, 5]
    assert [tuple(part.shape) for part in data.batch([])] == [(0, 3), (0,)]
    with pytest.raises(DataError, match="4 inputs and 3 targets"):
        TensorData(torch.zeros(4), torch.zeros(3))


def test_a_users_samples_are_collated():
    data = CollatedData([(torch.full((2,), float(i)), i) for i in range(5)])
    inputs, targets = data.batch([4, 1])
    assert inputs.tolist() == [[4, 4], [1, 1]]
    assert targets.tolist() == [4, 1]
    assert len(data) == 5
    assert data[3][1] == 3
    assert [tuple(part.shape) for part in data.batch([])] == [(0, 2), (0,)]
    nested = CollatedData([({"a": torch.zeros(2), "b": [torch.zeros(1)]}, 0)])
    inputs, targets = nested.batch([])
    assert inputs["a"].shape == (0, 2)
    assert inputs["b"][0].shape == (0, 1)
    assert targets.shape == (0,)


def test_from_user(write_module):
    write_module("""
        import torch
        from torch.utils.data import TensorDataset
        def one():
            return TensorDataset(torch.zeros(6, 2), torch.zeros(6, dtype=torch.int64))
        def pair():
            return one(), [(torch.zeros(2), 1)] * 3
        def pair_with_none():
            return one(), None
    """)
    split = from_user("my_module:one")
    assert (len(split.training), split.validation) == (6, None)
    assert split.training.batch([0, 5])[0].shape == (2, 2)
    split = from_user("my_module:pair")
    assert (len(split.training), len(split.validation)) == (6, 3)
    assert "6 samples to train on and 3 held back" in split.description
    assert from_user("my_module:pair_with_none").validation is None


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise KeyError('lost')", r"dataset 'my_module:make' raised KeyError: 'lost'"),
        ("return 3", r"int has no __len__ and no __getitem__: return a list"),
        ("return {1}", r"set has no __getitem__"),
        ("return []", r"training data of 'my_module:make': it is empty"),
        ("return [(0, 1)], []", r"validation data of 'my_module:make': it is empty"),
        ("return torch.zeros(3, 2), torch.zeros(3)", r"sample 0 .* is Tensor, not a pair.*TensorDataset"),
        ("return {'a': (0, 1)}", r"sample 0 of the training data of 'my_module:make' raised KeyError: 0"),
    ],
)
def test_a_users_mistakes(write_module, source, words):
    write_module(f"import torch\ndef make():\n    {source}")
    with pytest.raises(DataError, match=words) as caught:
        from_user("my_module:make")
    assert "\n" not in str(caught.value)


def test_a_mistyped_name(write_module):
    write_module("def make_dataset(): pass")
    with pytest.raises(DataError, match=r"module my_module has no 'make_datasets'; did you mean 'make_dataset'\?"):
        from_user("my_module:make_datasets")
