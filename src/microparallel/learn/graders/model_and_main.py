"""Several ranks train one model: do they start alike, share the samples out, and take the steps of one process?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from microparallel.learn.exam import Exam
from microparallel.learn.graders._common import (
    LEARNING_RATE,
    WholeBatchStep,
    batch,
    combined,
    gradients,
    names,
    require_no_gradient_lost,
    require_same_weights,
    same,
    small_model,
    steps_of_one_process,
    weights,
)
from microparallel.learn.log import calls
from microparallel.learn.requirements import Suspect, flat, require_equal, require_number, shown, suspects
from microparallel.learn.verdict import Wrong

_ALLOWED = ("broadcast", "all_reduce", "all_reduce_mean")


def check(exam: Exam) -> None:
    """The start; the samples; one step; several steps of an uneven batch."""
    with exam.step("all ranks begin with the weights of rank 0"):
        _require_start(exam.run(_start, 3, allowed=_ALLOWED))
    with exam.step("every sample belongs to one rank, also when they do not divide evenly"):
        _require_samples(exam, 2, [8, 2])
        _require_samples(exam, 3, [9, 7, 11])
    with exam.step("a step of two ranks is that of one process"):
        _require_steps(exam, 2, [8])
    with exam.step("three steps of three ranks are those of one process, with 7, 7 and 2 samples") as notes:
        _require_steps(exam, 3, [7, 7, 2])
        notes.append("all ranks have the same weights, to the last bit")
    with exam.step("one rank trains as one process does"):
        _require_steps(exam, 1, [4, 4])


# ── the start ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _start(learner: Any, comms: Any) -> list[torch.Tensor]:
    model = small_model(comms.rank)
    learner.same_start(model, comms)
    return weights(model)


def _require_start(found: list[list[torch.Tensor]]) -> None:
    own = [weights(small_model(rank)) for rank in range(len(found))]
    labels = names(small_model())
    for rank in [*range(1, len(found)), 0]:
        left = [label for label, one, mine in zip(labels, found[rank], own[rank], strict=True) if same([one], [mine])]
        if rank and left and len(left) < len(labels):
            raise Wrong(f"rank {rank} still has its own {', '.join(left)}: broadcast every parameter")
        mistakes = {
            f"rank {rank} still has weights of its own: they are to be rank 0's, in place": own[rank],
            "these are the weights of the last rank, not of rank 0": own[-1],
            "these are the weights of rank 1, not of rank 0": own[1],
            "this is the mean of all ranks' weights: all begin with rank 0's": combined(own, [1 / len(own)] * len(own)),
            "this is the sum of all ranks' weights: all begin with rank 0's": combined(own, [1.0] * len(own)),
        }
        require_equal(flat(found[rank]), flat(own[0]), f"rank {rank}'s weights", suspects(mistakes))


# ── the samples ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _samples(learner: Any, comms: Any, sizes: list[int]) -> list[list[int]]:
    return [_numbers(learner.my_samples(size, comms), size) for size in sizes]


def _numbers(mine: Any, size: int) -> list[int]:
    """The numbers of the samples that a slice chooses."""
    if not isinstance(mine, slice):
        raise Wrong(f"my_samples should return a slice, slice(begin, end), and returned {shown(mine)}")
    try:
        return list(range(size))[mine]
    except (TypeError, ValueError) as error:
        raise Wrong(f"my_samples should return a slice of whole numbers, and returned {mine}: {error}") from None


def _require_samples(exam: Exam, ranks: int, sizes: list[int]) -> None:
    found = exam.run(_samples, ranks, sizes, allowed=_ALLOWED)
    for number, size in enumerate(sizes):
        _require_shared([mine[number] for mine in found], size)


def _require_shared(mine: list[list[int]], size: int) -> None:
    """Refuse samples that several ranks have, or none."""
    case = f"with {size} samples and {len(mine)} ranks, "
    for sample in range(size):
        owners = [rank for rank, samples in enumerate(mine) if sample in samples]
        if len(owners) > 1:
            alike = all(samples == mine[0] for samples in mine)
            what = "all ranks have the same samples" if alike else f"ranks {owners[0]} and {owners[1]} share some"
            raise Wrong(f"{case}{what} (sample {sample}, for one): every sample belongs to exactly one rank")
        if not owners:
            rest = (
                "; what is left over when they do not divide evenly must go somewhere too" if size % len(mine) else ""
            )
            raise Wrong(f"{case}no rank has sample {sample}: every sample belongs to exactly one rank{rest}")


# ── the steps ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class _Found:
    """What a rank has after a step."""

    gradients: list[torch.Tensor | None]
    weights: list[torch.Tensor]
    loss: float
    seen: int  # samples that went through its model
    parameters_reduced: int  # the line where a parameter was all-reduced instead of its gradient; 0 if that is not so


def _train(learner: Any, comms: Any, sizes: list[int]) -> list[_Found]:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    seen: list[int] = []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    places = {parameter.data_ptr() for parameter in model.parameters()}
    found = []
    for step, samples in enumerate(sizes):
        loss = learner.train_step(model, optimizer, *batch(samples, step), comms)
        value = require_number(loss, "the mean loss that train_step returns")
        lines = [one.line for one in calls(comms.row, "all_reduce", "all_reduce_mean") if one.address in places]
        found.append(_Found(gradients(model), weights(model), value, sum(seen), lines[0] if lines else 0))
        seen.clear()
    return found


def _require_steps(exam: Exam, ranks: int, sizes: list[int]) -> None:
    """Compare a step for each size of batch with one process."""
    found = exam.run(_train, ranks, sizes, allowed=_ALLOWED)
    expected = steps_of_one_process(small_model(), [batch(samples, step) for step, samples in enumerate(sizes)])
    shared = exam.run(_samples, ranks, sizes, allowed=_ALLOWED)
    for number, step in enumerate(expected):
        mine = [one[number] for one in shared]
        for rank in range(ranks):
            _require_step(found[rank][number], step, mine, rank, f"step {number + 1}, rank {rank}")
    for number in range(len(sizes)):
        require_same_weights([one[number].weights for one in found], f"after step {number + 1}")


def _require_step(found: _Found, step: WholeBatchStep, mine: list[list[int]], rank: int, where: str) -> None:
    means, own = zip(*(step.of(samples) for samples in mine), strict=True)
    losses = [mean if samples else 0.0 for mean, samples in zip(means, mine, strict=True)]
    shares = [len(samples) / step.samples for samples in mine]
    labels = names(small_model())
    if found.parameters_reduced and len(mine) > 1:
        raise Wrong(
            f"line {found.parameters_reduced} all-reduces the parameter itself: it is the gradients that are averaged, "
            "parameter.grad"
        )
    if found.seen != len(mine[rank]):
        raise Wrong(
            f"{where}: {found.seen} samples went through the model, and this rank has {len(mine[rank])} of the "
            f"{step.samples}: every rank computes its own samples only, or nothing is shared"
        )
    require_no_gradient_lost(found.gradients, labels, where)
    wrong_gradients, wrong_weights = (
        _gradient_suspects(own, shares, rank, step),
        _weight_suspects(own, shares, rank, step),
    )
    require_equal(flat(found.gradients), flat(step.gradients), f"{where}: the gradient", wrong_gradients)
    require_equal(flat(found.weights), flat(step.weights), f"{where}: the weights", wrong_weights)
    _require_loss(found.loss, losses, shares, rank, where)


def _gradient_suspects(
    own: Sequence[list[torch.Tensor]], shares: list[float], rank: int, step: WholeBatchStep
) -> list[Suspect]:
    ranks = len(own)
    own_share = [gradient * shares[rank] for gradient in own[rank]]
    mistakes = {
        f"rank {rank} still holds its own gradient: nothing was averaged": own[rank],
        f"rank {rank} still holds its own share of the gradient: nothing was added up": own_share,
        f"this is the sum of the ranks' means, {ranks} times too large if they have equally many samples: divide, the "
        "loss is a mean": combined(own, [1.0] * ranks),
        "this is the plain mean of the ranks' means, but the ranks have different numbers of samples: weight each by "
        "its share": combined(own, [1 / ranks] * ranks),
        "this was divided twice, by the number of ranks and by each rank's share": (
            combined(own, [share / ranks for share in shares])
        ),
    }
    kept = [combined([step.gradients, step.gradients_before], [1.0, times]) for times in (1.0, float(ranks))]
    words = "the gradients of the step before are still in there: optimizer.zero_grad() before backward"
    return [*suspects(mistakes), *(Suspect(flat(one), words) for one in kept)]


def _weight_suspects(
    own: Sequence[list[torch.Tensor]], shares: list[float], rank: int, step: WholeBatchStep
) -> list[Suspect]:
    early = "the gradient is right, but the optimizer stepped before it had been averaged: average first"
    start = step.weights_before
    return [
        *(
            Suspect(flat(combined([start, own[rank]], [1.0, -LEARNING_RATE * share])), early)
            for share in (1.0, shares[rank])
        ),
        Suspect(flat(start), "the gradient is right, but the optimizer did not step"),
    ]


def _require_loss(found: float, losses: Sequence[float], shares: list[float], rank: int, where: str) -> None:
    if math.isnan(found) and 0 in shares:
        raise Wrong(
            f"{where}: the loss is NaN: the mean over no samples is NaN, and so is NaN · 0; a rank without any adds 0"
        )
    expected = sum(loss * share for loss, share in zip(losses, shares, strict=True))
    mistakes = {
        f"{where}: the loss is this rank's own: average it over the ranks too": losses[rank],
        f"{where}: the loss is this rank's share only: add up the shares of all ranks": losses[rank] * shares[rank],
        f"{where}: the loss is the sum of the ranks' losses: it is to be their mean": sum(losses),
        f"{where}: the loss is the plain mean of the ranks' means, but they have different numbers of samples: weight "
        "each by its share": sum(losses) / len(losses),
    }
    known = [Suspect(_number(value), words) for words, value in mistakes.items()]
    require_equal(_number(found), _number(expected), f"{where}: the loss", known)


def _number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)
