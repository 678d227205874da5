"""A batch of any form becomes micro-batches that differ by at most one sample, and one batch again."""

import re
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from microparallel.errors import UsageError
from microparallel.pipeline.microbatches import batch_size, join_batch, sizes, split_batch


class Pair(NamedTuple):
    inputs: torch.Tensor
    mask: torch.Tensor | None


def forms(samples):
    """Batches of that many samples, of every nested form."""
    tensors = st.sampled_from(
        [
            torch.arange(samples),
            torch.arange(samples * 6.0).view(samples, 2, 3),
            torch.arange(samples * 2.0).view(2, samples).T,
            torch.zeros(samples, 0),
        ]
    )
    leaves = tensors | st.sampled_from([None, "text", 3, 2.5, True])
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.sampled_from("abc") | st.integers(0, 2), inner, max_size=3)
            | st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(OrderedDict)
            | st.builds(Pair, inner, inner)
        ),
        max_leaves=6,
    )


def same(one, other):
    ones, form = pytree.tree_flatten(one)
    others, other_form = pytree.tree_flatten(other)
    return form == other_form and all(
        torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(ones, others, strict=True)
    )


@given(data=st.data(), samples=st.integers(1, 12))
def test_split_and_join_round_trip(data, samples):
    batch = (torch.arange(samples), data.draw(forms(samples)))  # one tensor at least
    count = data.draw(st.integers(1, samples))
    parts = split_batch(batch, count)
    assert len(parts) == count
    assert [batch_size(part) for part in parts] == sizes(samples, count)
    assert same(join_batch(parts), batch)


@given(samples=st.integers(1, 200), data=st.data())
def test_sizes_are_those_of_tensor_split(samples, data):
    count = data.draw(st.integers(1, samples))
    assert sizes(samples, count) == [len(part) for part in torch.arange(samples).tensor_split(count)]


def test_sizes_larger_first():
    assert sizes(10, 4) == [3, 3, 2, 2]
    assert sizes(8, 4) == [2, 2, 2, 2]
    assert sizes(4, 4) == [1, 1, 1, 1]


def test_the_form_is_kept():
    batch = {"pair": Pair(torch.arange(4), None), "list": [torch.ones(4, 2), ("text", 7)]}
    first, second = split_batch(batch, 2)
    assert isinstance(first["pair"], Pair)
    assert first["pair"].inputs.tolist() == [0, 1]
    assert second["pair"].inputs.tolist() == [2, 3]
    assert first["pair"].mask is None
    assert second["list"][0].shape == (2, 2)
    assert second["list"][1] == ("text", 7)
    assert list(first) == ["pair", "list"]


def test_parts_are_views():
    batch = torch.zeros(5, 2)
    for index, part in enumerate(split_batch(batch, 3)):
        part += index
    assert batch[:, 0].tolist() == [0, 0, 1, 1, 2]


def test_gradients_flow_through_and_layers_may_work_in_place():
    leaf = torch.ones(5, requires_grad=True)
    outputs = [part.mul_(index + 1) for index, part in enumerate(split_batch(leaf * 1, 2))]
    join_batch(outputs).sum().backward()
    assert leaf.grad.tolist() == [1, 1, 1, 2, 2]


def test_single_numbers_are_stacked():
    joined = join_batch(
        [{"loss": torch.tensor(1.0), "out": torch.zeros(2, 3)}, {"loss": torch.tensor(2.0), "out": torch.ones(1, 3)}]
    )
    assert joined["loss"].tolist() == [1.0, 2.0]
    assert joined["out"].shape == (3, 3)
    assert join_batch([torch.tensor(1.0)]).shape == (1,)


def message(function, *arguments):
    with pytest.raises(UsageError) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


OTHERWISE = "a larger batch, or step(…, allow_fewer=True)"


@pytest.mark.parametrize(
    ("samples", "count", "expected"),
    [
        (5, 8, f"8 micro-batches of a batch of 5 samples: use microbatches=5 or fewer, {OTHERWISE}"),
        (1, 2, f"2 micro-batches of a batch of 1 sample: use microbatches=1, {OTHERWISE}"),
        (5, 0, "microbatches=0: a batch is cut into at least 1"),
        (5, -1, "microbatches=-1: a batch is cut into at least 1"),
    ],
)
def test_impossible_counts(samples, count, expected):
    assert message(split_batch, torch.zeros(samples), count) == expected


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (
            {"x": torch.zeros(5), "y": [torch.zeros(5), torch.zeros(1)]},
            "batch['y'][1] has 1 sample and batch['x'] has 5 samples: "
            "all tensors of a batch need the same length in dimension 0",
        ),
        (
            Pair(torch.zeros(2), torch.zeros(3)),
            "batch.mask has 3 samples and batch.inputs has 2 samples: "
            "all tensors of a batch need the same length in dimension 0",
        ),
        (
            (torch.zeros(2), torch.tensor(0.5)),
            "batch[1] is a single number, without a dimension of samples: pass it as a Python number to give it to "
            "each micro-batch, or as a tensor with one entry per sample",
        ),
        (
            [None, "text"],
            "batch is a list with no tensor in it: pass a tensor, or tuples, lists or dicts of them",
        ),
        (None, "batch is a NoneType with no tensor in it: pass a tensor, or tuples, lists or dicts of them"),
        (torch.zeros(0, 3), "batch has 0 samples: an empty batch cannot be split"),
        ({"x": torch.zeros(0)}, "batch['x'] has 0 samples: an empty batch cannot be split"),
    ],
)
def test_impossible_batches(batch, expected):
    assert message(split_batch, batch, 1) == expected
    assert message(batch_size, batch) == expected
    renamed = re.sub(r"batch(?=\.|\[| is | has )", "targets", expected)
    assert message(split_batch, batch, 1, "targets") == renamed


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([], "no micro-batches to join: pass the output of at least 1"),
        (
            [{"loss": 0.5}, {"loss": 0.7}],
            "micro-batch 1 gave 0.7 where micro-batch 0 gave 0.5: "
            "only tensors can be joined, so return it as one from each",
        ),
        (
            [torch.zeros(2), None],
            "micro-batch 1 gave None where micro-batch 0 gave a tensor of shape (2,): "
            "only tensors can be joined, so return it as one from each",
        ),
        (
            [1, torch.zeros(2)],
            "micro-batch 1 gave a tensor of shape (2,) where micro-batch 0 gave 1: "
            "only tensors can be joined, so return it as one from each",
        ),
    ],
)
def test_parts_that_cannot_be_joined(parts, expected):
    assert message(join_batch, parts) == expected


def test_parts_of_different_form():
    with pytest.raises(UsageError, match=r"micro-batch 1 gave .* and micro-batch 0 gave .*one and the same form"):
        join_batch([[torch.zeros(2)], (torch.zeros(2),)])
