"""Buckets: what goes together, how one fills and leaves, and what comes back. (Parity is in test_hooks.py.)"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import microparallel as mp
from microparallel.course.buckets import in_buckets


class Pending:
    """An all-reduce that is back when it is waited for: doubled, so that one can tell."""

    def __init__(self, tensor):
        self.tensor = tensor

    def wait(self):
        return self.tensor.mul_(2)


class Doubling:
    """A world that gives back twice what it is given, and writes down what that was."""

    rank, world_size = 0, 1

    def __init__(self):
        self.sent = []

    def all_reduce(self, tensor, op="sum", async_op=False):
        if async_op:
            self.sent.append((tensor.numel(), op))
            return Pending(tensor)
        return tensor


@pytest.fixture
def comms():
    return Doubling()


def parameters(*sizes, dtype=torch.float32):
    return [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(1, 400))
def test_every_parameter_is_in_one_bucket_in_order_and_buckets_are_closed_when_they_have_enough(sizes, enough):
    given_parameters = parameters(*sizes)
    groups = in_buckets(given_parameters, enough)
    assert [id(parameter) for group in groups for parameter in group] == [id(p) for p in given_parameters]
    for group in groups[:-1]:
        assert sum(p.nbytes for p in group) >= enough
        assert sum(p.nbytes for p in group[:-1]) < enough


def test_dtypes_are_kept_apart():
    half, single = parameters(2, 2, dtype=torch.float16), parameters(2, 2)
    mixed = [half[0], half[1], single[0], half[0], single[1]]
    assert [len(group) for group in in_buckets(mixed, 1e6)] == [2, 1, 1, 1]


def test_a_bucket_fills_leaves_and_gives_gradients_back_as_views(comms):
    weight, bias = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3))
    bucket = mp.course.GradientBucket([bias, weight])
    weight.grad, bias.grad = torch.full((2, 3), 5.0), torch.full((3,), 7.0)
    bucket.put(weight)
    assert (bucket.ready, bucket.full) == (1, False)
    bucket.put(bias)
    assert bucket.full
    assert bucket.buffer.tolist() == [7.0] * 3 + [5.0] * 6
    bucket.start(comms)
    bucket.finish()
    assert comms.sent == [(9, "mean")]
    assert (bucket.ready, bucket.full) == (0, False)
    assert torch.equal(weight.grad, torch.full((2, 3), 10.0)) and torch.equal(bias.grad, torch.full((3,), 14.0))
    bucket.buffer.fill_(1)
    assert weight.grad.sum() == 6 and bias.grad.sum() == 3  # they are the buffer


def test_a_bucket_without_a_gradient_holds_zeros_not_what_it_held_before(comms):
    weight, bias = parameters(2, 2)
    bucket = mp.course.GradientBucket([weight, bias])
    weight.grad = bias.grad = torch.ones(2)
    for _ in range(2):
        bucket.put(weight)
        bucket.put(bias)
        assert bucket.full
        bucket.start(comms)
        bucket.finish()
        weight.grad, bias.grad = torch.ones(2), None
    bucket.put(weight)
    bucket.put(bias)
    assert bucket.buffer.tolist() == [1.0, 1.0, 0.0, 0.0]


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(6))  # 256 bytes each
        self.used = 6

    def forward(self, inputs):
        for layer in list(self.layers)[: self.used]:
            inputs = layer(inputs)
        return inputs


def backward(model):
    model(torch.ones(2, 8)).sum().backward()


def test_full_buckets_leave_while_backward_goes_on(comms):
    model = Layers()
    sent_before = {}
    for index, layer in enumerate(model.layers):
        layer.weight.register_post_accumulate_grad_hook(lambda _, i=index: sent_before.update({i: len(comms.sent)}))
    hooks = mp.course.BucketedDDPHooks(model, comms, bucket_size_mb=512 / 2**20)
    assert [[id(p) for p in bucket.parameters] for bucket in hooks.buckets] == [
        [id(model.layers[second].weight), id(model.layers[second - 1].weight)] for second in (5, 3, 1)
    ]
    backward(model)
    assert sent_before == {5: 0, 4: 0, 3: 1, 2: 1, 1: 2, 0: 2}
    hooks.finish()
    assert comms.sent == [(128, "mean")] * 3


def test_an_incomplete_bucket_holds_later_ones_back_until_finish_and_never_the_next_step(comms):
    model = Layers()
    hooks = mp.course.BucketedDDPHooks(model, comms, bucket_size_mb=512 / 2**20)
    model.used = 5  # layer 5 is in the first bucket
    backward(model)
    assert comms.sent == []
    hooks.finish()
    assert len(comms.sent) == 3
    assert model.layers[5].weight.grad is None  # no rank used it
    model.used = 6
    model.zero_grad()
    backward(model)
    assert len(comms.sent) == 6
    hooks.finish()


def test_gradients_accumulate_in_their_buckets(comms):
    model = Layers()
    hooks = mp.course.BucketedDDPHooks(model, comms)
    backward(model)
    hooks.finish()
    weight = model.layers[0].weight
    once, place = weight.grad.clone(), weight.grad.data_ptr()
    backward(model)
    hooks.finish()
    assert weight.grad.data_ptr() == place
    torch.testing.assert_close(weight.grad, 2 * (once + once / 2))  # everything there is averaged: here, doubled


@pytest.mark.parametrize("size", [0, -1, 0.0, math.nan, -math.inf, "25", None])
def test_a_size_that_is_none_is_refused(comms, size):
    with pytest.raises(mp.errors.UsageError, match=r"bucket_size_mb=.*above 0; try 25.0"):
        mp.course.register_ddp_hooks(Layers(), comms, bucket_size_mb=size)


def test_a_bucket_of_several_kinds_or_none_is_refused():
    several = [*parameters(1), *parameters(1, dtype=torch.float16)]
    for contents, words in ((several, "torch.float16 on cpu, torch.float32 on cpu"), ([], "no parameters")):
        with pytest.raises(mp.errors.UsageError, match=words):
            mp.course.GradientBucket(contents)
