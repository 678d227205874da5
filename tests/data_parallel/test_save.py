"""A model in parts writes the file of the plain model, with one unit gathered at a time."""

import pytest
import safetensors.torch
import torch
from torch import nn

import microparallel as mp
from microparallel.errors import CheckpointError
from microparallel.files import tensor_file


def is_layer(module):
    return isinstance(module, nn.Linear | nn.Embedding | nn.BatchNorm1d)


class Everything(nn.Module):
    """Tied weights, buffers of several dtypes, one that is not saved, a frozen parameter, a scalar, two dtypes."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.half = nn.Linear(5, 5, dtype=torch.bfloat16)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.arange(3.0), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("not_saved", torch.ones(3), persistent=False)

    def forward(self, tokens):
        hidden = self.norm(self.embed(tokens))
        hidden = hidden + self.half(hidden.bfloat16()).float() + self.frozen.sum()
        return self.head(hidden) * self.scale


def everything():
    torch.manual_seed(3)
    return Everything()


def save_everything(comms, path, replicas=1):
    model = mp.FullyShardedDataParallel(everything(), comms, units=is_layer, replicas=replicas)
    most = 0
    real = tensor_file.TensorWriter.write

    def write(file, name, tensor):
        nonlocal most
        most = max(most, len([unit for unit in model.units if unit.is_started]))
        real(file, name, tensor)

    tensor_file.TensorWriter.write = write
    try:
        model.save(path)
    finally:
        tensor_file.TensorWriter.write = real
    assert not any(unit.is_started for unit in model.units)
    return most


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (2, 1), (3, 1), (4, 2)])
def test_the_file_of_a_model_in_parts_is_that_of_the_plain_one(pool, tmp_path, ranks, replicas):
    path = tmp_path / "model.safetensors"
    most, *others = pool.run(save_everything, ranks, str(path), replicas, timeout=50)
    assert most == 1 and not any(others)  # rank 0 writes, with one unit gathered
    state, found = everything().state_dict(), safetensors.torch.load_file(path)
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    everything().load_state_dict(found)
    assert [one.name for one in tmp_path.iterdir()] == ["model.safetensors"]


def save_on_a_full_disk(comms, path):
    model = mp.FullyShardedDataParallel(everything(), comms, units=is_layer)
    real = tensor_file.TensorWriter.write

    def write(file, name, tensor):
        if name == "norm.weight":
            raise OSError(28, "No space left on device")
        real(file, name, tensor)

    tensor_file.TensorWriter.write = write
    messages = []
    try:
        for where in (path, f"{path}/nowhere/file"):
            with pytest.raises(CheckpointError) as caught:
                model.save(where)
            messages.append(str(caught.value))
    finally:
        tensor_file.TensorWriter.write = real
    return messages


def test_a_file_that_cannot_be_written_is_the_same_error_on_all_ranks_and_the_old_one_stays(pool, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"old")
    full, nowhere = (
        f"cannot write {path}: No space left on device",
        f"cannot write {path}/nowhere/file: Not a directory",
    )
    for messages in pool.run(save_on_a_full_disk, 3, str(path), timeout=50):
        assert messages == [f"{one}; make room, or choose another place" for one in (full, nowhere)]
    assert path.read_bytes() == b"old"
    assert [one.name for one in tmp_path.iterdir()] == ["model.safetensors"]
