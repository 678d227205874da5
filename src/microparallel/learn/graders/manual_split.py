"""A model cut in two: are there two graphs, and does the gradient cross from one to the other?"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from microparallel.learn.exam import Exam
from microparallel.learn.graders._common import (
    combined,
    gradients,
    in_one_process,
    make_layers,
    mean_loss,
    pipeline_batch,
    require_gradients,
)
from microparallel.learn.graders._stages import NoFirstGradient, SecondBackward, TypedBackwards
from microparallel.learn.requirements import Suspect, flat, require_equal, require_tensor
from microparallel.learn.verdict import Wrong

_SAMPLES = 5
_LAYERS = 4


def check(exam: Exam) -> None:
    """What crosses the cut; the gradients of both parts; a second batch."""
    with exam.step("what crosses the cut is the beginning of a new graph"):
        exam.run(_cross, 1, allowed=())
    with exam.step("both parts have the gradients of the uncut model"):
        _require_step(exam, cut=2)
    with exam.step("the cut may be anywhere"):
        _require_step(exam, cut=1)
        _require_step(exam, cut=3)
    with exam.step("gradients of a second batch are added, as loss.backward() does"):
        _require_two_steps(exam)


def _cross(learner: Any, _: Any) -> None:
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    sent = weight * 2
    received = require_tensor(learner.cross_the_cut(sent), "what crosses the cut")
    if received.grad_fn is not None or received is sent:
        raise Wrong(
            "autograd still finds its way back through the cut: what arrives is part of part 1's graph. "
            "Two processes share no graph, so detach() it"
        )
    if not received.requires_grad:
        raise Wrong(
            "what arrives does not ask for a gradient, so part 2's backward will leave none to hand back: "
            "requires_grad_() is missing"
        )
    require_equal(received.detach(), torch.full((3,), 2.0, dtype=torch.float64), "what crosses the cut")


class _Counted(nn.Sequential):
    """Layers that know how often they were called."""

    calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        result: torch.Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
        return result


def _step(learner: Any, _: Any, cut: int, batches: int) -> list[Any]:
    """The loss of the last batch and the gradients of both parts."""
    layers = make_layers(_LAYERS)
    parts = _Counted(*layers[:cut]), _Counted(*layers[cut:])
    loss = None
    for batch in range(batches):
        inputs, targets = pipeline_batch(_SAMPLES, seed=batch)
        for part in parts:
            part.calls = 0
        try:
            with TypedBackwards():
                loss = learner.split_step(*parts, inputs, targets, mean_loss)
        except NoFirstGradient:
            raise Wrong(_without_gradient(two=parts[1])) from None
        except SecondBackward:
            raise Wrong(
                "a backward went through the same graph twice: each part has a graph of its own, and one backward"
            ) from None
        for number, part in enumerate(parts, 1):
            if part.calls > 1:
                raise Wrong(f"part {number} computed its forward {part.calls} times; once is enough")
    return [require_tensor(loss, "the loss").detach(), gradients(parts[0]), gradients(parts[1])]


def _without_gradient(two: nn.Module) -> str:
    """Why part 1's backward had no gradient to begin with: part 2's was not done yet, or its result was not used."""
    if all(gradient is None for gradient in gradients(two)):
        return "part 1's backward was started before part 2's: received.grad is None until loss.backward() has run"
    return (
        "part 1's backward was started without a gradient: sent is a whole tensor and not a loss: give it what "
        "part 2 found out, received.grad"
    )


def _require_step(exam: Exam, cut: int) -> None:
    [[loss, part1, part2]] = exam.run(_step, 1, cut, 1, allowed=())
    layers = make_layers(_LAYERS)
    inputs, targets = pipeline_batch(_SAMPLES, seed=0)
    expected_loss, expected = in_one_process(layers, inputs, targets)
    first = 2 * cut  # every layer has two parameters
    require_gradients(part2, expected[first:], "part 2", "part 2 has no gradients: its backward was not done")
    missing = "part 1 has no gradients: nothing was handed over the cut. Its backward starts from `sent`"
    require_gradients(part1, expected[:first], "part 1", missing, _suspects(layers, cut, expected[:first]))
    require_equal(loss, expected_loss, "the loss")


def _suspects(layers: list[nn.Module], cut: int, expected: list[torch.Tensor]) -> list[Suspect]:
    inputs, targets = pipeline_batch(_SAMPLES, seed=0)
    part1, part2 = nn.Sequential(*layers[:cut]), nn.Sequential(*layers[cut:])
    sent = part1(inputs)
    received = sent.detach().requires_grad_()
    mean_loss(part2(received), targets).backward()  # type: ignore[no-untyped-call]

    def started_with(gradient: torch.Tensor, words: str) -> Suspect:
        part1.zero_grad()
        sent.backward(gradient, retain_graph=True)
        return Suspect(flat(gradients(part1)), words)

    return [
        started_with(
            torch.ones_like(sent),
            "part 1's backward began with ones, as if the sum of `sent` were the loss: begin with what part 2 found "
            "out, received.grad",
        ),
        started_with(
            sent.detach(),
            "part 1's backward began with the activation itself: what crosses the cut on the way back is its gradient, "
            "received.grad",
        ),
        Suspect(flat(expected) * 2, "part 1 has its gradient twice: its backward was done twice"),
        Suspect(
            flat(expected) / _SAMPLES,
            "part 1's gradient was divided by the number of samples: the loss is a mean already",
        ),
    ]


def _require_two_steps(exam: Exam) -> None:
    [[_, part1, part2]] = exam.run(_step, 1, 2, 2, allowed=())
    both = [in_one_process(make_layers(_LAYERS), *pipeline_batch(_SAMPLES, seed=batch))[1] for batch in range(2)]
    total = combined(both, [1.0, 1.0])
    words = (
        "only the second batch is in the gradients: a step adds to what is there, and its caller decides when "
        "to begin with nothing"
    )
    for found, places, whose in ((part1, slice(0, 4), "part 1"), (part2, slice(4, 8), "part 2")):
        require_gradients(found, total[places], whose, "no gradients", [Suspect(flat(both[1][places]), words)])
