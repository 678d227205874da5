"""The naive step, as a learner would call it."""

import pytest
import torch
from torch import nn

import microparallel as mp


class Branches(nn.Module):
    """Uses one branch for each rank's kind of input, and one parameter never."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(3, 3)
        self.branches = nn.ModuleList(nn.Linear(3, 2) for _ in range(2))
        self.unused = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, inputs, targets=None):
        hidden = self.shared(inputs)
        picked = torch.where(inputs[:, :1] > 0, self.branches[0](hidden), 0.0)
        if (inputs[:, 0] <= 0).any():
            picked = picked + torch.where(inputs[:, :1] <= 0, self.branches[1](hidden), 0.0)
        outputs = picked * self.frozen
        return outputs if targets is None else nn.functional.cross_entropy(outputs, targets)


def batch():
    inputs = torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9], [-1, -2, -3], [-4, 5, -6]], dtype=torch.float64) / 10
    return inputs, torch.tensor([0, 1, 0, 1, 1])


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def step_twice(comms, bounds, with_loss_fn):
    model = Branches().double()
    inputs, targets = batch()
    mine = slice(*bounds[comms.rank])
    loss_fn = nn.functional.cross_entropy if with_loss_fn else None
    losses = [
        mp.course.naive_data_parallel_step(model, comms, inputs[mine], targets[mine], loss_fn).item() for _ in range(2)
    ]
    return losses, gradients(model)


@pytest.mark.parametrize("with_loss_fn", [False, True])
@pytest.mark.parametrize("bounds", [[(0, 5)], [(0, 3), (3, 5)], [(0, 1), (1, 1), (1, 5)]], ids=len)
def test_gradients_are_those_of_the_whole_batch_and_accumulate(pool, bounds, with_loss_fn):
    model = Branches().double()
    for _ in range(2):
        loss = model(*batch())
        loss.backward()
    for losses, ours in pool.run(step_twice, len(bounds), bounds, with_loss_fn, check=True, timeout=30):
        assert losses == pytest.approx([loss.item()] * 2, rel=1e-14)
        for name, wanted in gradients(model).items():
            if wanted is None:
                assert ours[name] is None, name  # no rank used it
            else:
                torch.testing.assert_close(ours[name], wanted, rtol=1e-13, atol=1e-15)
