"""Data parallelism in one process: a replica of the model on every device.

Two GPUs need no two processes. One process can copy the model to both, give each a part of the batch, and average the
gradients itself:

    batch ─┬─ part 0 ─▶ replica 0   forward  backward ─┐             ┌─▶ replica 0 ┐
           ├─ part 1 ─▶ replica 1   forward  backward ─┼─▶ average ──┼─▶ replica 1 ├─ each takes its optimizer's step
           └─ part 2 ─▶ replica 2   forward  backward ─┘  on the CPU └─▶ replica 2 ┘
           on its device             at the same time

An example: 5 samples on 3 devices are parts of 2, 2 and 1; the averaged gradient is (2·g0 + 2·g1 + 1·g2) / 5. With 2
samples the third part is empty: its replica computes nothing, and is given the average like the others.

torch.nn.DataParallel is the same idea in another form. In every forward it copies the weights anew from the first
device to the others, and it collects the *outputs* there, where the one loss is computed; backward then adds the
gradients up in the first device's model, which is the only one that an optimizer updates. You copy once, and every
replica updates itself. The results are the same.

The check needs no GPU. It uses the CPU several times, and "meta", a device of torch that keeps shapes and no numbers:
so it sees whether a tensor was brought to its device. (Layers that keep statistics of their batches, such as
BatchNorm, are left out here.)

Lesson: docs/data_parallel/03_manual.md                Check it: microparallel learn check replicas
"""

import copy
from collections.abc import Callable

import torch
from torch import nn

Part = tuple[torch.Tensor, torch.Tensor]  # inputs and targets of one replica, on its device


def replicate(model: nn.Module, devices: list[str]) -> list[nn.Module]:
    """One copy of the model for each device, on that device; the model itself stays where it is."""
    # ┌ hole
    #: # module.to(device) moves the module itself, and returns it. What do you need before that?
    #: raise NotImplementedError("copy the model to every device")
    return [copy.deepcopy(model).to(device) for device in devices]
    # └


def share_out(inputs: torch.Tensor, targets: torch.Tensor, devices: list[str]) -> list[Part]:
    """Cut a batch into a part for each device, and bring it there.

    Every sample is in one part. The sizes differ by at most one; with fewer samples than devices some parts are empty.
    """
    # ┌ hole
    #: # torch has several functions that cut a tensor. Which of them always gives as many parts as you ask for?
    #: raise NotImplementedError("cut the batch into parts, and bring each to its device")
    ranges = torch.arange(len(targets)).tensor_split(len(devices))
    return [(inputs[rows].to(device), targets[rows].to(device)) for rows, device in zip(ranges, devices, strict=True)]
    # └


def forward_and_backward(
    replicas: list[nn.Module], parts: list[Part], loss_fn: Callable[..., torch.Tensor]
) -> list[torch.Tensor]:
    """Let each replica compute the gradients of its part's mean loss; returns these losses.

    A replica without samples computes nothing: its loss is any tensor, and is not used. The losses are tensors, not
    numbers: `loss.item()` waits for its GPU, and the next replica would begin only after that.
    """
    losses = []
    for replica, (inputs, targets) in zip(replicas, parts, strict=True):
        # ┌ hole
        #: # Which replica has nothing to compute?
        #: raise NotImplementedError("forward and backward of one replica")
        if len(targets) == 0:
            losses.append(torch.zeros(()))
            continue
        loss = loss_fn(replica(inputs), targets)
        loss.backward()
        losses.append(loss.detach())
        # └
    return losses


def average_gradients(replicas: list[nn.Module], samples: list[int]) -> None:
    """Give every replica the gradient of the mean loss over all samples, by way of the CPU.

    samples: how many samples each replica saw; one that saw none has no gradients (parameter.grad is None)
    """
    for same_parameter in zip(*(replica.parameters() for replica in replicas), strict=True):
        if all(parameter.grad is None for parameter in same_parameter):
            continue  # a frozen parameter
        # ┌ hole
        #: # Bring the gradients to the CPU (tensor.cpu()), average them there, each by its samples, and give every
        #: # replica the average, as a tensor of its own on the replica's device (parameter.device).
        #: raise NotImplementedError("average one parameter's gradients on the CPU, and write the average back")
        total = torch.zeros(same_parameter[0].shape, dtype=same_parameter[0].dtype)
        for parameter, seen in zip(same_parameter, samples, strict=True):
            if parameter.grad is not None:
                total += parameter.grad.cpu() * seen
        for parameter in same_parameter:
            parameter.grad = (total / sum(samples)).to(parameter.device)
        # └


def train_step(
    replicas: list[nn.Module],
    optimizers: list[torch.optim.Optimizer],
    devices: list[str],
    batch: tuple[torch.Tensor, torch.Tensor],
    loss_fn: Callable[..., torch.Tensor],
) -> float:
    """One step of all replicas; returns the mean loss of the whole batch."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    parts = share_out(*batch, devices)
    samples = [len(targets) for _, targets in parts]
    losses = forward_and_backward(replicas, parts, loss_fn)
    average_gradients(replicas, samples)
    for optimizer in optimizers:
        optimizer.step()
    return sum(loss.item() * seen for loss, seen in zip(losses, samples, strict=True) if seen) / sum(samples)


if __name__ == "__main__":
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    devices = gpus if len(gpus) > 1 else ["cpu"] * 3

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    replicas = replicate(model, devices)
    optimizers = [torch.optim.SGD(replica.parameters(), lr=0.1) for replica in replicas]
    theirs = nn.DataParallel(model.to(devices[0]))  # without GPUs it calls the model itself
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    print("step   your loss        nn.DataParallel's")
    for step, size in enumerate((7, 7, 2)):
        inputs, targets = torch.randn(size, 3).double(), torch.randn(size, 1).double()
        mine = train_step(replicas, optimizers, devices, (inputs, targets), nn.functional.mse_loss)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(theirs(inputs.to(devices[0])), targets.to(devices[0]))
        loss.backward()
        optimizer.step()
        print(f"{step:>4}   {mine:.12f}   {loss.item():.12f}")
