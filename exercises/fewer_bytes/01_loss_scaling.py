"""One loss scale for all ranks.

float16 has no number between 0 and 6e-8, and none above 65504. Many gradients are smaller than that. So the loss is
multiplied by a scale before backward, and each gradient is divided by it afterwards. If the scale is too large, a
gradient becomes infinite (inf) or undefined (nan): an *overflow*. Then the step is left out, and the scale is halved.
After `interval` good steps in a row it is doubled.

Ranks have different samples, so an overflow may happen on one rank only. All ranks must still do the same: take the
step or leave it out, and change the scale in the same way. A rank that decides alone soon has other weights:

    rank 0    finite ──┐                    ┌── leaves the step out, halves the scale
                       ├── overflow? yes ───┤
    rank 1    inf ─────┘                    └── leaves the step out, halves the scale

Lesson: docs/fewer_bytes/01_half_the_bytes.md          Check it: microparallel learn check loss-scaling
"""

import torch
from torch import nn

import microparallel as mp


class LossScaling:
    """Takes the steps of a model whose gradients are computed in float16; every rank has one, with the same scale.

    Attributes:
        scale: the loss is multiplied by it.
        good_steps: how many steps were taken since the scale last changed.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        comms: mp.Comms,
        scale: float = 65536.0,
        interval: int = 2000,
    ) -> None:
        self.parameters, self.optimizer, self.comms = parameters, optimizer, comms
        self.scale, self.interval, self.good_steps = scale, interval, 0

    def overflow(self) -> bool:
        """Whether any rank has a gradient that is not finite: the same answer on every rank."""
        # parameter.grad.isfinite().all() says whether all numbers of one gradient are finite. Put this rank's answer
        # into a tensor with one number; comms.all_reduce(tensor, op="max") leaves the largest of all ranks' in it.
        raise NotImplementedError("look for inf and nan, and agree with the other ranks")

    def change_scale(self, overflow: bool) -> None:
        """Halve the scale after an overflow; double it when `interval` good steps have come in a row."""
        # self.good_steps counts. It begins again at 0 whenever the scale changes.
        raise NotImplementedError("halve, double, or count")

    def step(self, loss: torch.Tensor, max_norm: float) -> bool:
        """One training step with this rank's loss, the mean over its own samples; whether the step was taken.

        The gradients are averaged over ranks, comms.all_reduce(tensor, op="mean"). Then they are clipped:
        nn.utils.clip_grad_norm_(parameters, max_norm) makes them shorter if their norm is larger than max_norm.
        """
        self.optimizer.zero_grad()
        # Scale, backward, overflow? If there is none: average, divide by the scale, clip, update. Which of these
        # must keep their order? In either case: change the scale at the end.
        raise NotImplementedError("scale the loss, agree, then take the step or leave it out")


if __name__ == "__main__":

    def try_it(comms: mp.Comms) -> list[str]:
        weight = nn.Parameter(torch.ones(1, 2))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        scaling = LossScaling([weight], optimizer, comms, scale=1024.0, interval=2)
        seen = []
        for step in range(4):
            inputs = torch.full((1, 2), 100.0 if (comms.rank, step) == (1, 0) else 0.1)
            outputs = inputs.half() @ weight.half().T  # float16, and its gradients too
            taken = scaling.step(outputs.float().square().mean(), max_norm=1.0)
            seen.append(f"{'step' if taken else 'skip'} {scaling.scale:g} {weight[0, 0].item():.4f}")
        return seen

    for lines in mp.launch(try_it, ranks=2):
        print(lines)  # the same on both: rank 1 overflows in the first step, and after two good steps the scale doubles
