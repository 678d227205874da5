"""One batch through all stages and back.

Every rank has one stage, a contiguous run of the model's layers. The batch enters at rank 0; what a stage returns goes
to the next rank; the last rank computes the loss. Then gradients go the other way.

    rank 0   F ─▶                      ─▶ B
    rank 1       ─▶ F ─▶        ─▶ B ─▶            F a forward, B a backward, ─▶ a message to the neighbour
    rank 2              ─▶ F B ─▶

It is what you did at one cut (manual-split), with a message where the cut was. At any time one rank works, and all
others wait. The next exercises change that.

Lesson: docs/pipeline/04_naive.md            Check it: microparallel learn check naive-pipeline
"""

from collections.abc import Callable

import torch
from torch import nn

import microparallel as mp


def naive_step(
    stage: nn.Module,
    comms: mp.Comms,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    loss_function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor | None:
    """Forward and backward of one batch; afterwards every rank's stage has its gradients.

    Every rank is given inputs and targets, to know how many samples there are. But only rank 0 may put the inputs into
    its stage, and only the last rank may look at the targets: on all other ranks these tensors hold nan, not numbers.
    Returns the loss on the last rank, and None on all others.

    You have comms.send_tensor(tensor, dest) and comms.recv_tensor(shape, src, dtype).
    """
    rank = comms.rank
    is_first, is_last = rank == 0, rank == comms.world_size - 1
    shape, dtype = (len(inputs), stage.width), inputs.dtype  # of every tensor that crosses from stage to stage

    # What enters this rank's stage, and from where? Its gradient will be needed later. Then: where does what the
    # stage returns go?
    raise NotImplementedError("the forward: receive, compute, send on")

    loss = None
    # The last rank's backward begins with the loss, that of all others with the gradient that the next rank sends.
    # And who waits for the gradient of what this rank received?
    raise NotImplementedError("the backward: the same way, in the other direction")
    return None if loss is None else loss.detach()


if __name__ == "__main__":

    def try_it(comms: mp.Comms) -> str:
        torch.manual_seed(comms.rank)
        stage = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        stage.width = 4
        torch.manual_seed(0)
        inputs, targets = torch.randn(2, 8, 4)
        loss = naive_step(stage, comms, inputs, targets, nn.functional.mse_loss)
        return f"rank {comms.rank}: loss {loss}, size of the gradient {stage[0].weight.grad.norm():.4f}"

    print(*mp.launch(try_it, ranks=3), sep="\n")
