"""Average the gradients of two copies by hand.

Two copies of a network learn from one batch: each sees its own part of the samples. After backward each copy holds the
gradient of the mean over *its* samples. If both get the gradient of the mean over *all* samples instead, they learn
exactly what one network learns from the whole batch.

    copy 0   forward  backward ┐                ┌ optimizer step
                               ├─ you are here ─┤                   the same weights again
    copy 1   forward  backward ┘                └ optimizer step

There are no processes yet, and nothing is sent: both copies are variables of one process.

Lesson: docs/data_parallel/03_manual.md                Check it: microparallel learn check manual-averaging
"""

import copy

import torch
from torch import nn


def average_gradients(copies: list[nn.Module], samples: list[int]) -> None:
    """Give every copy the gradient of the mean loss over all samples.

    copies:   two networks of the same shape; `parameter.grad` is the mean over that copy's own samples
    samples:  how many samples each of them saw; not always equally many
    """
    for same_parameter in zip(*(network.parameters() for network in copies), strict=True):
        # `same_parameter` has one parameter of each copy: the same weight matrix, or the same bias.
        # Put the gradient of the mean over all samples into parameter.grad of both.
        # One copy saw 3 samples and the other 1. How much does each gradient count?
        raise NotImplementedError("average the gradients of one parameter over the copies")


def train_step(
    copies: list[nn.Module],
    optimizers: list[torch.optim.Optimizer],
    parts: list[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """One step of all copies, each on its own part of the batch."""
    for network, optimizer, (inputs, targets) in zip(copies, optimizers, parts, strict=True):
        optimizer.zero_grad()
        nn.functional.mse_loss(network(inputs), targets).backward()
    average_gradients(copies, [len(targets) for _, targets in parts])
    for optimizer in optimizers:
        optimizer.step()


if __name__ == "__main__":
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    copies = [copy.deepcopy(whole), copy.deepcopy(whole)]
    inputs, targets = torch.randn(4, 3).double(), torch.randn(4, 1).double()

    train_step([whole], [torch.optim.SGD(whole.parameters(), lr=0.1)], [(inputs, targets)])
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.1) for network in copies]
    train_step(copies, optimizers, [(inputs[:3], targets[:3]), (inputs[3:], targets[3:])])

    for network in [whole, *copies]:
        print(network[0].bias.tolist()[:3])  # three times the same numbers, except for rounding
