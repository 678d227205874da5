"""Sums of 16-bit tensors are made in float32: "direct" rounds once, whatever carries the messages."""

import pytest
import torch

import microparallel as mp
from microparallel.comms.message_group import count_messages
from microparallel.comms.slow_links import slow_network

DTYPES = [torch.bfloat16, torch.float16]


def parts(ranks, dtype, size=1003):
    generator = torch.Generator().manual_seed(ranks)
    return [torch.randn(size, generator=generator).mul(10.0**rank).to(dtype) for rank in range(ranks)]


def rounded_once(tensors):
    """What "direct" computes: each slice in float32, from its own rank on, and rounded in the end."""
    ranks, size = len(tensors), tensors[0].numel()
    total = torch.empty_like(tensors[0])
    for owner in range(ranks):
        place = slice(owner * size // ranks, (owner + 1) * size // ranks)
        wide = sum(
            (tensors[(owner + step) % ranks][place].float() for step in range(1, ranks)), tensors[owner][place].float()
        )
        total[place] = wide.to(total.dtype)
    return total


def in_16_bits(tensors):
    return sum(tensors[1:], tensors[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_in_one_process(ranks, dtype):
    tensors = parts(ranks, dtype)
    expected = rounded_once(tensors)
    if ranks > 2:
        assert not torch.equal(expected, in_16_bits(tensors))  # or this test would say nothing
    mp.all_reduce_in_process("direct", tensors)
    assert all(torch.equal(tensor, expected) for tensor in tensors)


@pytest.mark.parametrize("name", ["gather-add", "naive", "ring", "tree", "halving-doubling"])
def test_every_algorithm_agrees_on_all_ranks(name):
    """Where partial sums are sent they are rounded; gather-add sends none, so it rounds once as well."""
    tensors = parts(3, torch.bfloat16)
    exact = sum(tensor.double() for tensor in tensors)
    whole = sum(tensor.float() for tensor in tensors).to(torch.bfloat16)
    mp.all_reduce_in_process(name, tensors)
    assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
    torch.testing.assert_close(tensors[0].double(), exact, rtol=0.02, atol=0.5)
    if name in ("gather-add", "naive"):
        assert torch.equal(tensors[0], whole)


def on_ranks(comms, size):
    summed = []
    for over in (comms, slow_network(comms, 0.0001), count_messages(comms)[0]):
        for dtype in DTYPES:
            tensors = parts(comms.world_size, dtype, size)
            mine = tensors[comms.rank].clone()
            over.all_reduce(mine, algorithm="direct")
            summed.append(torch.equal(mine, rounded_once(tensors)))
    return summed


@pytest.mark.parametrize("ranks", [2, 3])
def test_on_ranks(any_pool, ranks):
    for summed in any_pool.run(on_ranks, ranks, 1003):
        assert summed == [True] * 6


def several_at_once(comms):
    tensors = [torch.full((7,), float(number), dtype=torch.bfloat16) for number in range(4)]
    requests = [comms.all_reduce(tensor, algorithm="direct", async_op=True) for tensor in tensors]
    comms.barrier()
    for request in requests:
        request.wait()
    return [tensor[0].item() for tensor in tensors]


def test_several_under_way(any_pool):
    for found in any_pool.run(several_at_once, 2):
        assert found == [0.0, 2.0, 4.0, 6.0]
