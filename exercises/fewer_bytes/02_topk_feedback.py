"""The largest gradients now, and the rest later (top-k with error feedback).

Each rank sends only the k numbers of a gradient that are largest in magnitude, with their places. What it does not
send, it keeps: the *residual*. In the next step the residual is added to the new gradient, so a small number grows
until it is large enough to be sent:

    residual 0   0   0   0        gradient  5  -1   2   0       k = 1
    together 5  -1   2   0        sent      5  ·   ·   ·        residual  0  -1   2   0
                                  gradient  1  -1   2   0
    together 1  -2   4   0        sent      ·  ·   4   ·        residual  1  -2   0   0

Nothing is lost: what a rank has sent so far, plus its residual, is the sum of all its gradients.

The places differ from rank to rank, so a sum round a ring is not possible. Every rank gathers all values and all
places, and adds them up itself, in the order of ranks. Then all ranks have the same bits.

Lesson: docs/fewer_bytes/02_send_only_what_matters.md  Check it: microparallel learn check topk-feedback
"""

import torch
from torch import nn

import microparallel as mp


def count(share: float, numbers: int) -> int:
    """How many of so many numbers are sent: their share, and at least one."""
    return max(1, int(share * numbers))


class TopKFeedback:
    """Averages gradients over ranks, of which each sends a share of its numbers."""

    def __init__(self, parameters: list[nn.Parameter], comms: mp.Comms, share: float) -> None:
        self.comms, self.share = comms, share
        # self.residuals[parameter]: what was not sent yet, a flat tensor of zeros at first (parameter.new_zeros).
        raise NotImplementedError("make a residual for each parameter")

    def chosen(self, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The k numbers of a flat tensor that are largest in magnitude, and their places in it."""
        k = count(self.share, row.numel())
        # torch.topk(tensor, k) returns the k largest numbers and their places; which tensor do you give it?
        # row[places] are the numbers themselves.
        raise NotImplementedError("choose by magnitude")

    def average(self, parameter: nn.Parameter) -> None:
        """Put the mean of what all ranks send into parameter.grad.

        A gradient with a number that is not finite (inf, nan) must not get into the residual: it would stay there for
        ever, and would be sent again and again. Leave such a gradient out, as if it were zero.
        """
        gradient = parameter.grad.reshape(-1)
        residual = self.residuals[parameter]
        # 1. Add the gradient to the residual (if it is finite), and choose.
        # 2. Gather values, gather places: comms.all_gather(tensor) returns a list with each rank's tensor.
        # 3. Take what you have sent out of the residual.
        # 4. Add up all ranks' values at their places, in the order of ranks; tensor.index_add_(0, places, values)
        #    adds to a flat tensor. Divide by the number of ranks, and put it into parameter.grad (view_as).
        raise NotImplementedError("add, choose, send, keep the rest, average")


if __name__ == "__main__":

    def try_it(comms: mp.Comms) -> list[list[float]]:
        weight = nn.Parameter(torch.zeros(4))
        topk = TopKFeedback([weight], comms, share=0.25)
        averages = []
        for gradient in ([5.0, -1.0, 2.0, 0.0], [1.0, -1.0, 2.0, 0.0]):
            weight.grad = torch.tensor(gradient) if comms.rank == 0 else torch.tensor([0.0, -3.0, 0.0, 0.0])
            topk.average(weight)
            averages.append(weight.grad.tolist())
        return averages

    for numbers in mp.launch(try_it, ranks=2):
        print(numbers)  # twice [2.5, -1.5, 0, 0] and [0, -1.5, 2, 0]
