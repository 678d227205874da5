"""Watch what happens during backward: when gradients are ready, when all-reduces begin, and when they are waited for.

All from the order of events, and nothing from clocks: a slow machine is judged like a fast one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from microparallel.errors import Mismatch
from microparallel.learn.graders._common_dp import LEARNING_RATE, batch, combined, mean_gradients, small_model
from microparallel.learn.graders._passes import (
    OVER,
    Pass,
    Reduce,
    no_gradient,
    require_asynchronous,
    require_hooks_fit,
)
from microparallel.learn.verdict import NotAllowed, Wrong


class Spared(nn.Module):
    """A model with a layer in the middle that is used in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        layers = list(small_model())
        self.first = nn.Sequential(*layers[:2])
        self.spare = nn.Linear(3, 7).double()
        self.last = nn.Sequential(*layers[2:])
        self.used = True
        for parameter in self.spare.parameters():
            nn.init.constant_(parameter, 0.1)

    def forward(self, inputs: torch.Tensor) -> Any:
        """With the spare layer, or without."""
        hidden = self.first(inputs)
        return self.last(hidden + self.spare(inputs) if self.used else hidden)


def make_model(kind: str) -> nn.Module:
    """A plain one, one with a "frozen" bias, or one with a "spare" layer, which only the first step uses."""
    if kind == "spare":
        return Spared()
    model = small_model()
    if kind == "frozen":
        model[2].bias.requires_grad_(False)
    return model


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that get gradients, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def watch(
    learner: Any,
    comms: Any,
    kind: str,
    steps: int,
    attach: Callable[[nn.Module], Any],
    explain: Callable[[Pass], None] = lambda _: None,
) -> list[Pass]:
    """Train with what the learner attaches to the model, take it off again, and do one more backward.

    When a pass fails, `explain` is shown what has happened until then, and may know a better word for it.
    """
    model = make_model(kind)
    watcher = _Watcher(learner, comms, model, explain)
    attached = attach(model)
    for name in ("finish", "remove"):
        if not callable(getattr(attached, name, None)):
            raise Wrong(f"the hooks have no {name}(): was it renamed or removed?")
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    passes = []
    for step in range(steps):
        optimizer.zero_grad()
        passes.append(watcher.backward(step, attached.finish))
        optimizer.step()
    attached.remove()
    optimizer.zero_grad()
    return [*passes, watcher.backward(steps, lambda: None)]


_NOT_IN_STEP = (
    "rank {}'s all-reduces are not those of the other ranks: the first that one rank begins meets the first of every "
    "other one, whatever is in it. Let gradients (or buckets) leave in the same order on every rank"
)


def _batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's own samples in a step."""
    return batch(4, 100 * step + rank)


@dataclass
class Averages:
    """What is right in a step: every rank's own gradients, and their mean, in the order of `trainable`."""

    own: list[list[torch.Tensor]]
    mean: list[torch.Tensor]
    weights: list[torch.Tensor]  # with which the step began


def averages(kind: str, ranks: int, steps: int) -> list[Averages]:
    """The oracle: one process that takes the mean over all ranks' samples."""
    model = make_model(kind)
    found = []
    for step in range(steps):
        if isinstance(model, Spared):
            model.used = step == 0
        trained = [parameter.requires_grad for parameter in model.parameters()]
        all_own = [mean_gradients(model, *_batch(rank, step)) for rank in range(ranks)]
        own = [[one for one, needed in zip(mine, trained, strict=True) if needed] for mine in all_own]
        weights = [parameter.detach().clone() for parameter in trainable(model).values()]
        found.append(Averages(own, combined(own, [1 / ranks] * ranks), weights))
        with torch.no_grad():
            for parameter, gradient in zip(trainable(model).values(), found[-1].mean, strict=True):
                parameter.sub_(LEARNING_RATE * gradient)
    return found


class _Watcher:
    """Hooks of the grader, which are called before the learner's."""

    def __init__(self, learner: Any, comms: Any, model: nn.Module, more: Callable[[Pass], None]) -> None:
        self._learner, self._comms, self._model, self._more = learner, comms, model, more
        self._places: dict[int, str] = {}  # where each gradient lies
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]

    def _ready(self, parameter: torch.Tensor) -> None:
        name = self._names[parameter]  # type: ignore[index]
        if parameter.grad is not None:
            self._places[parameter.grad.data_ptr()] = name
        self._learner.happens(f"ready {name}")

    def backward(self, step: int, finish: Callable[[], None]) -> Pass:
        """One pass, and what the learner does after it."""
        if isinstance(self._model, Spared):
            self._model.used = step == 0
        inputs, targets = _batch(self._comms.rank, step)
        happened = self._learner.happened
        happened.clear()
        self._comms.log.clear()
        self._places.clear()
        loss = nn.functional.mse_loss(self._model(inputs), targets)
        try:
            loss.backward()  # type: ignore[no-untyped-call]
            self._learner.happens(OVER)
            finish()
        except NotAllowed:
            raise
        except Mismatch:
            raise Wrong(_NOT_IN_STEP.format(self._comms.rank)) from None
        except (Wrong, AttributeError) as error:  # perhaps what happened before has a better word for it
            if "given None" in str(error):
                raise Wrong(no_gradient(happened)) from None
            self._explain(self._pass())
            raise
        return self._pass()

    def _explain(self, one: Pass) -> None:
        require_hooks_fit(one)
        require_asynchronous(one)
        self._more(one)

    def _pass(self) -> Pass:
        log = self._comms.log
        reduces = [self._reduce(entry) for entry in log if entry.call.startswith("all_reduce")]
        gradients = {name: parameter.grad for name, parameter in trainable(self._model).items()}
        ranges = [(entry.address, entry.address + entry.bytes) for entry in log]
        views = any(
            start <= one.data_ptr() < end for one in gradients.values() if one is not None for start, end in ranges
        )
        found = {name: None if one is None else one.detach().clone() for name, one in gradients.items()}
        return Pass(list(self._learner.happened), reduces, found, views)

    def _reduce(self, entry: Any) -> Reduce:
        parameters = {parameter.data_ptr(): name for parameter, name in self._names.items()}
        return Reduce(
            entry.line,
            torch.Size(entry.shape).numel(),
            entry.asynchronous,
            entry.waited,
            self._places.get(entry.address, ""),
            parameters.get(entry.address, ""),
        )
