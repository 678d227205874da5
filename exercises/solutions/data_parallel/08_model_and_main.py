"""Train one model on several ranks.

Now there are real processes. Each has its own model, made with its own random numbers. Together they must behave like
one process that trains one model on the whole batch. That needs three things:

    the same start        rank 0's weights go to all ranks, once
    its own samples       every sample of the batch belongs to exactly one rank
    the same gradients    after backward they are averaged, as you did by hand; then all ranks take the same step

    rank 0   forward  backward │ all-reduce every gradient │ optimizer step     the same weights again,
    rank 1   forward  backward │ all-reduce every gradient │ optimizer step     to the last bit

This is naive data parallelism. It is right, and it is slow, because no rank computes while gradients travel.

Lesson: docs/data_parallel/07_naive.md                 Check it: microparallel learn check model-and-main
"""

import torch
from torch import nn

import microparallel as mp


def same_start(model: nn.Module, comms: mp.Comms) -> None:
    """Give every rank the weights of rank 0.

    You have comms.broadcast(tensor, src), which writes rank src's tensor into that of every rank. `parameter.data` is a
    parameter's tensor, without autograd watching.
    """
    # ┌ hole
    #: # Every parameter of the model, one after another.
    #: raise NotImplementedError("broadcast the weights of rank 0")
    for parameter in model.parameters():
        comms.broadcast(parameter.data, 0)
    # └


def my_samples(samples: int, comms: mp.Comms) -> slice:
    """Which samples of the batch are this rank's, as a slice; the ranks' slices together are the whole batch."""
    # ┌ hole
    #: # Samples 0 to 3 for rank 0 and 4 to 7 for rank 1, if there are 8. And if there are 7 for 3 ranks?
    #: raise NotImplementedError("choose this rank's samples")
    begin = samples * comms.rank // comms.world_size
    end = samples * (comms.rank + 1) // comms.world_size
    return slice(begin, end)
    # └


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor, comms: mp.Comms
) -> float:
    """One step on a batch that the ranks share; returns the mean loss over the whole batch, the same on every rank.

    You have comms.all_reduce(tensor), which replaces every rank's tensor by the sum of all of them.
    """
    mine = my_samples(len(inputs), comms)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs[mine]), targets[mine])  # the mean over my own samples
    # Only of my own samples so far. The mean over no samples is NaN, so a rank without any begins with 0.
    mean_loss = loss.detach().clone() if len(inputs[mine]) else torch.zeros_like(loss)
    # ┌ hole
    #: # Backward; then the gradients of all ranks, and mean_loss too, become those of the whole batch, in place.
    #: # Ranks may have different numbers of samples. How much does this rank's mean count?
    #: raise NotImplementedError("backward, and average gradients and loss over the ranks")
    share = len(inputs[mine]) / len(inputs)  # multiplied by it, sums over the ranks are means over all samples
    (loss * share).backward()
    for parameter in model.parameters():
        comms.all_reduce(parameter.grad)
    mean_loss *= share
    comms.all_reduce(mean_loss)
    # └
    optimizer.step()
    return mean_loss.item()


def main(comms: mp.Comms, steps: int = 20) -> list[float]:
    """Train, and return the losses."""
    torch.manual_seed(comms.rank)  # every rank begins with other weights, until same_start
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    same_start(model, comms)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)  # all ranks see the same batch, and each takes its samples from it
    inputs = torch.randn(10, 4, generator=generator).double()
    targets = inputs.sum(1, keepdim=True)
    return [train_step(model, optimizer, inputs, targets, comms) for _ in range(steps)]


if __name__ == "__main__":
    for ranks in (1, 3):
        losses = mp.launch(main, ranks)[0]
        print(f"world size {ranks}: {losses[0]:.6f} … {losses[-1]:.6f}")  # the same numbers for 1 and 3
