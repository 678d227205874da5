"""A model in parts may return anything: also an object in which its tensors are not found."""

import pytest
import torch
from torch import nn

import microparallel as mp


class Output:
    """No tuple, no dict: torch does not know what is in it."""

    def __init__(self, logits):
        self.logits = logits


class ReturnsObject(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, inputs):
        return Output(self.last(torch.tanh(self.first(inputs))))


def is_linear(module):
    return isinstance(module, nn.Linear)


def build():
    torch.manual_seed(0)
    return ReturnsObject().double()


def largest_difference(comms, units, local):
    """Between gradients of this rank's parts, and those of one process."""
    model, plain = mp.FullyShardedDataParallel(build(), comms, units=units), build()
    worst = 0.0
    for step in range(3):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        plain.zero_grad()
        plain(inputs).logits.pow(2).mean().backward()
        model.zero_grad()
        first, second = inputs.view(2, 2, 2, 4)[comms.rank]
        if local:
            with model.no_sync():
                (model(first).logits.pow(2).mean() / 2).backward()
        else:
            (model(first).logits.pow(2).mean() / 2).backward()
        (model(second).logits.pow(2).mean() / 2).backward()
        parts = model.parameter_parts()
        for (name, whole), mine in zip(plain.named_parameters(), model.parameters(), strict=True):
            wanted = whole.grad.flatten()[parts[name].start : parts[name].stop]
            found = mine.grad.as_subclass(torch.Tensor).flatten()
            worst = max([worst, *(found - wanted).abs().tolist()])
    return worst


@pytest.mark.parametrize("local", [False, True], ids=["each summed", "no_sync"])
@pytest.mark.parametrize(
    "units", ["auto", None, lambda module: isinstance(module, nn.Linear)], ids=["auto", "one", "2"]
)
def test_gradients_are_those_of_one_process(any_pool, units, local):
    assert max(any_pool.run(largest_difference, 2, units, local, timeout=50)) < 1e-12
