"""Our safetensors files are those of the safetensors package, and any range of a tensor can be read."""

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from microparallel.files import tensor_file
from microparallel.files.tensor_file import Piece, TensorFile


def piece(tensor):
    return Piece(tensor, 0, tensor.numel(), tuple(tensor.shape))


def tensors_of_every_dtype():
    return {name: torch.arange(24).view(4, 6).to(dtype) for name, dtype in tensor_file.DTYPES.items()}


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).tolist()


def test_the_package_reads_what_is_written_here(tmp_path):
    tensors = tensors_of_every_dtype() | {"scalar": torch.tensor(3), "empty": torch.zeros(0, 2), "é\n": torch.ones(1)}
    written = tensor_file.write(tmp_path / "file", {name: piece(tensor) for name, tensor in tensors.items()})
    assert written == tensor_file.checksum(tmp_path / "file")
    assert written == tensor_file.checksum_of((tmp_path / "file").read_bytes())
    found = safetensors.torch.load_file(tmp_path / "file")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(found[name]) == bits(tensor)


def test_what_the_package_wrote_is_read_here(tmp_path):
    tensors = tensors_of_every_dtype() | {"scalar": torch.tensor(3), "empty": torch.zeros(0, 2)}
    safetensors.torch.save_file(tensors, tmp_path / "file", metadata={"format": "pt"})
    file = TensorFile(tmp_path / "file")
    assert file.entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        out = torch.empty(tensor.numel(), dtype=tensor.dtype)
        file.read(name, 0, out)
        assert (bits(out), file.entries[name].shape) == (bits(tensor), tuple(tensor.shape))


@pytest.fixture(scope="module")
def across(tmp_path_factory):
    """A file with elements 3 to 17 of a tensor that does not lie in memory as it is flattened."""
    path = tmp_path_factory.mktemp("file") / "file"
    some = Piece(torch.arange(20.0).view(5, 4).t(), 3, 17, (14,))
    tensor_file.write(path, {"before": piece(torch.ones(5)), "t": some})
    return TensorFile(path)


@given(st.integers(0, 14), st.integers(0, 14))
def test_ranges(across, first, second):
    start, stop = sorted((first, second))
    out = torch.empty(stop - start)
    across.read("t", start, out)
    assert out.tolist() == torch.arange(20.0).view(5, 4).t().flatten()[3:17][start:stop].tolist()


@pytest.mark.parametrize(("start", "size"), [(-1, 3), (10, 5), (15, 0)])
def test_ranges_beyond_a_tensor_are_refused(across, start, size):
    with pytest.raises(ValueError, match=f"does not have {size} elements of t from {start} on"):
        across.read("t", start, torch.empty(size))
    with pytest.raises(ValueError, match="does not have"):
        across.read("t", 0, torch.empty(2, dtype=torch.float64))


def test_a_file_that_has_become_shorter_is_named(tmp_path, across):
    path = tmp_path / "file"
    path.write_bytes(across.path.read_bytes())
    file = TensorFile(path)
    path.write_bytes(across.path.read_bytes()[:-30])
    with pytest.raises(ValueError, match="it was written again"):
        file.read("t", 0, torch.empty(14))
    with pytest.raises(ValueError, match="t would have the bytes"):
        TensorFile(path)


@pytest.mark.parametrize("data", [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"{", b"\x02" + b"\0" * 7 + b"{]"])
def test_what_is_no_such_file_is_refused(tmp_path, data):
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(ValueError, match=r"header|Expect"):
        TensorFile(tmp_path / "file")


def test_tensors_are_written_in_any_order(tmp_path):
    """Those with larger elements stand first, so the package can map all of them, whatever comes first."""
    tensors = {"flags": torch.tensor([True, False, True])} | tensors_of_every_dtype() | {"empty": torch.zeros(0, 2)}
    kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with tensor_file.TensorWriter(tmp_path / "file", kinds) as file:
        for name in reversed(tensors):
            file.write(name, tensors[name])
    tensor_file.write(tmp_path / "at once", {name: piece(tensor) for name, tensor in tensors.items()})
    assert (tmp_path / "file").read_bytes() == (tmp_path / "at once").read_bytes()
    found = safetensors.torch.load_file(tmp_path / "file")
    assert {name: bits(tensor) for name, tensor in found.items()} == {n: bits(one) for n, one in tensors.items()}


def test_words_about_the_tensors_stand_beside_them(tmp_path):
    with tensor_file.TensorWriter(tmp_path / "file", {"a": (torch.float32, (2,))}, {"step": "7", "ä": '"'}) as file:
        file.write("a", torch.ones(2))
    with safetensors.safe_open(tmp_path / "file", "pt") as found:
        assert found.metadata() == {"step": "7", "ä": '"'}
        assert found.get_tensor("a").tolist() == [1.0, 1.0]
    read = TensorFile(tmp_path / "file")
    assert (read.metadata, [*read.entries]) == ({"step": "7", "ä": '"'}, ["a"])


def test_a_tensor_that_is_missing_or_another_is_refused(tmp_path):
    kinds = {"a": (torch.float32, (2,)), "b": (torch.float32, (2,))}
    file = tensor_file.TensorWriter(tmp_path / "file", kinds)
    with pytest.raises(ValueError, match="file would end without b"), file:
        file.write("a", torch.zeros(2))
    file = tensor_file.TensorWriter(tmp_path / "file", kinds)
    with pytest.raises(ValueError, match=r"a is torch\.float64 of shape"), file:
        file.write("a", torch.zeros(2).double())


def test_a_file_that_was_replaced_since_is_not_read(tmp_path):
    """Where its tensors begin is known of the one that was opened."""
    path, tensor = tmp_path / "file", torch.arange(4.0)
    tensor_file.write(path, {"w": piece(tensor)})
    file = TensorFile(path)
    tensor_file.write(tmp_path / "other", {"v": piece(tensor), "w": piece(tensor)})
    (tmp_path / "other").replace(path)
    with pytest.raises(ValueError, match="another file has its place now"):
        file.read("w", 0, torch.empty(4))
