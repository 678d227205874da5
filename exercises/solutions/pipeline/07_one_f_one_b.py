"""One forward, one backward.

GPipe keeps the activations of all micro-batches before the first backward. But the last rank could do its first
backward right after its first forward. 1F1B does every backward as soon as it can:

    rank 0  F0 F1 F2 F3       B0 F4 B1 F5 B2    B3    B4    B5      warm-up: 3 forwards, one for each rank behind
    rank 1     F0 F1 F2    B0 F3 B1 F4 B2 F5 B3    B4    B5                  2
    rank 2        F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4    B5                     1
    rank 3           F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5                     0

First the warm-up; then, as long as there are forwards, one forward and one backward in turn; then the backwards that
are left. Rank r of p never holds more than p − r activations, however many micro-batches there are.

Now neighbours send to each other at the same time. With sends that wait for their receiver both would wait for ever. So
sends are only started, and what they return, a request, is kept: until it has been waited for, the tensor may still be
on its way.

Lesson: docs/pipeline/06_1f1b.md            Check it: microparallel learn check 1f1b
"""

from collections.abc import Callable

import torch
from torch import nn

import microparallel as mp


def one_f_one_b_step(
    stage: nn.Module,
    comms: mp.Comms,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    loss_function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    microbatches: int,
) -> torch.Tensor | None:
    """Forward and backward of one batch, in micro-batches; as gpipe_step, in another order."""
    rank = comms.rank
    is_first, is_last = rank == 0, rank == comms.world_size - 1
    parts, answers = inputs.tensor_split(microbatches), targets.tensor_split(microbatches)
    kept = {}  # by micro-batch: what entered the stage, and what came out of it
    total = torch.zeros((), dtype=inputs.dtype)
    requests = []  # sends that have begun

    def start_sending(tensor: torch.Tensor, dest: int) -> None:
        """Send without waiting for the receiver."""
        # ┌ hole
        #: # comms.isend(tensor, dest) returns at once, with a request.
        #: raise NotImplementedError("start sending, and keep the request")
        requests.append(comms.isend(tensor, dest))
        # └

    def forward(m: int) -> None:
        """Let micro-batch m through this rank's stage, and keep what its backward will need."""
        received = parts[m]
        if not is_first:
            received = comms.recv_tensor((len(parts[m]), stage.width), rank - 1, inputs.dtype).requires_grad_()
        outputs = stage(received)
        if is_last:
            outputs = loss_function(outputs, answers[m]) * len(answers[m]) / len(targets)
            total.add_(outputs.detach())
        else:
            start_sending(outputs.detach(), rank + 1)
        kept[m] = received, outputs

    def backward(m: int) -> None:
        """Do the backward of micro-batch m, and hand its gradient on to the rank before."""
        received, outputs = kept.pop(m)
        gradient = None if is_last else comms.recv_tensor(outputs.shape, rank + 1, outputs.dtype)
        outputs.backward(gradient)
        if not is_first:
            start_sending(received.grad, rank - 1)

    # ┌ hole
    #: # How many forwards does this rank do to warm up? What if there are fewer micro-batches than that? In the end,
    #: # wait for all requests.
    #: raise NotImplementedError("1F1B's order: warm-up, one forward and one backward in turn, the backwards left over")
    warm_up = min(comms.world_size - 1 - rank, microbatches)
    for m in range(warm_up):
        forward(m)
    for m in range(microbatches - warm_up):
        forward(warm_up + m)
        backward(m)
    for m in range(microbatches - warm_up, microbatches):
        backward(m)
    for request in requests:
        request.wait()
    # └
    return total if is_last else None


if __name__ == "__main__":

    def try_it(comms: mp.Comms) -> str:
        torch.manual_seed(comms.rank)
        stage = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        stage.width = 4
        torch.manual_seed(0)
        inputs, targets = torch.randn(2, 8, 4)
        loss = one_f_one_b_step(stage, comms, inputs, targets, nn.functional.mse_loss, microbatches=4)
        return f"rank {comms.rank}: loss {loss}, size of the gradient {stage[0].weight.grad.norm():.4f}"

    print(*mp.launch(try_it, ranks=3), sep="\n")  # the same numbers as from the naive step
