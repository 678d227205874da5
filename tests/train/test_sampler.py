"""Every sample goes to exactly one rank an epoch, and a saved position is the right one."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from microparallel.errors import UsageError
from microparallel.train.sampler import ShardedSampler

sizes = {"samples": st.integers(1, 60), "batch": st.integers(1, 20), "world_size": st.integers(1, 9)}


def ranks(samples, batch, world_size, **options):
    return [ShardedSampler(samples, batch, rank=rank, world_size=world_size, **options) for rank in range(world_size)]


@given(**sizes, seed=st.integers(0, 5), epoch=st.integers(0, 3), shuffle=st.booleans())
def test_every_sample_goes_to_exactly_one_rank(samples, batch, world_size, seed, epoch, shuffle):
    samplers = ranks(samples, batch, world_size, seed=seed, shuffle=shuffle)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    shares = [list(sampler) for sampler in samplers]
    assert {len(share) for share in shares} == {len(samplers[0])}
    seen = []
    for number, of_each_rank in enumerate(zip(*shares, strict=True)):
        lengths = [len(share) for share in of_each_rank]
        assert max(lengths) - min(lengths) <= 1
        assert sum(lengths) == samplers[0].global_batch_size(number)
        seen += itertools.chain(*of_each_rank)
    assert sorted(seen) == list(range(samples))
    # and the global batches do not depend on how many ranks there are
    alone = ShardedSampler(samples, batch, seed=seed, shuffle=shuffle)
    alone.set_epoch(epoch)
    assert list(itertools.chain(*alone)) == seen


@given(**sizes, data=st.data(), drop_last=st.booleans(), later=st.integers(1, 9))
def test_a_saved_position_goes_on_where_it_was_saved(samples, batch, world_size, data, drop_last, later):
    drop_last = drop_last and samples >= batch
    steps = data.draw(st.integers(1, 3 * -(-samples // batch)))

    def stream(sampler, count):
        return list(itertools.islice(itertools.chain.from_iterable(itertools.repeat(sampler)), count))

    for original in ranks(samples, batch, world_size, drop_last=drop_last):
        stream(original, steps)
        resumed = ShardedSampler(samples, batch, rank=original.rank, world_size=world_size, drop_last=drop_last)
        resumed.load_state_dict(original.state_dict())
        assert resumed.epoch == original.epoch == steps // len(original)
        assert original.state_dict()["batch"] == steps % len(original)
        assert stream(resumed, 5) == stream(original, 5)
    # the position means the same to a world of another size
    first = ranks(samples, batch, later, drop_last=drop_last)
    whole = ShardedSampler(samples, batch, drop_last=drop_last)
    stream(whole, steps)
    for sampler in first:
        sampler.load_state_dict(whole.state_dict())
    shares = [next(iter(sampler)) for sampler in first]
    assert list(itertools.chain(*shares)) == next(iter(whole))


def test_the_position_is_right_while_a_batch_is_being_used():
    sampler = ShardedSampler(10, 4)
    assert sampler.state_dict() == {"epoch": 0, "batch": 0}
    positions = [sampler.state_dict() for _ in sampler]
    assert positions == [{"epoch": 0, "batch": 1}, {"epoch": 0, "batch": 2}, {"epoch": 1, "batch": 0}]


def test_after_a_break_it_goes_on():
    whole = list(ShardedSampler(10, 2))
    sampler = ShardedSampler(10, 2)
    first = list(itertools.islice(sampler, 2))
    sampler.set_epoch(0)  # the epoch it is in
    assert first + list(sampler) == whole
    sampler.set_epoch(0)
    assert list(sampler) == whole


def test_epochs_and_seeds_all_differ():
    def order(seed, epoch):
        sampler = ShardedSampler(50, 50, seed=seed)
        sampler.set_epoch(epoch)
        return tuple(next(iter(sampler)))

    places = [*itertools.product([0, 1, 2, 2**32, 2**40], range(4))]
    assert len({order(*place) for place in places}) == len(places)


def test_the_order_does_not_touch_torchs_own_random_numbers():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    list(ShardedSampler(10, 2))
    assert torch.equal(torch.rand(1), expected)


def test_drop_last_and_lengths():
    assert len(ShardedSampler(10, 4)) == 3
    assert len(ShardedSampler(10, 4, drop_last=True)) == 2
    assert [len(share) for share in ShardedSampler([None] * 10, 4, drop_last=True)] == [4, 4]
    assert [ShardedSampler(10, 4).global_batch_size(number) for number in range(3)] == [4, 4, 2]


def test_a_share_may_be_empty():
    last = [list(sampler)[-1] for sampler in ranks(9, 4, 4, shuffle=False)]
    assert last == [[8], [], [], []]


def test_comms_stands_for_rank_and_world_size():
    sampler = ShardedSampler(8, 4, comms=SimpleNamespace(rank=1, world_size=2), shuffle=False)
    assert list(sampler) == [[2, 3], [6, 7]]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_in_a_dataloader(world_size):
    dataset = TensorDataset(torch.arange(23), torch.arange(23) * 2)
    seen = []
    for sampler in ranks(23, 8, world_size):
        loader = DataLoader(dataset, batch_sampler=sampler)
        assert len(loader) == 3
        for inputs, targets in loader:
            assert torch.equal(targets, inputs * 2)
            seen += inputs.tolist()
        assert sampler.epoch == 1
    assert sorted(seen) == list(range(23))


def test_a_dataloader_without_workers_keeps_the_position():
    sampler = ShardedSampler(20, 4)
    batches = iter(DataLoader(list(range(20)), batch_sampler=sampler))
    next(batches), next(batches)
    assert sampler.state_dict() == {"epoch": 0, "batch": 2}


def test_a_dataloader_with_an_empty_share():
    def collate(samples):
        return torch.tensor(samples, dtype=torch.int64)

    loaders = [DataLoader(list(range(9)), batch_sampler=s, collate_fn=collate) for s in ranks(9, 4, 4)]
    assert [len(list(loader)[-1]) for loader in loaders] == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"samples": 0}, "0 samples"),
        ({"samples": []}, "0 samples"),
        ({"batch": 0}, "batch=0"),
        ({"world_size": 0}, "world_size=0"),
        ({"rank": 1}, "rank=1 is outside a world of 1"),
        ({"rank": -1}, "rank=-1"),
        ({"batch": 9, "drop_last": True}, "drop_last leaves nothing of 8 samples"),
    ],
)
def test_impossible_arguments(arguments, words):
    with pytest.raises(UsageError, match=words):
        ShardedSampler(**{"samples": 8, "batch": 2, **arguments})


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"epoch": 0}, "needs batch"),
        ({"epoch": 0, "batch": 5}, "no position in epochs of 4 batches"),
        ({"epoch": -1, "batch": 0}, "epoch -1"),
    ],
)
def test_impossible_states(state, words):
    with pytest.raises(UsageError, match=words):
        ShardedSampler(8, 2).load_state_dict(state)


def test_other_impossible_calls():
    sampler = ShardedSampler(8, 2)
    for call, value, words in (
        (sampler.set_epoch, -1, "epoch=-1"),
        (sampler.global_batch_size, 4, "batch 4 is outside an epoch of 4 batches"),
    ):
        with pytest.raises(UsageError, match=words):
            call(value)
    state = {"epoch": 3, "batch": 4}  # the end of one epoch is the start of the next
    sampler = ShardedSampler(8, 2)
    sampler.load_state_dict(state)
    assert sampler.state_dict() == {"epoch": 4, "batch": 0}
