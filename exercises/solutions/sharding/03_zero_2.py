"""Gradients in parts, also while they accumulate (ZeRO-2).

A large batch comes in several micro-batches, whose gradients add up. ZeRO-1 adds them up whole, on every rank. But a
rank updates only its part of the parameters, so it needs only its part of the sum. Here every gradient is
reduce-scattered as soon as backward has made it, in every micro-batch; what comes back is added to the rank's part of
the sum; and the whole gradient is freed before the next layer's is made:

    backward    B2          B1          B0          B2          B1          B0         update
    rank 0      g2 ─▶ ⅓g2   g1 ─▶ ⅓g1   g0 ─▶ ⅓g0   g2 ─▶ +⅓g2  g1 ─▶ +⅓g1  g0 ─▶ +⅓g0

Every parameter is in parts of its own: flat, filled up with zeros, and cut into as many equal parts as there are ranks.

Lesson: docs/sharding/03_each_its_part.md              Check it: microparallel learn check zero-2
"""

from collections.abc import Callable

import torch
from torch import nn

import microparallel as mp

Batch = tuple[torch.Tensor, torch.Tensor]


def in_parts(tensor: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """A tensor's numbers in a row, filled up with zeros and cut into equal parts."""
    row = tensor.detach().reshape(-1)
    row = torch.cat([row, row.new_zeros(-len(row) % ranks)])
    return list(row.view(ranks, -1).unbind())


class Zero2:
    """Trains a model; this rank keeps its part of the gradients, and the optimizer's state for its part.

    You have comms.reduce_scatter(tensors, op="mean") and comms.all_gather(tensor), as in sharded-optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        comms: mp.Comms,
        make_optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    ) -> None:
        self.model, self.comms = model, comms
        # For each parameter this rank's part of it, in memory of its own; part.grad is its part of the gradients' sum.
        self.parts = {p: in_parts(p, comms.world_size)[comms.rank].clone() for p in model.parameters()}
        self.optimizer = make_optimizer(list(self.parts.values()))
        for parameter in self.parts:
            parameter.register_post_accumulate_grad_hook(self.on_gradient)

    def on_gradient(self, parameter: nn.Parameter) -> None:
        """torch calls this, in every micro-batch, when parameter.grad is there."""
        part = self.parts[parameter]
        # ┌ hole
        #: # Reduce-scatter in_parts(parameter.grad, …) at once. What comes back is added to part.grad, which is None
        #: # before the first micro-batch. And let the whole gradient go: parameter.grad = None.
        #: raise NotImplementedError("reduce-scatter the gradient, keep your part, let the rest go")
        mine = self.comms.reduce_scatter(in_parts(parameter.grad, self.comms.world_size), op="mean")
        part.grad = mine if part.grad is None else part.grad + mine
        parameter.grad = None
        # └

    def step(self, microbatches: list[Batch], loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        """One training step on this rank's micro-batches, which all have the same size."""
        # ┌ hole
        #: # Forward and backward of every micro-batch. loss_fn gives the mean over the samples of one micro-batch, and
        #: # you want the mean over all of them. When may the parameters change?
        #: raise NotImplementedError("go through the micro-batches, then update")
        for inputs, targets in microbatches:
            loss = loss_fn(self.model(inputs), targets) / len(microbatches)
            loss.backward()
        self.update()
        # └

    def update(self) -> None:
        """Update this rank's parts, and hand every rank all new parameters."""
        # ┌ hole
        #: # The optimizer steps, and drops the gradients (zero_grad). Then, for each parameter: gather all its parts,
        #: # cut off the zeros that filled it up, and copy the rest into parameter.data.
        #: raise NotImplementedError("update your parts, and gather those of all ranks")
        self.optimizer.step()
        self.optimizer.zero_grad()
        for parameter, part in self.parts.items():
            row = torch.cat(self.comms.all_gather(part))
            parameter.data.copy_(row[: parameter.numel()].view(parameter.shape))
        # └


if __name__ == "__main__":

    def try_it(comms: mp.Comms) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        zero = Zero2(model, comms, lambda parts: torch.optim.SGD(parts, lr=0.1, momentum=0.9))
        batches = [(torch.full((1, 2), float(comms.rank + number)), torch.ones(1, 1)) for number in range(2)]
        zero.step(batches, nn.functional.mse_loss)
        return [*model.weight.flatten().tolist(), *model.bias.tolist()]

    for numbers in mp.launch(try_it, ranks=2):
        print(numbers)  # twice the same: other samples, and the mean of all their gradients
