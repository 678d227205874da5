"""The shards of an MLP are the whole MLP, bit for bit."""

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from microparallel.errors import PartitionError, UsageError
from microparallel.models import FullMLP, ShardedMLP
from microparallel.models.mlp import Layer, shard_bounds


def all_shards(world_size, *args, seed=0, **kwargs):
    shards = []
    for rank in range(world_size):
        torch.manual_seed(seed)
        shards.append(ShardedMLP(*args, rank=rank, world_size=world_size, **kwargs))
    return shards


def full_model(*args, seed=0, **kwargs):
    torch.manual_seed(seed)
    return FullMLP(*args, **kwargs)


@settings(max_examples=60)
@given(data=st.data(), depth=st.integers(1, 9), dim=st.integers(1, 6), seed=st.integers(0, 3))
def test_shards_together_are_the_full_model(data, depth, dim, seed):
    world_size = data.draw(st.integers(1, depth))
    full = full_model(dim, depth, 5, 3, seed=seed).state_dict()
    shards = all_shards(world_size, dim, depth, 5, 3, seed=seed)
    together = {name: value for shard in shards for name, value in shard.state_dict().items()}
    assert list(together) == list(full)
    assert sum(len(shard.state_dict()) for shard in shards) == len(full)
    assert all(torch.equal(together[name], full[name]) for name in full)


@settings(max_examples=20)
@given(data=st.data(), depth=st.integers(1, 8))
def test_shards_in_a_row_compute_the_same_loss_and_gradients(data, depth):
    world_size = data.draw(st.integers(1, depth))
    full, shards = full_model(4, depth, 3, 5), all_shards(world_size, 4, depth, 3, 5)
    inputs, targets = torch.randn(6, 3), torch.randint(5, (6,))
    expected = full(inputs, targets)
    outputs = inputs
    for shard in shards[:-1]:
        outputs = shard(outputs)
    loss = shards[-1](outputs, targets)
    assert torch.equal(loss, expected)
    expected.backward()
    loss.backward()
    gradients = {name: p.grad for shard in shards for name, p in shard.named_parameters()}
    for name, parameter in full.named_parameters():
        assert torch.equal(gradients[name], parameter.grad)


@given(layers=st.integers(1, 40), data=st.data())
def test_bounds_cover_every_layer_once_in_order(layers, data):
    world_size = data.draw(st.integers(1, layers))
    bounds = [shard_bounds(layers, rank, world_size) for rank in range(world_size)]
    assert [layer for bound in bounds for layer in bound] == list(range(layers))
    sizes = [len(bound) for bound in bounds]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def test_at_most_one_foreign_layer_is_alive_while_building(monkeypatch):
    alive, most = weakref.WeakSet(), []
    reset = Layer.reset_parameters

    def counting(layer):
        alive.add(layer)
        most.append(len(alive))
        reset(layer)

    monkeypatch.setattr(Layer, "reset_parameters", counting)
    ShardedMLP(2, 12, rank=2, world_size=6)
    assert len(most) == 12
    assert max(most) == 3  # its own two, and one


def test_layers_names_and_shapes():
    full = FullMLP(8, in_features=3, out_features=10)
    assert [tuple(layer.weight.shape) for layer in full.layers] == [(8, 3), *[(8, 8)] * 14, (10, 8)]
    assert "layers.3.weight" in full.state_dict()
    assert [layer.last for layer in full.layers] == [False] * 15 + [True]
    assert full(torch.randn(4, 3)).shape == (4, 10)
    assert FullMLP(8, depth=1).layers[0].weight.shape == (2, 8)
    assert FullMLP(8)(torch.randn(4, 8)).shape == (4, 2)


def test_pipeline_layers_are_the_layers():
    full = FullMLP(4, 3)
    assert full.pipeline_layers() is full.layers


def test_relu_after_every_layer_but_the_last():
    full = full_model(16, 3)
    hidden = full.layers[0](torch.randn(64, 16))
    assert (hidden >= 0).all()
    assert (hidden == 0).any()
    assert (full(torch.randn(64, 16)) < 0).any()
    assert "relu" in repr(full.layers[0])
    assert "last" in repr(full.layers[-1])


def test_sixteen_layers_neither_lose_nor_blow_up_the_signal():
    outputs = full_model(256, 16, out_features=256)(torch.randn(64, 256))
    assert 0.3 < outputs.std() < 5


def test_targets_give_the_mean_cross_entropy():
    full, inputs, targets = full_model(8, 3), torch.randn(5, 8), torch.tensor([0, 1, 1, 0, 1])
    picked = torch.log_softmax(full(inputs), dim=-1)[torch.arange(5), targets]
    torch.testing.assert_close(full(inputs, targets), -picked.mean())


def test_only_the_last_shard_takes_targets():
    with pytest.raises(UsageError, match=r"rank 0 of 2 was given targets.*rank 1"):
        ShardedMLP(4, 4, rank=0, world_size=2)(torch.randn(3, 4), torch.zeros(3, dtype=torch.int64))


def test_more_ranks_than_layers():
    with pytest.raises(PartitionError, match=r"4 ranks need at least 4 layers, and this model has 3\n(.|\n)*try:"):
        ShardedMLP(4, 3, rank=0, world_size=4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dim": 0}, "dim=0"),
        ({"dim": -1}, "dim=-1"),
        ({"depth": 0}, "depth=0"),
        ({"in_features": 0}, "in_features=0"),
        ({"out_features": 0}, "out_features=0"),
        ({"rank": 2, "world_size": 2}, "rank=2 is outside a world of 2"),
        ({"rank": -1, "world_size": 2}, "rank=-1"),
        ({"world_size": 0}, "world_size=0"),
    ],
)
def test_impossible_sizes(arguments, words):
    with pytest.raises(UsageError, match=words):
        ShardedMLP(**{"dim": 4, "depth": 4, **arguments})
