"""One forward, one backward.

GPipe keeps the activations of all micro-batches until the first backward. But the last rank could do its first
backward right after its first forward. In 1F1B each rank does every backward as soon as it can:

    rank 0  F0 F1 F2 F3       B0 F4 B1 F5 B2    B3    B4    B5      warm-up: 3 forwards, one for each rank behind
    rank 1     F0 F1 F2    B0 F3 B1 F4 B2 F5 B3    B4    B5                  2
    rank 2        F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4    B5                     1
    rank 3           F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5                     0

First comes the warm-up. Then, as long as there are forwards, the rank does one forward and one backward in turn. At the
end it does the backwards that are left. Rank r of p never holds more than p − r activations, however many micro-batches
there are.

Now two neighbours send to each other at the same time. If each send waited for its receiver, both ranks would wait for
ever. So a rank only *starts* its sends. What it gets back is a request, which it keeps: until it has waited for the
request, the tensor may still be on its way.

You write the whole step, in this order; the check goes the same way:

    1  order                               what a rank computes, as words: nothing runs yet
    2  share_of_loss, forward, backward    one rank alone, which sends nothing
    3  start_sending, wait_for_sends       several ranks; forward and backward get their messages

Lesson: docs/pipeline/06_1f1b.md            Check it: microparallel learn check 1f1b
"""

from collections.abc import Callable

import torch
from torch import nn

import microparallel as mp


def order(rank: int, ranks: int, microbatches: int) -> list[str]:
    """What a rank computes, in order: "F2" is the forward of micro-batch 2, and "B2" its backward.

    Rank 2 in the drawing has ["F0", "F1", "B0", "F2", "B1", …]. There may be fewer micro-batches than ranks.
    """
    # ┌ hole
    #: # How many forwards does this rank do to warm up? What if there are fewer micro-batches than that?
    #: raise NotImplementedError("1F1B's order: the warm-up, one forward and one backward in turn, the backwards left")
    warm_up = min(ranks - 1 - rank, microbatches)
    words = [f"F{m}" for m in range(warm_up)]
    for m in range(microbatches - warm_up):
        words += [f"F{warm_up + m}", f"B{m}"]
    return words + [f"B{m}" for m in range(microbatches - warm_up, microbatches)]
    # └


def one_f_one_b_step(
    stage: nn.Module,
    comms: mp.Comms,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    loss_function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    microbatches: int,
) -> torch.Tensor | None:
    """Forward and backward of one batch, in micro-batches; gradients are added to those that are there.

    As in gpipe_step, only rank 0 may look at inputs, and only the last rank at targets. loss_function returns the mean
    over the samples that it is given. Returns the mean loss of the batch on the last rank, None on all others.

    You have comms.recv_tensor(shape, src, dtype), and comms.isend(tensor, dest), which returns a request at once;
    request.wait() returns when you may change or forget the tensor.
    """
    rank = comms.rank
    is_first, is_last = rank == 0, rank == comms.world_size - 1
    parts, answers = inputs.tensor_split(microbatches), targets.tensor_split(microbatches)
    kept = {}  # by micro-batch: what entered the stage, and what came out of it (on the last rank, a share of the loss)
    total = torch.zeros((), dtype=inputs.dtype)  # on the last rank, the shares of the loss so far
    requests = []  # sends that have begun

    def share_of_loss(outputs: torch.Tensor, m: int) -> torch.Tensor:
        """What micro-batch m adds to the mean loss of the whole batch."""
        # ┌ hole
        #: # Micro-batch m has len(answers[m]) samples, and the batch has len(targets).
        #: raise NotImplementedError("the loss of one micro-batch, weighted by its samples")
        return loss_function(outputs, answers[m]) * len(answers[m]) / len(targets)
        # └

    def start_sending(tensor: torch.Tensor, dest: int) -> None:
        """Send without waiting for the receiver."""
        # ┌ hole
        #: raise NotImplementedError("start the send, and keep the request in `requests`")
        requests.append(comms.isend(tensor, dest))
        # └

    def forward(m: int) -> None:
        """Let micro-batch m through this rank's stage, and keep what its backward will need."""
        # ┌ hole
        #: # What enters the stage: parts[m], or what the rank before sends? That has len(parts[m]) rows of stage.width
        #: # numbers. What comes out goes to the next rank. On the last rank it becomes a share of the loss, which is
        #: # added to `total`. Keep what went in and what came out, as kept[m].
        #: raise NotImplementedError("the forward of micro-batch m")
        received = parts[m]
        if not is_first:
            received = comms.recv_tensor((len(parts[m]), stage.width), rank - 1, inputs.dtype).requires_grad_()
        outputs = stage(received)
        if is_last:
            outputs = share_of_loss(outputs, m)
            total.add_(outputs.detach())
        else:
            start_sending(outputs.detach(), rank + 1)
        kept[m] = received, outputs
        # └

    def backward(m: int) -> None:
        """Do the backward of micro-batch m, and hand its gradient on to the rank before."""
        # ┌ hole
        #: # Take what forward(m) kept, out of `kept`. With what does the backward begin on the last rank, and with what
        #: # on all others? What does the rank before need?
        #: raise NotImplementedError("the backward of micro-batch m")
        received, outputs = kept.pop(m)
        gradient = None if is_last else comms.recv_tensor(outputs.shape, rank + 1, outputs.dtype)
        outputs.backward(gradient)
        if not is_first:
            start_sending(received.grad, rank - 1)
        # └

    def wait_for_sends() -> None:
        """Return when every send that has begun is complete."""
        # ┌ hole
        #: raise NotImplementedError("wait for all requests")
        for request in requests:
            request.wait()
        # └

    for word in order(rank, comms.world_size, microbatches):
        if word[0] == "F":
            forward(int(word[1:]))
        else:
            backward(int(word[1:]))
    if requests:  # a rank alone sends nothing
        wait_for_sends()
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
