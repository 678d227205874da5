"""The digits are whole, a user's dataset is checked before training starts, and text is cut into windows."""

import sys
import textwrap
from pathlib import Path

import pytest
import torch

from microparallel.errors import DataError, UsageError
from microparallel.train.data import CollatedData, TensorData, digits, from_user, text


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


# ── text ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def bytes_of(data):
    """Put the text back together: all inputs, and the last target."""
    inputs, targets = data.batch(range(len(data)))
    return bytes(inputs.flatten().tolist()) + bytes(targets[-1, -1:].tolist())


def test_windows_meet_and_targets_are_one_byte_later(tmp_path):
    content = bytes(range(1, 102))  # 101 bytes: 20 windows of 5 and the last target
    (tmp_path / "a.txt").write_bytes(content)
    split = text(tmp_path / "a.txt", context=5)
    assert (len(split.training), len(split.validation)) == (18, 2)
    assert bytes_of(split.training) == content[:91]
    assert bytes_of(split.validation) == content[90:]
    inputs, targets = split.training.batch([0, 17])
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert inputs[1].tolist() == list(content[85:90])
    assert targets[1].tolist() == list(content[86:91])
    one_input, one_target = split.training[17]
    assert torch.equal(one_input, inputs[1])
    assert torch.equal(one_target, targets[1])
    assert split.training.windows.dtype == torch.uint8
    assert split.training.batch([])[0].shape == (0, 5)


@pytest.mark.parametrize("extra", range(6))
def test_every_length(tmp_path, extra):
    (tmp_path / "a.txt").write_text("x" * (11 + extra))
    split = text(str(tmp_path / "a.txt"), context=5)
    assert len(split.training) + len(split.validation) == (10 + extra) // 5


def test_a_folder_in_the_order_of_its_paths(tmp_path):
    for name in ["b/one.txt", "a.txt", "c.txt", ".hidden/x", ".hidden_too", "__pycache__/x.py", "b/.h"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{name:-^20}")
    (tmp_path / "binary").write_bytes(b"\x00\x01")
    (tmp_path / "latin1").write_bytes("Grüße".encode("latin1"))
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    split = text(tmp_path, context=1)
    expected = f"{'a.txt':-^20}{'b/one.txt':-^20}{'c.txt':-^20}".encode()
    assert bytes_of(split.training) + bytes_of(split.validation)[1:] == expected
    assert "3 files, 2 not UTF-8 left out" in split.description
    assert "60 bytes" in split.description


def test_the_standard_library_when_nothing_is_named():
    split = text()
    assert len(split.training) > 10_000
    assert "standard library" in split.description
    assert split.training[0][0].shape == (64,)


def test_utf8_beyond_ascii_is_fine(tmp_path):
    (tmp_path / "a.txt").write_text("Größe 猫 🐈" * 5, encoding="utf-8")
    assert len(text(tmp_path / "a.txt", context=4).training) > 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"abc\xff" + b"d" * 100, "not UTF-8 text: byte 3 is 0xff"),
        (b"abcd\x00" + b"d" * 100, "not UTF-8 text: byte 4 is 0x00"),
        (b"a\x00\xff", "byte 1 is 0x00"),
        (b"abcdefgh", r"8 bytes are fewer than two windows of context=4, which take 9"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, content, words):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        text(tmp_path / "a.txt", context=4)
    assert "a.txt" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere.txt", r"nowhere\.txt does not exist: check the path"),
        ("empty", "no files"),
        ("folder", "none of its 1 files is UTF-8"),
        ("/dev/null", "/dev/null is neither a file nor a folder"),
    ],
)
def test_paths_that_cannot_be_used(tmp_path, path, words):
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "binary").write_bytes(b"\xff")
    with pytest.raises(DataError, match=words):
        text(tmp_path / path)


@pytest.mark.parametrize("inside_a_folder", [False, True])
def test_no_permission(tmp_path, monkeypatch, inside_a_folder):
    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "a.txt").write_text("hello")
    monkeypatch.setattr(Path, "read_bytes", denied)  # file modes do not stop root, who may be running this
    with pytest.raises(DataError, match=r"a\.txt cannot be read \(Permission denied\): check its permissions"):
        text(tmp_path if inside_a_folder else tmp_path / "a.txt")


def test_impossible_context():
    with pytest.raises(UsageError, match="context=0"):
        text(context=0)


def test_no_standard_library_sources(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match="no sources"):
        text()
