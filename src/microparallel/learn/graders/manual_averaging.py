"""Two copies in one process: is the average the gradient of the whole batch, in both copies, also for uneven parts?"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from microparallel.learn.exam import Exam
from microparallel.learn.graders._common import (
    LEARNING_RATE,
    batch,
    combined,
    gradients,
    in_one_process,
    names,
    require_no_gradient_lost,
    same,
    small_model,
    steps_of_one_process,
    weights,
)
from microparallel.learn.requirements import Suspect, flat, require_equal, suspects
from microparallel.learn.verdict import Wrong


def check(exam: Exam) -> None:
    """Equal halves; uneven parts; several steps."""
    with exam.step("two equal halves: both copies hold the mean"):
        _require_average(exam.run(_average, 1, [4, 4])[0], [4, 4])
    with exam.step("uneven parts: a copy counts for as many samples as it saw"):
        _require_average(exam.run(_average, 1, [5, 2])[0], [5, 2])
    with exam.step("three steps of training are those of one network with the whole batch") as notes:
        _require_training(exam.run(_train, 1, [5, 2])[0], [5, 2], notes)


@dataclass
class _Found:
    gradients: list[list[torch.Tensor | None]]  # of each copy
    weights: list[list[torch.Tensor]]
    shared: bool  # whether a gradient is one tensor in both copies


def _copies() -> list[nn.Sequential]:
    """Two copies whose weights differ a little: so one sees whether weights or gradients were averaged."""
    return [small_model(0), small_model(1)]


def _parts(samples: list[int], seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    inputs, targets = batch(sum(samples), seed)
    return list(zip(torch.split(inputs, samples), torch.split(targets, samples), strict=True))


def _average(learner: Any, _comms: Any, samples: list[int]) -> _Found:
    copies = _copies()
    for network, (inputs, targets) in zip(copies, _parts(samples), strict=True):
        nn.functional.mse_loss(network(inputs), targets).backward()  # type: ignore[no-untyped-call]
    learner.average_gradients(copies, samples)
    pairs = zip(*(network.parameters() for network in copies), strict=True)
    places = [[one.grad.data_ptr() for one in pair if one.grad is not None] for pair in pairs]
    shared = any(len(set(pair)) < len(pair) for pair in places)
    return _Found([gradients(one) for one in copies], [weights(one) for one in copies], shared)


def _require_average(found: _Found, samples: list[int]) -> None:
    copies, labels = _copies(), names(small_model())
    own = [in_one_process(network, *part)[1] for network, part in zip(copies, _parts(samples), strict=True)]
    for number, network in enumerate(copies):
        require_no_gradient_lost(found.gradients[number], labels, f"copy {number}")
        if not same(found.weights[number], weights(network)):
            raise Wrong(
                f"copy {number}'s parameters were changed: average parameter.grad, the gradients, and leave the "
                "parameters to the optimizer"
            )
    _require_every_parameter(found, own, labels)
    for number, mine in enumerate(found.gradients):
        expected = combined(own, _shares(samples))
        what = f"copy {number}'s gradient"
        require_equal(flat(mine), flat(expected), what, _suspects(number, own, samples))
    if found.shared:
        raise Wrong(
            "the gradients of the two copies are one and the same tensor: what one copy does to its gradient (clip it, "
            "add to it) then happens to the other's too; give each copy a tensor of its own"
        )


def _shares(samples: list[int]) -> list[float]:
    return [seen / sum(samples) for seen in samples]


def _require_every_parameter(found: _Found, own: list[list[torch.Tensor]], labels: list[str]) -> None:
    """Refuse an answer that touches some parameters and leaves others as they were."""
    for number, mine in enumerate(found.gradients):
        left = [
            label
            for label, gradient, before in zip(labels, mine, own[number], strict=True)
            if gradient is not None and same([gradient], [before])
        ]
        if left and len(left) < len(labels):
            raise Wrong(
                f"of copy {number}, {', '.join(left)} still {'has' if len(left) == 1 else 'have'} the gradient of its "
                "own samples, while others were averaged: every parameter needs its average"
            )


def _suspects(number: int, own: list[list[torch.Tensor]], samples: list[int]) -> list[Suspect]:
    shares, ranks = _shares(samples), len(samples)
    average = combined(own, shares)
    mistakes = {
        f"copy {number} still holds its own gradient: it was not given the average": own[number],
        "this is the sum of both gradients: divide it, the loss is a mean": combined(own, [1.0] * ranks),
        "each copy counts one half, but one saw more samples than the other: weight each gradient by its samples": (
            combined(own, [1 / ranks] * ranks)
        ),
        "the weights are swapped: a copy counts for the samples that it saw itself": combined(own, shares[::-1]),
        "this is the sum over all samples: divide it by how many there are": combined(own, list(map(float, samples))),
        "the sum over all samples was divided by the number of copies: divide it by the number of samples": (
            combined(own, [seen / ranks for seen in samples])
        ),
        "copy 0's gradient was overwritten before copy 1's average was computed: compute first, then write": (
            combined([average, own[1]], shares)
        ),
        "copy 1 was given the average of an average: compute first, then write": combined([average, own[1]], [0.5] * 2),
    }
    return suspects(mistakes)


def _train(learner: Any, _comms: Any, samples: list[int]) -> list[list[list[torch.Tensor]]]:
    copies = [copy.deepcopy(small_model()) for _ in samples]
    optimizers = [torch.optim.SGD(network.parameters(), lr=LEARNING_RATE) for network in copies]
    after = []
    for step in range(3):
        learner.train_step(copies, optimizers, _parts(samples, step))
        after.append([weights(network) for network in copies])
    return after


def _require_training(found: list[list[list[torch.Tensor]]], samples: list[int], notes: list[str]) -> None:
    batches = [batch(sum(samples), step) for step in range(3)]
    expected = [step.weights for step in steps_of_one_process(small_model(), batches)]
    for step, (copies, whole) in enumerate(zip(found, expected, strict=True), 1):
        for number, mine in enumerate(copies):
            require_equal(flat(mine), flat(whole), f"copy {number}'s weights after step {step}")
        if not torch.equal(flat(copies[0]), flat(copies[1])):
            raise Wrong(
                f"after step {step} the weights of the two copies differ in their last digits: compute the average "
                "once, and give both the same numbers"
            )
    furthest = (flat(found[-1][0]) - flat(expected[-1])).abs().max().item()
    notes.append(f"the copies are identical, and {furthest:.1g} from one network")
