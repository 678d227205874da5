"""Split the backward and fill the gaps.

A backward does two things. It finds the gradient of what entered the stage, which the rank before waits for: call that
half I. And it finds the gradients of the stage's weights, which no rank waits for: call that half W. So a rank should
do I as soon as possible, and keep W for a time when it has nothing else to do. That is ZB-H1: the order of 1F1B, with
its backward split.

    rank 0  F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3        no W waits
    rank 1     F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3        one W waits, to the end
    rank 2        F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3        two wait

With 1F1B every rank waits (p − 1)(F + I + W). With ZB-H1 it waits (p − 1)(F + I − W). But what W needs must be kept
until W is done: a rank of p may hold at most p activations, as many as 1F1B's first rank.

You write the two halves, and then the order of each rank, as text. The check puts the messages in, verifies and
simulates your order, and runs it on ranks, with your halves. (Here a stage is one layer. In a stage of several layers
W would have to go back through all of them once more; the library keeps the gradient at each layer instead.)

Lesson: docs/pipeline/08_zero_bubble.md            Check it: microparallel learn check zero-bubble
"""

import torch
from torch import nn

import microparallel as mp
from microparallel.program import Program, TrainingStep, parse_op


def input_half(received: torch.Tensor, outputs: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """I: the gradient of what entered the stage (`received`). No gradient of a weight is computed yet.

    outputs:   what came out of the stage
    gradient:  the gradient of the outputs, as the next rank has sent it

    You have torch.autograd.grad(outputs, inputs, grad_outputs, retain_graph=False). It returns a tuple with the
    gradient of each of the inputs, and leaves every .grad as it is. Then it frees the graph, unless it is told
    retain_graph=True.
    """
    # For which tensor do you ask? And which other function still needs the graph?
    raise NotImplementedError("I: the gradient of what entered the stage")


def weight_half(stage: nn.Module, outputs: torch.Tensor, gradient: torch.Tensor) -> None:
    """W, some time after I: add the gradients of the stage's parameters to their .grad, which may be None."""
    # The same graph, from the same beginning; but for which tensors do you ask now?
    raise NotImplementedError("W: the gradients of the weights")


def order(rank: int, ranks: int, microbatches: int) -> list[str]:
    """What a rank computes: "F1.2" is the forward of stage 1 on micro-batch 2, "I1.2" and "W1.2" its backward.

    Rank r has stage r. There may be fewer micro-batches than ranks.
    """
    warm_up = min(ranks - 1 - rank, microbatches)
    words = [f"F{rank}.{m}" for m in range(warm_up)]
    # After the warm-up come, in turn as in 1F1B, one forward (as long as there are any) and one I. After each I may
    # come one W; but this rank lets some of its W wait. How many does rank r let wait? See the drawing.
    # At the end come the W that are left.
    raise NotImplementedError("forwards and the two halves of the backwards, in ZB-H1's order")
    return words


if __name__ == "__main__":
    layer, batch = nn.Linear(2, 1), torch.ones(3, 2, requires_grad=True)
    out = layer(batch)
    print("I:", input_half(batch, out, torch.ones(3, 1)).tolist())  # three times the weight
    weight_half(layer, out, torch.ones(3, 1))
    print("W:", layer.weight.grad.tolist())  # the sum of the batch: [[3.0, 3.0]]

    RANKS, MICROBATCHES = 3, 4
    orders = [order(rank, RANKS, MICROBATCHES) for rank in range(RANKS)]
    program = Program("mine", TrainingStep(RANKS, MICROBATCHES), tuple(tuple(map(parse_op, words)) for words in orders))
    program = mp.schedules.lower(program)
    mp.verify(program)
    print(mp.draw(program))
