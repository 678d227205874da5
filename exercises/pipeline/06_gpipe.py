"""Fill the pipeline with micro-batches, then drain it.

While one rank works on a batch, all other ranks wait. So the batch is cut into micro-batches, which follow each other
through the stages: first all forwards, then all backwards. This order is called GPipe.

    rank 0  F0 F1 F2 F3             B0 B1 B2 B3
    rank 1     F0 F1 F2 F3       B0 B1 B2 B3
    rank 2        F0 F1 F2 F3 B0 B1 B2 B3

Afterwards the gradients must be those of the mean loss over the whole batch, as if it had never been cut; also where
the micro-batches are not equally large. What a micro-batch needs for its backward is kept until then, and no longer.

Lesson: docs/pipeline/05_gpipe.md            Check it: microparallel learn check gpipe
"""

from collections.abc import Callable

import torch
from torch import nn

import microparallel as mp


def gpipe_step(
    stage: nn.Module,
    comms: mp.Comms,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    loss_function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    microbatches: int,
) -> torch.Tensor | None:
    """Forward and backward of one batch, in micro-batches; gradients are added to those that are there.

    As in the naive step, only rank 0 may look at inputs, and only the last rank at targets. loss_function returns the
    mean over the samples that it is given. Returns the mean loss of the batch on the last rank, None on all others.
    """
    rank = comms.rank
    is_first, is_last = rank == 0, rank == comms.world_size - 1
    parts, answers = inputs.tensor_split(microbatches), targets.tensor_split(microbatches)
    kept = {}  # by micro-batch: what entered the stage, and what came out of it (on the last rank, a share of the loss)
    total = torch.zeros((), dtype=inputs.dtype)

    def share_of_loss(outputs: torch.Tensor, m: int) -> torch.Tensor:
        """What micro-batch m adds to the mean loss of the whole batch."""
        # The gradients of all micro-batches are added up. Each may have another number of samples: len(answers[m]).
        raise NotImplementedError("the loss of one micro-batch, weighted so that all of them add up to the mean")

    def forward(m: int) -> None:
        """Let micro-batch m through this rank's stage, and keep what its backward will need."""
        received = parts[m]
        if not is_first:
            received = comms.recv_tensor((len(parts[m]), stage.width), rank - 1, inputs.dtype).requires_grad_()
        outputs = stage(received)
        if is_last:
            outputs = share_of_loss(outputs, m)
            total.add_(outputs.detach())
        else:
            comms.send_tensor(outputs, rank + 1)
        kept[m] = received, outputs

    def backward(m: int) -> None:
        """Do the backward of micro-batch m, and hand its gradient on to the rank before."""
        # Take what forward(m) kept, out of `kept`. The last rank begins with its loss, all others with what the next
        # rank sends: a gradient for which micro-batch? All but the first send one on.
        raise NotImplementedError("the backward of one micro-batch")

    raise NotImplementedError("GPipe's order")
    return total if is_last else None


if __name__ == "__main__":

    def try_it(comms: mp.Comms) -> str:
        torch.manual_seed(comms.rank)
        stage = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        stage.width = 4
        torch.manual_seed(0)
        inputs, targets = torch.randn(2, 8, 4)
        loss = gpipe_step(stage, comms, inputs, targets, nn.functional.mse_loss, microbatches=4)
        return f"rank {comms.rank}: loss {loss}, size of the gradient {stage[0].weight.grad.norm():.4f}"

    print(*mp.launch(try_it, ranks=3), sep="\n")  # the same numbers as from the naive step
