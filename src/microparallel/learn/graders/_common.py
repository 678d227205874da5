"""What the graders share: small models and batches, what one process makes of them, and words about gradients.

Everything is in float64, so that a right answer differs from one process by rounding only, and a wrong one by more.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from microparallel.learn.log import calls
from microparallel.learn.requirements import Suspect, flat, require_equal
from microparallel.learn.verdict import Wrong

LEARNING_RATE = 0.1
WIDTH = 6  # of the layers of a pipeline, and of what is sent between them


# ── models and batches ──────────────────────────────────────────────────────────────────────────────────────────────


def small_model(seed: int = 0) -> nn.Sequential:
    """Three layers whose parameters all have different shapes, so that a shape says whose gradient it is."""
    model = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    _fill(model, torch.Generator().manual_seed(seed), 0.4)
    return model


def make_layers(depth: int, seed: int = 0) -> list[nn.Module]:
    """The layers of a pipeline's model, all of one width; every rank makes the same."""
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers.append(nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Tanh()))
        _fill(layers[-1], generator, 0.6)
    return layers


def _fill(module: nn.Module, generator: torch.Generator, scale: float) -> None:
    """Draw the weights from a generator of our own: the ranks are threads of one process, and share torch's."""
    for parameter in module.parameters():
        parameter.data = scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)


def batch(samples: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets for the small model."""
    generator = torch.Generator().manual_seed(1000 + seed)
    numbers = torch.randn(samples, 5, generator=generator, dtype=torch.float64)
    return numbers[:, :3].contiguous(), numbers[:, 3:].contiguous()


def pipeline_batch(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets for the layers of a pipeline."""
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = (torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return inputs, targets


def mean_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over the samples, as every loss of the course."""
    return nn.functional.mse_loss(outputs, targets)


def layers_of(rank: int, depth: int, ranks: int) -> range:
    """A rank's layers: one run of them, and the first ranks take those that are left over."""
    size, left_over = divmod(depth, ranks)
    start = rank * size + min(rank, left_over)
    return range(start, start + size + (rank < left_over))


# ── what a model holds ──────────────────────────────────────────────────────────────────────────────────────────────


def names(model: nn.Module) -> list[str]:
    """The parameters' names."""
    return [name for name, _ in model.named_parameters()]


def weights(model: nn.Module) -> list[torch.Tensor]:
    """Copies of the parameters."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    """Copies of the gradients; None where there is none."""
    return [None if parameter.grad is None else parameter.grad.detach().clone() for parameter in model.parameters()]


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


# ── what one process finds ──────────────────────────────────────────────────────────────────────────────────────────


def in_one_process(
    model: nn.Module | Iterable[nn.Module], inputs: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The mean loss of these samples and its gradients, zeros where a parameter was not used; the model is left alone.

    A model may also be given as its layers, one after another.
    """
    whole = copy.deepcopy(model if isinstance(model, nn.Module) else nn.Sequential(*model)).requires_grad_()
    loss = mean_loss(whole(inputs), targets)
    found = torch.autograd.grad(loss, list(whole.parameters()), allow_unused=True)
    pairs = zip(found, whole.parameters(), strict=True)
    return loss.detach(), [torch.zeros_like(parameter) if new is None else new for new, parameter in pairs]


@dataclass
class WholeBatchStep:
    """A training step of one process that has the whole batch."""

    model: nn.Module  # as it was before the step
    inputs: torch.Tensor
    targets: torch.Tensor
    gradients: list[torch.Tensor]
    gradients_before: list[torch.Tensor]  # of the step before; zeros in the first one
    weights: list[torch.Tensor]  # after the step

    @property
    def samples(self) -> int:
        """How many samples the batch has."""
        return len(self.inputs)

    @property
    def weights_before(self) -> list[torch.Tensor]:
        """The weights with which the step began."""
        return weights(self.model)

    def of(self, samples: Sequence[int]) -> tuple[float, list[torch.Tensor]]:
        """The mean loss of some samples of the batch, and its gradients."""
        rows = list(samples)
        loss, found = in_one_process(self.model, self.inputs[rows], self.targets[rows])
        return loss.item(), found


def steps_of_one_process(
    model: nn.Module, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> list[WholeBatchStep]:
    """Train a copy of the model on whole batches."""
    one = copy.deepcopy(model)
    last = [torch.zeros_like(parameter) for parameter in one.parameters()]
    steps = []
    for inputs, targets in batches:
        before = copy.deepcopy(one)
        _, found = in_one_process(one, inputs, targets)
        descend(one, found, LEARNING_RATE)
        steps.append(WholeBatchStep(before, inputs, targets, found, last, weights(one)))
        last = found
    return steps


def descend(model: nn.Module, found: Sequence[torch.Tensor | None], rate: float) -> None:
    """Take one step of plain gradient descent, as torch's SGD would."""
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), found, strict=True):
            if gradient is not None:
                parameter.sub_(rate * gradient)


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────────


def require_gradients(
    found: Sequence[torch.Tensor | None],
    expected: Sequence[torch.Tensor],
    whose: str,
    missing: str,
    suspects: Sequence[Suspect] = (),
) -> None:
    """Refuse gradients that are not those of one process; a suspect is compared with all of them in a row.

    Args:
        found: the gradients of one part of the model.
        expected: what they should be.
        whose: "part 1", "rank 2".
        missing: what to say where there are none at all.
        suspects: what certain mistakes would leave behind.
    """
    if all(gradient is None for gradient in found):
        raise Wrong(missing)
    lost = [number for number, gradient in enumerate(found) if gradient is None]
    if lost:
        raise Wrong(f"{len(lost)} of the {len(found)} parameters of {whose} have no gradient")
    if not bool(flat(found).isfinite().all()) and bool(flat(expected).isfinite().all()):
        raise Wrong(
            f"the gradients of {whose} are no numbers (nan): does a rank other than the first look at inputs, or one "
            "other than the last at targets? There the check gives them nan (not a number) on purpose"
        )
    require_equal(flat(found), flat(expected), f"{whose}'s row of gradients", suspects)


def require_no_gradient_lost(found: Sequence[object], labels: Sequence[str], who: str) -> None:
    """Refuse a parameter whose gradient is gone after averaging."""
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


def require_all_waited(comms: Any) -> None:
    """Refuse sends and receives that a rank began and never waited for."""
    unfinished = [call for call in calls(comms.row) if not call.ended]
    if unfinished:
        raise Wrong(
            f"rank {comms.rank} began {unfinished[0].call} in line {unfinished[0].line} and never waited for it: keep "
            "the request, and wait for it before the step ends; until then the tensor may still be on its way"
        )
