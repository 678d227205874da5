"""What people do with a wrapped model beside training it: keep gradients, compile, copy, save, convert, call it with
other parameters."""

import copy
import gc
import io
import pickle
import re

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import microparallel as mp
from microparallel.data_parallel import replicas_are_identical

WIDTH = 6


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)).double()


def share(comms, seed=0):
    generator = torch.Generator().manual_seed(100 * seed + comms.rank)
    return torch.randn(4, WIDTH, dtype=torch.float64, generator=generator)


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def averages(comms, seed):
    """What every rank must find in `grad`: computed by each for itself, on a copy of the plain model."""
    plain = layers()
    plain(share(comms, seed)).pow(2).mean().backward()
    return [comms.all_reduce_mean(gradient.clone()) for gradient in gradients(plain)]


# ── gradients that are kept ─────────────────────────────────────────────────────────────────────────────────────────


def keep(comms, views, bucket_cap_mb):
    """Five steps, whose gradients are kept: as they are, as views of them, and as other objects on the same memory."""
    model = mp.DataParallel(layers(), comms, bucket_cap_mb, gradient_as_bucket_view=views)
    kept = []
    for step in range(5):
        model.zero_grad()
        model(share(comms, step)).pow(2).mean().backward()
        found = gradients(model)
        kept.append([found, [one.view(-1) for one in found], [one.detach() for one in found]][step % 3])
    wanted = [averages(comms, step) for step in range(5)]
    return [
        all(torch.allclose(one.view(-1), other.view(-1)) for one, other in zip(mine, whole, strict=True))
        for mine, whole in zip(kept, wanted, strict=True)
    ]


@pytest.mark.parametrize("bucket_cap_mb", [25, 1e-4], ids=["one bucket", "buckets"])
def test_gradients_that_were_kept_stay_as_they_are(any_pool, bucket_cap_mb):
    assert any_pool.run(keep, 2, False, bucket_cap_mb, timeout=50) == [[True] * 5] * 2


def test_views_of_the_buckets_are_overwritten_as_torch_does_with_the_same_option(pool):
    for right in pool.run(keep, 2, True, 25, transport="shm", timeout=50):
        assert right[-1] and not all(right)


def memory_of(comms):
    """Where the gradients lie in each of six steps: nobody keeps those of the first three."""
    model = mp.DataParallel(layers(), comms)
    places, kept = [], []
    for step in range(6):
        model.zero_grad()
        model(share(comms)).pow(2).mean().backward()
        places.append(model.module[0].weight.grad.data_ptr())
        if step >= 3:
            kept.append(model.module[0].weight.grad)
    return places[1:]  # after the first step buckets are made for the order that was seen


def test_memory_that_nobody_holds_is_used_again(any_pool):
    for second, third, *kept in any_pool.run(memory_of, 2, timeout=50):
        assert second == third == kept[0]
        assert len(set(kept)) == 3


def accumulate(comms, set_to_none):
    """`zero_grad(set_to_none=False)`, and a bucket of which one gradient was dropped and the other is added to."""
    model = mp.DataParallel(layers(), comms)
    for step in range(3):
        model.zero_grad(set_to_none)
        model(share(comms, step)).pow(2).mean().backward()
    assert all(map(torch.allclose, gradients(model), averages(comms, 2)))
    model.module[3].weight.grad = None
    kept = model.module[0].weight.grad
    model(share(comms, 3)).pow(2).mean().backward()
    plain = [first + second for first, second in zip(averages(comms, 2), averages(comms, 3), strict=True)]
    plain[4] = averages(comms, 3)[4]
    # As torch's DDP, an average is added to again and averaged again, which leaves it as it is.
    assert all(map(torch.allclose, gradients(model), plain))
    assert kept is not None


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_added_to(pool, set_to_none):
    pool.run(accumulate, 2, set_to_none, transport="shm", timeout=50)
