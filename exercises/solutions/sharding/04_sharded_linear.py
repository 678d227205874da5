"""A linear layer of whose weight every rank keeps a part (ZeRO-3).

ZeRO-3 cuts the weights, too. A rank keeps some rows of each weight. When it needs the whole weight, it gathers it from
all ranks, computes with it, and frees it:

    forward     gather the weight    outputs = inputs · weightᵀ                 free the weight
    backward    gather it again      the gradient of inputs, and of the weight  free the weight
                reduce-scatter the weight's gradient: each rank keeps its part  free the whole gradient

Rank r keeps the rows from r·n up to (r+1)·n. n is the number of rows divided by the number of ranks, rounded up. Where
there are no more rows, rows of zeros fill the part up:

    7 rows, 3 ranks   │ 0 1 2 │ 3 4 5 │ 6 · · │      n = 3; rank 2 keeps one row, and two of zeros

Between forward and backward a rank keeps its part and the inputs, and nothing else. What autograd saves stays in memory
until the backward: if you save the whole weight, all layers' weights are in memory at once, and nothing is gained.

Lesson: docs/sharding/04_gathered_on_demand.md         Check it: microparallel learn check sharded-linear
"""

from typing import Any

import torch
from torch import nn

import microparallel as mp


def in_parts(weight: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """The rows of a weight, or of its gradient, filled up with rows of zeros and cut into equal parts: views."""
    missing = -len(weight) % ranks
    filled = torch.cat([weight, weight.new_zeros(missing, *weight.shape[1:])])
    return list(filled.view(ranks, -1, *weight.shape[1:]).unbind())


def part_of(weight: torch.Tensor, comms: mp.Comms) -> torch.Tensor:
    """This rank's part of a weight. No rank keeps the whole weight after this."""
    # ┌ hole
    #: # One of in_parts(…). A view keeps the memory of all parts: take it into memory of its own.
    #: raise NotImplementedError("take this rank's part, in memory of its own")
    return in_parts(weight, comms.world_size)[comms.rank].clone()
    # └


def gathered(part: torch.Tensor, rows: int, comms: mp.Comms) -> torch.Tensor:
    """The whole weight, which has that many rows.

    You have comms.all_gather(tensor), which returns a list with each rank's tensor.
    """
    # ┌ hole
    #: # All parts below each other (torch.cat), without the zeros at the end.
    #: raise NotImplementedError("gather all parts of the weight")
    return torch.cat(comms.all_gather(part))[:rows]
    # └


class GatheredLinear(torch.autograd.Function):
    """outputs = inputs · weightᵀ, with a weight that is gathered on demand. torch calls `backward` by itself."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, part: torch.Tensor, rows: int, comms: mp.Comms) -> torch.Tensor:
        """`inputs` are this rank's samples, one a row. Returns one row of outputs for each."""
        ctx.rows, ctx.comms = rows, comms
        # ┌ hole
        #: # Gather, and compute. For backward keep two tensors with ctx.save_for_backward(…): which two?
        #: raise NotImplementedError("gather the weight, compute, keep what backward needs")
        ctx.save_for_backward(inputs, part)
        return inputs @ gathered(part, rows, comms).T
        # └

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        """`gradient` is that of the outputs. Returns one for each argument of forward: rows and comms have none.

        Every rank's loss is the mean over its own samples, and you want the mean over all of them. So the gradients of
        the weight are averaged over ranks: comms.reduce_scatter(tensors, op="mean") takes a list with a tensor for each
        rank and returns the mean of those in place `comms.rank`.
        """
        # ┌ hole
        #: # ctx.saved_tensors has what forward has saved. Gather again. The gradient of the inputs is gradient ·
        #: # weight, that of the weight is gradientᵀ · inputs. The inputs are this rank's own samples, so their gradient
        #: # stays on this rank; of the weight's gradient return this rank's part.
        #: raise NotImplementedError("gather again, compute both gradients, reduce-scatter the weight's")
        inputs, part = ctx.saved_tensors
        of_inputs = gradient @ gathered(part, ctx.rows, ctx.comms)
        of_weight = gradient.T @ inputs
        of_part = ctx.comms.reduce_scatter(in_parts(of_weight, ctx.comms.world_size), op="mean")
        return of_inputs, of_part, None, None
        # └


class ShardedLinear(nn.Module):
    """The layer: its only parameter is this rank's part of the weight, and any torch optimizer can update it."""

    def __init__(self, weight: torch.Tensor, comms: mp.Comms) -> None:
        super().__init__()
        self.rows, self.comms = len(weight), comms
        self.part = nn.Parameter(part_of(weight, comms))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The outputs for this rank's samples."""
        return GatheredLinear.apply(inputs, self.part, self.rows, self.comms)


if __name__ == "__main__":

    def try_it(comms: mp.Comms) -> tuple[list[float], list[list[float]]]:
        layer = ShardedLinear(torch.arange(6.0).view(3, 2), comms)
        outputs = layer(torch.full((1, 2), float(comms.rank + 1)))
        outputs.sum().backward()
        return outputs.flatten().tolist(), layer.part.grad.tolist()

    for outputs, gradient in mp.launch(try_it, ranks=2):
        print(outputs, gradient)  # [1, 5, 9] and twice as much; gradients of 1.5, and a row of zeros that fills up
