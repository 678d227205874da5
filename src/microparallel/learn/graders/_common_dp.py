"""What the graders of data parallelism share: small models, batches, and one process that has the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from microparallel.learn.verdict import Wrong
from microparallel.learn.words import flat

LEARNING_RATE = 0.1


def small_model(seed: int = 0) -> nn.Sequential:
    """Three layers in float64 whose parameters all have different shapes, so that a shape says whose gradient it is."""
    model = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    generator = torch.Generator().manual_seed(seed)  # ranks are threads, and torch's own is everybody's
    for parameter in model.parameters():
        parameter.data = 0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def batch(samples: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets for it."""
    generator = torch.Generator().manual_seed(1000 + seed)
    numbers = torch.randn(samples, 5, generator=generator, dtype=torch.float64)
    return numbers[:, :3].contiguous(), numbers[:, 3:].contiguous()


def names(model: nn.Module) -> list[str]:
    """The parameters' names."""
    return [name for name, _ in model.named_parameters()]


def weights(model: nn.Module) -> list[torch.Tensor]:
    """Copies of the parameters."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    """Copies of the gradients."""
    return [None if parameter.grad is None else parameter.grad.detach().clone() for parameter in model.parameters()]


def mean_gradients(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of the mean loss over these samples; the model itself is left as it is."""
    one = copy.deepcopy(model).requires_grad_()
    loss = nn.functional.mse_loss(one(inputs), targets)
    found = torch.autograd.grad(loss, list(one.parameters()), allow_unused=True)
    return [torch.zeros_like(own) if new is None else new for new, own in zip(found, one.parameters(), strict=True)]


@dataclass
class Step:
    """A step of one process that has the whole batch."""

    model: nn.Module  # as it was before
    inputs: torch.Tensor
    targets: torch.Tensor
    gradients: list[torch.Tensor]
    gradients_before: list[torch.Tensor]  # of the step before; zeros in the first one
    weights: list[torch.Tensor]
    loss: float

    @property
    def samples(self) -> int:
        """How many samples the batch has."""
        return len(self.inputs)

    @property
    def weights_before(self) -> list[torch.Tensor]:
        """The weights with which it began."""
        return weights(self.model)

    def gradients_of(self, samples: Sequence[int]) -> list[torch.Tensor]:
        """What backward leaves if the mean is taken over some samples only."""
        rows = list(samples)
        return mean_gradients(self.model, self.inputs[rows], self.targets[rows])

    def loss_of(self, samples: Sequence[int]) -> float:
        """The mean loss of some samples."""
        rows = list(samples)
        with torch.no_grad():
            return nn.functional.mse_loss(self.model(self.inputs[rows]), self.targets[rows]).item()


def steps_of_one_process(model: nn.Module, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Step]:
    """Train on whole batches; the model itself is left as it is."""
    one = copy.deepcopy(model)
    last = [torch.zeros_like(parameter) for parameter in one.parameters()]
    steps = []
    for inputs, targets in batches:
        before = copy.deepcopy(one)
        found = mean_gradients(one, inputs, targets)
        with torch.no_grad():
            for parameter, gradient in zip(one.parameters(), found, strict=True):
                parameter.sub_(LEARNING_RATE * gradient)
        step = Step(before, inputs, targets, found, last, weights(one), 0.0)
        step.loss = step.loss_of(range(len(inputs)))
        steps.append(step)
        last = found
    return steps


def combined(tensors: Sequence[Sequence[torch.Tensor]], factors: Sequence[float]) -> list[torch.Tensor]:
    """Add up lists of tensors, each list times its factor."""
    return [
        torch.stack([tensor * factor for tensor, factor in zip(same, factors, strict=True)]).sum(0)
        for same in zip(*tensors, strict=True)
    ]


def same(one: Sequence[torch.Tensor | None], other: Sequence[torch.Tensor | None]) -> bool:
    """Whether two lists hold the same numbers, but for rounding."""
    return all(
        a is not None
        and b is not None
        and (a.shape, a.dtype) == (b.shape, b.dtype)
        and torch.allclose(a, b, rtol=1e-9, atol=1e-9)
        for a, b in zip(one, other, strict=True)
    )


def require_gradients(found: Sequence[object], labels: Sequence[str], who: str) -> None:
    """Refuse a missing gradient."""
    for label, gradient in zip(labels, found, strict=True):
        if gradient is None:
            raise Wrong(f"{who}'s {label} has no gradient any more: put the average there")


def require_same_weights(found: Sequence[Sequence[torch.Tensor]], when: str) -> None:
    """Refuse ranks whose weights are not the same bits."""
    for rank, mine in enumerate(found):
        if not torch.equal(flat(mine), flat(found[0])):
            raise Wrong(
                f"{when} rank {rank}'s weights differ from rank 0's in their last digits: all ranks must take the same "
                "step, with the same numbers"
            )


# ── sums of which one can tell who is in them ───────────────────────────────────────────────────────────────────────


def contribution(rank: int, shape: int | tuple[int, ...], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """What a rank puts into a sum: 1, 2, 3, … times 10 to the rank, so that every sum tells who is in it, how often."""
    numbers: torch.Tensor = torch.arange(1, torch.zeros(shape).numel() + 1) * 10**rank
    return numbers.to(dtype).reshape(shape)


def counted_in_words(counts: Sequence[int]) -> str:
    """Who is in a sum: "ranks 0 and 2", "rank 1 twice"."""
    times = {2: " twice", 3: " three times"}
    once = [str(rank) for rank, count in enumerate(counts) if count == 1]
    parts = [f"rank{'s' * (len(once) > 1)} {_and(once)}"] if once else []
    parts += [
        f"rank {rank}{times.get(count, f' {count} times')}" for rank, count in enumerate(counts) if count not in (0, 1)
    ]
    return _and(parts) or "nobody"


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
