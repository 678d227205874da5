"""`mp.Checkpointer`: whatever happens to a script's ranks, its weights are those of a run that was left alone."""

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import microparallel as mp
from microparallel.errors import RankFailed
from microparallel.train import checkpoint

SAMPLES, BATCH, STEPS = 50, 12, 10
INPUTS = torch.arange(SAMPLES * 8.0).reshape(SAMPLES, 8).sin()


class Backwards(nn.Module):
    """Uses its layers in another order than it registers them."""

    def __init__(self, dropout):
        super().__init__()
        self.last = nn.Linear(24, 3)
        self.middle = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Dropout(dropout))
        self.first = nn.Linear(8, 24)

    def forward(self, x):
        return self.last(self.middle(torch.tanh(self.first(x))))


def layers(dropout):
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Dropout(dropout), nn.Linear(24, 24), nn.Linear(24, 3))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def built(kind, comms, dropout):
    """The model as a script wraps it, its optimizer, and what does forward and backward of some samples."""
    torch.manual_seed(5)
    name, *options = kind.split()
    in_layers = name in ("pipeline", "replicas") or "layers" in options
    plain = (layers if in_layers else Backwards)(dropout).double()
    if name in ("pipeline", "replicas"):
        replicas = 2 if name == "replicas" else 1
        pipe = mp.Pipeline(plain, comms, microbatches=3, loss_fn=lambda x, _: x.pow(2).mean(), replicas=replicas)
        return pipe, adamw(pipe)
    if name == "whole":
        return plain, adamw(plain)
    if name == "fsdp":
        model = mp.FullyShardedDataParallel(plain, comms)
        return model, adamw(model)
    if name == "topk":
        model = mp.DataParallel(plain, comms, compress=mp.compression.TopK(0.1, smallest=0))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if name == "zero":
        model = mp.DataParallel(plain, comms, shard=options[0])
        return model, mp.ShardedOptimizer(model.parameters(), torch.optim.AdamW, comms, lr=0.01)
    model = mp.DataParallel(plain, comms, bucket_cap_mb=0.002)  # several buckets
    if name == "sgd":  # which does not hide the last bits of gradients
        return model, torch.optim.SGD(model.parameters(), lr=0.3)
    return model, adamw(model)


def backward(model, comms, indices, whole):
    if isinstance(model, mp.Pipeline):
        mine = mp.ShardedSampler(len(whole), len(whole), rank=model.replica, world_size=model.mesh.dp, shuffle=False)
        mine = [whole[index] for index in next(iter(mine))]
        model.step(INPUTS[mine].double(), INPUTS[mine].double(), samples=len(whole), allow_fewer=True)
        return
    inputs = INPUTS[indices].double()
    if isinstance(model, mp.DataParallel):
        with model.weighted(len(indices), len(whole)):
            model(inputs).pow(2).mean().backward()
    else:
        (model(inputs).pow(2).sum() / (3 * len(whole))).backward()


def weights(model):
    if isinstance(model, mp.Pipeline):
        return model.whole_state_dict()
    return model.full_state_dict() if isinstance(model, mp.FullyShardedDataParallel) else model.state_dict()


def trains(comms, folder, kind, kills=(), steps=STEPS, dropout=0.3, every=1):
    """A script with a loop of its own. `kills` are ranks and the steps in which they are killed, once each."""
    model, optimizer = built(kind, comms, dropout)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7)
    sampler = mp.ShardedSampler(SAMPLES, BATCH, comms=comms)
    everyones = mp.ShardedSampler(SAMPLES, BATCH)
    torch.manual_seed(100 + comms.rank)
    begun = []
    things = {"sampler": sampler, "everyones": everyones, "scheduler": scheduler}
    with mp.Checkpointer(folder, comms, model, optimizer, **things) as checkpointer:
        step = checkpointer.restore()
        begun.append(step)
        while step < steps:
            for indices, whole in zip(sampler, everyones, strict=True):
                optimizer.zero_grad()
                backward(model, comms, indices, whole)
                for rank, number in kills:
                    marker = Path(f"{folder}-{number}")
                    if comms.rank == rank and step == number and not marker.exists():
                        marker.touch()
                        os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
                scheduler.step()
                step += 1
                if step % every == 0:
                    checkpointer.save(step)
                if step == steps:
                    break
    return weights(model), begun[0], torch.rand(1).item()


def run(pool, ranks, folder, kind, *arguments, restarts=0, **named):
    launch = {"restarts": restarts, "on_restart": lambda *_: None, "device": "cpu", "timeout": 50}
    return pool.run(trains, ranks, folder, kind, *arguments, **launch, **named)


def assert_same(one, other, **close):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, **{"atol": 0, **close})


KINDS = ["ddp", "zero optimizer", "zero gradients", "fsdp", "pipeline", "topk"]


@pytest.mark.parametrize("kind", KINDS)
def test_killed_ranks_are_started_again_and_nothing_is_lost(warm_ranks, tmp_path, kind):
    """From the copy in memory: the step that failed is the only one that is done again."""
    rank, step = random.Random(kind).randrange(2), random.Random(kind + "!").randrange(1, STEPS)
    whole = run(warm_ranks, 2, tmp_path / "whole", kind)
    again = run(warm_ranks, 2, tmp_path / "killed", kind, [(rank, step)], restarts=1)
    assert [begun for _, begun, _ in again] == [step, step]
    assert [number for _, _, number in again] == [number for _, _, number in whole]
    assert_same(again[0][0], whole[0][0])
    (tmp_path / "killed" / "lock").touch()  # removed when it was released
    checkpoint.load(tmp_path / "killed" / f"step-{STEPS:08d}")


@pytest.mark.parametrize(("kind", "transport"), [("sgd", "shm"), ("sgd", "gloo"), ("replicas", "gloo")])
def test_more_ranks_go_on_bit_for_bit_from_the_disk(warm_ranks, tmp_path, kind, transport):
    """Three ranks and more add up in another order if their gradients lie in other places of a bucket."""
    ranks = 4 if kind == "replicas" else 3
    whole = run(warm_ranks, ranks, tmp_path / "whole", kind, transport=transport)
    run(warm_ranks, ranks, tmp_path / "parts", kind, steps=3, transport=transport)
    again = run(warm_ranks, ranks, tmp_path / "parts", kind, transport=transport)
    assert {begun for _, begun, _ in again} == {3}
    assert_same(again[0][0], whole[0][0])


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (("ddp", 2), ("ddp", 3)),
        (("ddp", 3), ("zero gradients", 2)),
        (("fsdp", 2), ("pipeline", 2)),
        (("replicas", 4), ("fsdp", 3)),
        (("zero optimizer", 2), ("whole", 1)),
    ],
)
def test_any_number_of_ranks_and_any_layout_goes_on(pool, tmp_path, first, then):
    of_layers = " layers" if {"pipeline", "replicas"} & {first[0], then[0]} else ""
    [reference] = run(pool, 1, tmp_path / "one", f"whole{of_layers}", dropout=0)
    for steps, (kind, ranks) in ((4, first), (STEPS, then)):
        results = run(pool, ranks, tmp_path / "run", kind + of_layers, steps=steps, dropout=0)
    assert results[0][1] == 4
    assert_same(results[0][0], reference[0], atol=1e-12)
