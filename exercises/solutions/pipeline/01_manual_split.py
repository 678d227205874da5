"""Cut a model in two and hand the gradient over.

One process plays both halves of a pipeline. Only numbers cross the cut, because a message between two processes carries
numbers and not autograd's graph. So there are two graphs, and two things to hand over:

    forward    inputs ──▶ part 1 ──▶ sent ═════ numbers ═════▶ received ──▶ part 2 ──▶ loss
    backward              part 1 ◀── sent ◀══ their gradient ══ received ◀── part 2 ◀── loss

Part 2's backward ends where its graph begins: at `received`. From there part 1 continues, with the gradient that part 2
has found.

Lesson: docs/pipeline/02_manual.md            Check it: microparallel learn check manual-split
"""

from collections.abc import Callable

import torch
from torch import nn


def cross_the_cut(sent: torch.Tensor) -> torch.Tensor:
    """What arrives at part 2: the same numbers, without the graph that made them, where a new graph begins."""
    # ┌ hole
    #: # Autograd must not find its way back through the cut; and part 2's backward must leave a gradient here.
    #: raise NotImplementedError("take the numbers without their graph, and ask for their gradient")
    return sent.detach().requires_grad_()
    # └


def split_step(
    part1: nn.Module,
    part2: nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    loss_function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Forward and backward of one batch: both parts have their gradients afterwards. Returns the loss."""
    sent = part1(inputs)
    received = cross_the_cut(sent)
    loss = loss_function(part2(received), targets)
    # ┌ hole
    #: # Part 2's backward first. Then part 1's, which starts from `sent`, with what part 2 found out.
    #: raise NotImplementedError("backward of part 2, then of part 1 with the gradient that crosses the cut")
    loss.backward()
    sent.backward(received.grad)
    # └
    return loss.detach()


if __name__ == "__main__":
    torch.manual_seed(0)
    first, second = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 1)
    x, y = torch.randn(16, 4), torch.randn(16, 1)
    print("loss", split_step(first, second, x, y, nn.functional.mse_loss).item())
    print("part 1's gradient", first[0].weight.grad)
