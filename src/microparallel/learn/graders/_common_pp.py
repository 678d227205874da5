"""What the graders of the pipeline track share: a small model, its stages, and what one process makes of a batch."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from microparallel.learn.log import calls
from microparallel.learn.verdict import Wrong
from microparallel.learn.words import Suspect, flat, require_equal

WIDTH = 6


def make_layers(depth: int, seed: int = 0) -> list[nn.Module]:
    """Layers of one width, in float64; every process makes the same."""
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(depth):
        linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        for parameter in linear.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.6
        layers.append(nn.Sequential(linear, nn.Tanh()))
    return layers


def make_batch(samples: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = (torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return inputs, targets


def mean_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over the samples, as every loss of the course."""
    return nn.functional.mse_loss(outputs, targets)


def gradients(modules: nn.Module | Iterable[nn.Module]) -> list[torch.Tensor | None]:
    """The gradients of all parameters, in order; None where there is none."""
    modules = [modules] if isinstance(modules, nn.Module) else modules
    return [
        None if parameter.grad is None else parameter.grad.detach().clone()
        for module in modules
        for parameter in module.parameters()
    ]


def in_one_process(
    layers: Sequence[nn.Module], inputs: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The loss and the gradients that one process finds for the whole batch."""
    whole = nn.Sequential(*copy.deepcopy(list(layers)))
    whole.zero_grad()
    loss = mean_loss(whole(inputs), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), [gradient for gradient in gradients(whole) if gradient is not None]


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
            "other than the last at targets? What they are given there is not a number on purpose"
        )
    require_equal(flat(found), flat(expected), f"{whose}'s row of gradients", suspects)


def require_all_waited(comms: Any) -> None:
    """Refuse sends and receives that were begun and never waited for."""
    unfinished = [call for call in calls(comms.row) if not call.ended]
    if unfinished:
        raise Wrong(
            f"rank {comms.rank} began {unfinished[0].call} in line {unfinished[0].line} and never waited for it: keep "
            "the request, and wait for it before the step ends; until then the tensor may still be on its way"
        )


def many(number: int, what: str) -> str:
    """A number with its noun: 1 forward, 2 forwards."""
    return f"{number} {what}{'s' * (number != 1)}"
