"""An optimizer of which every rank keeps a part (ZeRO-1).

With data parallelism every rank keeps the optimizer's state for all parameters, and all ranks keep the same. Here each
rank keeps it only for its own part of the parameters. All parameters lie side by side in a row, which is cut into as
many equal parts as there are ranks:

    row     │ weight of 0      │ bias of 0 │ weight of 2               │ bias of 2 │ 0 │     the 0 fills the row up
    parts   │ rank 0                │ rank 1                │ rank 2                 │

A step:  the gradients are reduce-scattered, so rank r gets part r of their mean
         rank r updates its part of the parameters
         the new parts are all-gathered, and every rank has all new parameters

Lesson: docs/sharding/03_each_its_part.md              Check it: microparallel learn check sharded-optimizer
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn

import microparallel as mp


class ShardedOptimizer:
    """A torch optimizer for this rank's part of the parameters.

    You have comms.reduce_scatter(tensors, op="mean"), which takes a list with one tensor for each rank and returns the
    mean of those in place `comms.rank`; and comms.all_gather(tensor), which returns a list with each rank's tensor. All
    ranks must give it tensors of the same shape.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        comms: mp.Comms,
        make_optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    ) -> None:
        self.parameters = list(parameters)
        self.comms = comms
        # This rank's part of the parameters, in a tensor of its own: in_parts(self.parameters) has all parts. The
        # optimizer is made once, here, and knows nothing else: make_optimizer([self.part]).
        raise NotImplementedError("make an optimizer for this rank's part")

    def in_parts(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Lay tensors side by side in a row, fill it up with zeros, and cut it into one part for each rank."""
        row = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        # The parts must have the same size. How many zeros are missing? (row.new_zeros(3) makes three.)
        raise NotImplementedError("fill the row up and cut it")

    def step(self) -> None:
        """Called after backward, when parameter.grad holds this rank's own gradients."""
        # This rank's part of the mean gradient becomes self.part.grad; the optimizer steps; the parts of all ranks
        # are gathered, and hand_out writes them into the parameters.
        raise NotImplementedError("average, update your part, gather")

    def hand_out(self, parts: list[torch.Tensor]) -> None:
        """Copy the parts, which belong together, into the parameters."""
        row, start = torch.cat(parts), 0
        for parameter in self.parameters:
            parameter.data.copy_(row[start : start + parameter.numel()].view(parameter.shape))
            start += parameter.numel()


if __name__ == "__main__":

    def try_it(comms: mp.Comms) -> tuple[list[float], int]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = ShardedOptimizer(model.parameters(), comms, lambda own: torch.optim.Adam(own, lr=0.1))
        model(torch.full((1, 2), float(comms.rank))).sum().backward()
        optimizer.step()
        return model.weight.flatten().tolist(), optimizer.optimizer.state[optimizer.part]["exp_avg"].numel()

    for weight, kept in mp.launch(try_it, ranks=2):
        print(weight, "momentum of", kept, "numbers")  # twice the same weights; each rank keeps 2 of 3 numbers
