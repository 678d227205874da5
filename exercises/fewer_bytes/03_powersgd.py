"""A gradient as the product of two thin matrices (PowerSGD).

The gradient of a weight is a matrix M with a rows and b columns. Send two thin matrices instead, with r columns each,
whose product is close to M:

    M  (a × b)   ≈   P  (a × r)  ·  Qᵀ  (r × b)          a·b numbers;   r·(a + b) numbers

One round of *power iteration* makes them. It begins with the Q of the step before:

    P = M · Q       all-reduced (mean over ranks), then its columns are made orthonormal
    Q = Mᵀ · P      all-reduced (mean over ranks)

P is the same on all ranks when Q is computed, so the mean of all ranks' Q belongs to the mean of all ranks' M. So P and
Q can both be averaged by an ordinary all-reduce, round a ring. The second one needs the result of the first.

What P · Qᵀ leaves out of a rank's M is its residual, which is added to the next gradient (error feedback).

Lesson: docs/fewer_bytes/02_send_only_what_matters.md  Check it: microparallel learn check powersgd
"""

import torch
from torch import nn

import microparallel as mp


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Columns of length 1, at right angles to each other, that span what the matrix's columns span."""
    return torch.linalg.qr(matrix).Q


class PowerSGD:
    """Averages gradients over ranks; those of matrices travel as two thin ones with `rank` columns.

    `rank` is the word of linear algebra: the number of columns, and not a process.
    """

    def __init__(self, parameters: list[nn.Parameter], comms: mp.Comms, rank: int) -> None:
        self.comms, self.rank = comms, rank
        matrices = [parameter for parameter in parameters if parameter.dim() == 2]
        self.residuals = {parameter: torch.zeros_like(parameter.data) for parameter in matrices}
        self.q = {parameter: self.first_q(number, parameter) for number, parameter in enumerate(matrices)}

    def first_q(self, number: int, parameter: nn.Parameter) -> torch.Tensor:
        """Random numbers to begin with, for the parameter with that number: b × rank."""
        # torch.randn(…, generator=…, dtype=parameter.dtype). What must be the same on every rank?
        # torch.Generator().manual_seed(seed) makes a generator.
        raise NotImplementedError("the same random numbers on every rank")

    def average(self, parameter: nn.Parameter) -> None:
        """Put an approximation of the mean over ranks into parameter.grad.

        Biases and other small tensors would save little: they are averaged as they are. You have
        comms.all_reduce(tensor, op="mean"), which changes the tensor.
        """
        if parameter.dim() != 2:
            self.comms.all_reduce(parameter.grad, op="mean")
            return
        # 1. M: the gradient and the residual of this parameter.
        # 2. P = M · Q, all-reduced, then orthonormal.
        # 3. Q = Mᵀ · P, this rank's own. The residual is what P · Qᵀ leaves out of M.
        # 4. Q all-reduced; parameter.grad is P · Qᵀ; and Q is kept for the next step.
        raise NotImplementedError("two thin matrices, two all-reduces")


if __name__ == "__main__":

    def try_it(comms: mp.Comms) -> list[float]:
        own = torch.Generator().manual_seed(comms.rank)
        weight = nn.Parameter(torch.zeros(20, 30))
        sgd = PowerSGD([weight], comms, rank=2)
        always = torch.randn(20, 2, generator=own) @ torch.randn(2, 30, generator=own)  # this rank's, in every step
        mean = comms.all_reduce(always.clone(), op="mean")
        missing, seen = torch.zeros_like(mean), []
        for _ in range(6):
            weight.grad = always.clone()
            sgd.average(weight)
            missing += mean - weight.grad
            seen.append(round((missing.norm() / mean.norm()).item(), 1))
        return seen

    for numbers in mp.launch(try_it, ranks=2):
        print(numbers)  # twice the same: what is still missing, in gradients. It does not grow with the steps
