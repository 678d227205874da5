"""Averaged weights: every few steps, with all that belongs to them; and when that is as if gradients were averaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from microparallel.learn.exam import Exam
from microparallel.learn.graders._common import (
    LEARNING_RATE,
    batch,
    combined,
    in_one_process,
    mean_loss,
    small_model,
    weights,
)
from microparallel.learn.log import calls
from microparallel.learn.requirements import flat, listed, require_equal, require_type, suspects
from microparallel.learn.verdict import Wrong

_ALLOWED = ("all_reduce",)
_RANKS = 2
_STEPS = 6  # of the trainings that are compared with averaged gradients
_EVERY = (1, 2, 3)

_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, LEARNING_RATE),
    "momentum": lambda parameters: torch.optim.SGD(parameters, LEARNING_RATE, momentum=0.9),
    "weight decay": lambda parameters: torch.optim.SGD(parameters, LEARNING_RATE, weight_decay=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, LEARNING_RATE),
}


def check(exam: Exam) -> None:
    """When it averages; weights; what the optimizer and BatchNorm keep; and what is the same as averaged gradients."""
    with exam.step("after steps 3 and 6 the weights are averaged, and in between nothing is sent") as notes:
        _require_moments(exam.run(_train, _RANKS, "sgd", False, 3, 7, allowed=_ALLOWED), 3, notes)
    with exam.step("so is what the optimizer keeps: momentum, and Adam's moments"):
        for optimizer in ("momentum", "adam"):
            _require_averages(exam.run(_train, _RANKS, optimizer, False, 2, 4, allowed=_ALLOWED), 2)
    with exam.step("and BatchNorm's statistics"):
        _require_averages(exam.run(_train, 3, "momentum", True, 2, 4, allowed=_ALLOWED), 2)
    with exam.step("it is predicted when that is the same as averaging gradients") as notes:
        _require_predictions(exam, notes)


# ── on the ranks ────────────────────────────────────────────────────────────────────────────────────────────────────

State = dict[str, torch.Tensor]  # everything that training has changed, by name


@dataclass
class _Step:
    """One step of one rank: its state before and after the call of after_step, and what was sent in it."""

    before: State
    after: State
    messages: int


def _make_model(with_batch_norm: bool) -> nn.Module:
    model = small_model()
    if with_batch_norm:
        model.insert(1, nn.BatchNorm1d(7, dtype=torch.float64))
    return model


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    kept = {name: tensor.detach().clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, torch.Tensor):
                kept[f"{name}: {key}"] = value.detach().clone()
    return kept


def _train(learner: Any, comms: Any, kind: str, with_batch_norm: bool, every: int, steps: int) -> list[_Step]:
    model = _make_model(with_batch_norm)
    optimizer = _OPTIMIZERS[kind](model.parameters())
    averaging = learner.ParameterAveraging(model, optimizer, comms, every)
    done = []
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = batch(4, 100 * step + comms.rank)
        mean_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        before, messages = _state(model, optimizer), len(calls(comms.row))
        averaging.after_step()
        done.append(_Step(before, _state(model, optimizer), len(calls(comms.row)) - messages))
    unfinished = [call for call in calls(comms.row) if not call.ended]
    if unfinished:
        raise Wrong(f"an all-reduce that was begun in line {unfinished[0].line} was never waited for")
    return done


# ── when, and what ──────────────────────────────────────────────────────────────────────────────────────────────────


def _require_moments(found: list[list[_Step]], every: int, notes: list[str]) -> None:
    for rank, steps in enumerate(found):
        sent = [number for number, step in enumerate(steps, 1) if step.messages]
        right = [number for number in range(1, len(steps) + 1) if number % every == 0]
        if sent != right:
            when = f"averages after steps {listed(sent)}" if sent else "never averages"
            raise Wrong(
                f"every={every}: of {len(steps)} steps rank {rank} {when}, and should after steps "
                f"{listed(right)}: count the step first, then ask whether `every` divides their number"
            )
    _require_averages(found, every)
    notes.append(f"{found[0][every - 1].messages} all-reduces in {every} steps")


def _require_averages(found: list[list[_Step]], every: int) -> None:
    """Refuse a rank whose state after an average is not the mean of what the ranks had before."""
    for number in range(every - 1, len(found[0]), every):
        steps = [mine[number] for mine in found]
        for name, own in steps[0].before.items():
            if own.is_floating_point():
                for rank, step in reversed(list(enumerate(steps))):  # rank 0's own may have been given to all
                    _require_average(name, rank, [one.before[name] for one in steps], step, number + 1)
        for rank, step in enumerate(steps):
            for name in step.before:
                mine, first = (one.after.get(name) for one in (step, steps[0]))
                if mine is None or first is None or not torch.equal(mine, first):
                    raise Wrong(f"after step {number + 1} rank {rank}'s {name} is not that of rank 0")


def _require_average(name: str, rank: int, before: list[torch.Tensor], step: _Step, number: int) -> None:
    what = f"after step {number} rank {rank}'s {name}"
    if name not in step.after:
        raise Wrong(f"{what} is gone: average what the optimizer keeps, and do not throw it away")
    mean, own = torch.stack(before).mean(0), before[rank]
    known = {
        f"{what} is still its own: {_why(name)}": [own],
        f'{what} is the sum over the ranks: divide by the world size, or use op="mean"': [torch.stack(before).sum(0)],
        f"{what} is that of rank 0: what the other ranks have learnt is lost; average it": [before[0]],
        f"{what} is zero: average what is there": [torch.zeros_like(own)],
    }
    require_equal(flat([step.after[name]]), flat([mean]), what, suspects(known))


def _why(name: str) -> str:
    if ": " in name:
        return (
            "the optimizer keeps it from step to step. A checkpoint of rank 0 would have rank 0's alone, and the "
            "averaged weights would go on in as many directions as there are ranks"
        )
    if "running" in name:
        return "BatchNorm has seen this rank's samples only, and the averaged weights belong to those of all ranks"
    return (
        "the average must be written into the tensor itself. `tensor = …` gives another one that name, and a clone is "
        "another memory"
    )


# ── the same as averaged gradients? ─────────────────────────────────────────────────────────────────────────────────


def _cases() -> list[tuple[str, int]]:
    return [(optimizer, every) for optimizer in _OPTIMIZERS for every in _EVERY]


def _predict(learner: Any, _: Any) -> list[bool]:
    return [
        require_type(learner.same_as_gradients(*case), bool, "same_as_gradients", "True or False") for case in _cases()
    ]


def _averaged_weights(learner: Any, comms: Any) -> list[torch.Tensor]:
    """The weights after each training, one for each case; the last steps are averaged in any case."""
    return [flat(_train(learner, comms, kind, False, every, _STEPS)[-1].after.values()) for kind, every in _cases()]


def _averaged_gradients(kind: str) -> torch.Tensor:
    """The weights of one process that takes the mean of all ranks' gradients in every step."""
    model = small_model()
    optimizer = _OPTIMIZERS[kind](model.parameters())
    for step in range(_STEPS):
        own = [in_one_process(model, *batch(4, 100 * step + rank))[1] for rank in range(_RANKS)]
        for parameter, gradient in zip(model.parameters(), combined(own, [1 / _RANKS] * _RANKS), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return flat(weights(model))


_BECAUSE = {
    "adam": (
        "Adam divides each gradient by its own recent size, so a step is not linear in the gradient, and the average "
        "of two steps is not the step by the average"
    ),
    "later": (
        "after the first step every rank has weights of its own, and asks for its next gradient there: nobody computes "
        "the gradient that averaging gradients would have used"
    ),
    "linear": (
        "all ranks begin each step with the same weights, and the step is linear in the gradient: the average of the "
        "steps is the step by the average"
    ),
}


def _require_predictions(exam: Exam, notes: list[str]) -> None:
    predicted = exam.run(_predict, 1, allowed=())[0]
    trained = exam.run(_averaged_weights, _RANKS, allowed=_ALLOWED)[0]
    sizes = len(flat(weights(small_model())))
    for (kind, every), said, found in zip(_cases(), predicted, trained, strict=True):
        apart = (found[:sizes] - _averaged_gradients(kind)).abs().max().item()
        same = apart < 1e-9
        if said != same:
            why = _BECAUSE["linear" if same else "adam" if every == 1 else "later"]
            raise Wrong(
                f"same_as_gradients({kind!r}, {every}) is {said}, but after {_STEPS} steps the weights are {apart:.1g} "
                f"from those of averaged gradients, {'which is rounding' if same else 'which is no rounding'}: {why}"
            )
    notes.append(f"{len(predicted)} cases, of which {sum(predicted)} are the same")
