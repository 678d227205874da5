"""A user may set torch's default device, in one thread; what ranks tell each other stays on the CPU all the same.

Here the default is `meta`, where tensors hold nothing: what follows it can neither be sent nor read.
"""

import pytest
import torch
from torch import nn

import microparallel as mp


def elsewhere(comms, function, *arguments):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)]
    model = nn.Sequential(*layers).double()
    inputs = torch.randn(4, 4, dtype=torch.float64) + comms.rank
    targets = torch.randn(4, 2, dtype=torch.float64)
    torch.set_default_device("meta")
    try:
        return function(comms, model, inputs, targets, *arguments)
    finally:
        torch.set_default_device(None)


def replicas(comms, model, inputs, targets, how):
    wrapped = mp.DataParallel(model, comms, **how)
    for _ in range(2):
        wrapped.zero_grad()
        (wrapped(inputs) - targets).square().mean().backward()
    return [bool(wrapped.clip_grad_norm_(1.0).isfinite())]


def shards(comms, model, inputs, targets):
    wrapped = mp.FullyShardedDataParallel(model, comms)
    for _ in range(2):
        (wrapped(inputs) - targets).square().mean().backward()
    return [bool(wrapped.clip_grad_norm_(1.0).isfinite())]


def stages(comms, model, inputs, targets):
    pipe = mp.Pipeline(model, comms, microbatches=2, loss_fn=nn.functional.mse_loss)
    for _ in range(2):
        loss = pipe.step(inputs, targets)
    return [bool(torch.as_tensor(loss, device="cpu").isfinite())]


HOWS = [
    {},
    {"find_unused_parameters": False},
    {"shard": "gradients"},
    {"compress": "randomk:0.5"},
    {"compress": "powersgd:1"},
    {"precision": "bf16"},
]


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_replicas(warm_ranks, how):
    assert all(all(found) for found in warm_ranks.run(elsewhere, 2, replicas, how, transport="shm", timeout=50))


@pytest.mark.parametrize("function", [shards, stages])
def test_parts_of_a_model(warm_ranks, function):
    assert all(all(found) for found in warm_ranks.run(elsewhere, 2, function, transport="shm", timeout=50))
