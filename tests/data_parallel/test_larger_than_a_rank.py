"""A model that fits on no rank: the system itself refuses a rank more memory than a part of the model."""

import ctypes
import gc
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import microparallel as mp
from microparallel.train.checkpoint import latest, save

WIDTH, LAYERS, RANKS = 1024, 24, 4
BYTES = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
BUDGET = 0.85  # of the model, for weights and gradients in parts (a half), and whole units


def build(width, layers):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def held():
    """How many bytes of memory of its own this process has."""
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))


def inputs_of(step, width):
    return torch.randn(4 * RANKS, width, generator=torch.Generator().manual_seed(step))


def train(comms, folder, width, layers, steps):
    """Train, from a checkpoint if these are not the first steps; save a checkpoint, and the whole model."""
    torch.manual_seed(0)
    with mp.deferred_init():
        module = build(width, layers)
    model = mp.FullyShardedDataParallel(module, comms, overlap=False)  # gloo has copies of what is under way
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if steps.start:
        stored = latest(folder, comms)[0].stored_model
        for name, part in model.parameter_parts().items():
            part.tensor.copy_(stored[name].read(part.start, part.stop))
    for step in steps:
        optimizer.zero_grad()
        model(inputs_of(step, width)[4 * comms.rank :][:4]).square().mean().backward()
        optimizer.step()
    parts = {name: part for name, part in model.parameter_parts().items() if part.tensor.numel()}
    save(folder, steps.stop, parts, optimizer.state_dict(), {}, comms=comms)
    model.save(folder / f"{steps}.safetensors")


def within_a_budget(comms, folder, steps):
    """Less than the model for all that a rank has: its parts, their gradients, and the units that are whole."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(-3, 2**16)  # so that memory that is free goes back to the system
    train(comms, folder / "small", 8, 2, range(1))  # imports take memory, too
    gc.collect()
    resource.setrlimit(resource.RLIMIT_DATA, (held() + int(BUDGET * BYTES), resource.RLIM_INFINITY))
    try:
        with pytest.raises(RuntimeError, match="allocate"):
            build(WIDTH, LAYERS)
        gc.collect()
        train(comms, folder, WIDTH, LAYERS, steps)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.mark.slow  # four ranks with a hundred megabytes
def test_it_trains_is_saved_resumed_and_exported(tmp_path, quick_ranks):
    for steps in (range(2), range(2, 4)):
        mp.launch(within_a_budget, RANKS, tmp_path, steps, transport="gloo", timeout=50)
    torch.manual_seed(0)
    plain = build(WIDTH, LAYERS)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        plain(inputs_of(step, WIDTH)).square().mean().backward()
        optimizer.step()
    exported = load_file(tmp_path / f"{range(2, 4)}.safetensors")
    assert list(exported) == list(plain.state_dict())
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(exported[name], tensor, rtol=1e-4, atol=1e-6)
