"""What mistakes with micro-batches leave in the gradients."""

from __future__ import annotations

import functools

import torch
from torch import nn

from microparallel.learn.graders._common_pp import mean_loss
from microparallel.learn.graders._pipeline_steps import Truth, begun_with
from microparallel.learn.words import Suspect, flat


def suspects(truth: Truth, rank: int) -> list[Suspect]:
    """Everything that a rank's gradients would be after a typical mistake."""
    each = [_of_one(truth, rank, number) for number in range(truth.microbatches)]
    sizes = [len(piece) for piece in torch.arange(truth.samples).tensor_split(truth.microbatches)]
    weighted = [gradient * size / truth.samples for gradient, size in zip(each, sizes, strict=True)]
    count = truth.microbatches
    if count == 1:
        return []
    found = [
        Suspect(
            torch.stack(each).sum(0),
            f"the losses of the {count} micro-batches were added up and not divided: the gradients are those of a loss "
            f"about {count} times too large. What is wanted is the mean over the whole batch",
        ),
        Suspect(
            torch.stack(each).mean(0),
            f"every micro-batch counts the same, but they have {', '.join(map(str, sizes))} samples: weight each by "
            "its share of the samples, or the gradients are not those of the whole batch",
        ),
        Suspect(
            torch.stack(weighted).sum(0) / count,
            f"the loss was divided by the {count} micro-batches once too often",
        ),
    ]
    for number in (count - 1, 0):
        words = f"only micro-batch {number} of {count} is in the gradients of rank {rank}: those of all add up"
        found += [Suspect(value, words) for value in (each[number], weighted[number], each[number] / count)]
    if rank < truth.ranks - 1:
        words = f"rank {rank} began its backwards with ones: they begin with what rank {rank + 1} sends back"
        found.append(Suspect(begun_with(truth, rank, "ones"), words))
    return found


def _of_one(truth: Truth, rank: int, number: int) -> torch.Tensor:
    """A rank's gradients of one micro-batch's own mean loss."""
    return flat(truth.of(truth.of_first_step(functools.partial(_backward_of_one, number, truth.microbatches)), rank))


def _backward_of_one(
    number: int, count: int, model: nn.Sequential, inputs: torch.Tensor, targets: torch.Tensor
) -> None:
    piece, answers = inputs.tensor_split(count)[number], targets.tensor_split(count)[number]
    mean_loss(model(piece), answers).backward()  # type: ignore[no-untyped-call]
