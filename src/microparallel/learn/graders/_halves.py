"""The two halves of a backward, as a learner writes them: each alone, and both in a pipeline's step.

Which gradients a half computes is seen by hooks on the tensors, which torch calls whenever it computes their gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
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
from microparallel.learn.requirements import (
    Suspect,
    flat,
    listed,
    require_equal,
    require_tensor,
    shown,
    suspects,
)
from microparallel.learn.verdict import Wrong
from microparallel.program import Act, Grad, Program, TrainingStep
from microparallel.program import ops as o

_SAMPLES = 5
_TWO = 2  # micro-batches, whose gradients add up


# ── each half alone ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Half:
    """What one half did for one micro-batch: what it returned, and whose gradients torch computed meanwhile."""

    returned: Any
    computed: list[str]
    weights: list[torch.Tensor | None]  # the stage's gradients afterwards


def require_input_half(exam: Exam) -> None:
    """Refuse an input half that does not return the gradient of the input, or that computes more than that."""
    [(halves, _)] = exam.run(_do_halves, 1, False, allowed=())
    for number, half in enumerate(halves):
        expected, ones = (_truth(number, begin)[0] for begin in (_began_with(number), None))
        wrong = [Suspect(ones, "the gradient that came from the next rank is not used: I begins with it")]
        require_equal(half.returned, expected, f"what input_half returns for micro-batch {number}", wrong)
        weights = [name for name in half.computed if name != "received"]
        if weights:
            raise Wrong(
                f"input_half also computes the gradients of {listed(weights)}: then the rank before waits for them, "
                "too. Ask autograd for the gradient of `received` alone"
            )


def require_weight_half(exam: Exam) -> None:
    """Refuse a weight half that does not add the weights' gradients, or that finds the input's gradient again."""
    [(_, halves)] = exam.run(_do_halves, 1, True, allowed=())
    each = [_truth(number, _began_with(number))[1] for number in range(_TWO)]
    so_far = [each[0], combined(each, [1.0, 1.0])]
    for number, half in enumerate(halves):
        wrong = {
            "the gradients of the micro-batch before are gone: each W adds its own to what is there": each[1],
            "the gradient that came from the next rank is not used: W begins with it, too": _truth(number, None)[1],
        }
        require_gradients(
            half.weights,
            so_far[number],
            f"the stage, after W of micro-batch {number},",
            "weight_half leaves no gradient in parameter.grad: torch.autograd.grad returns them, and you add them",
            suspects(wrong),
        )
        if "received" in half.computed:
            raise Wrong(
                "weight_half computes the gradient of the input again, which input_half has done: ask for the "
                "gradients of the stage's parameters alone"
            )


def _do_halves(learner: Any, _: Any, both: bool) -> tuple[list[Half], list[Half]]:
    """Two forwards; then I of both; then, if asked for, W of both."""
    computed: list[str] = []
    stage = _stage(computed)
    forwards = [_forward(stage, number, computed) for number in range(_TWO)]
    first, second = [], []
    for number, (received, outputs) in enumerate(forwards):
        found = _call(learner.input_half, received, outputs, _began_with(number))
        if isinstance(found, tuple) and len(found) == 1:
            raise Wrong(
                "input_half returns a tuple: torch.autograd.grad returns one gradient for each input, in a tuple"
            )
        if found is None:
            raise Wrong("input_half returns None, and should return the gradient of `received`")
        first.append(Half(require_tensor(found, "what input_half returns").detach(), computed[:], gradients(stage)))
        computed.clear()
    for number, (_received, outputs) in enumerate(forwards if both else []):
        found = _call(learner.weight_half, stage, outputs, _began_with(number))
        if found is not None:
            raise Wrong(
                f"weight_half returns {shown(found)}: it puts gradients into parameter.grad, and returns nothing"
            )
        second.append(Half(None, computed[:], gradients(stage)))
        computed.clear()
    return first, second


def _call(function: Any, *arguments: Any) -> Any:
    try:
        with TypedBackwards():
            return function(*arguments)
    except NoFirstGradient:
        raise Wrong(
            "a half begins without a gradient: what a stage returns is no loss, so hand `gradient` to autograd"
        ) from None
    except SecondBackward:
        raise Wrong(
            "W finds that the graph has been freed: autograd frees a graph that it has gone through, unless it is told "
            "retain_graph=True. I goes first, so I must say that"
        ) from None


def _stage(computed: list[str]) -> nn.Module:
    stage = make_layers(1)[0]
    for name, parameter in stage.named_parameters():
        parameter.register_hook(lambda _, name=name: computed.append(name))  # type: ignore[no-untyped-call]
    return stage


def _forward(stage: nn.Module, number: int, computed: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    received = pipeline_batch(_SAMPLES, seed=number)[0].requires_grad_()
    received.register_hook(lambda _: computed.append("received"))  # type: ignore[no-untyped-call]
    return received, stage(received)


def _began_with(number: int) -> torch.Tensor:
    """What the next rank sends."""
    return pipeline_batch(_SAMPLES, seed=number)[1]


def _truth(number: int, begin: torch.Tensor | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The gradients of the input and of the weights, from one backward; ones to begin with if nothing is given."""
    stage = _stage([])
    received, outputs = _forward(stage, number, [])
    begin = torch.ones_like(outputs) if begin is None else begin
    first, *others = torch.autograd.grad(outputs, [received, *stage.parameters()], begin)
    return first, list(others)


# ── both in a step ──────────────────────────────────────────────────────────────────────────────────────────────────


def follow_program(exam: Exam, program: Program) -> None:
    """Let ranks follow a program with the learner's halves, and compare their gradients with one process."""
    ranks = program.world_size
    results = exam.run(_follow, ranks, program, allowed=("isend", "recv_tensor"))
    loss, expected = in_one_process(make_layers(ranks), *_batch(program))
    for rank in reversed(range(ranks)):
        own = expected[2 * rank : 2 * rank + 2]
        require_gradients(
            results[rank][1], own, f"rank {rank}", f"rank {rank} has no gradients", _step_suspects(rank, own)
        )
    require_equal(results[-1][0], loss, "the loss of the last rank")


def _step_suspects(rank: int, own: list[torch.Tensor]) -> list[Suspect]:
    twice = Suspect(flat(combined([own], [2.0])), f"rank {rank}'s gradients are added twice: by I and by W")
    return [twice]


def _batch(program: Program) -> tuple[torch.Tensor, torch.Tensor]:
    assert isinstance(program.goal, TrainingStep)
    return pipeline_batch(2 * program.goal.microbatches, seed=0)


def _follow(learner: Any, comms: Any, program: Program) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Do a rank's operations. The messages are sent here, and both halves of a backward are the learner's."""
    rank, last = comms.rank, program.world_size - 1
    inputs, targets = _batch(program)
    parts, answers = (tensor.tensor_split(program.goal.microbatches) for tensor in (inputs, targets))  # type: ignore[union-attr]
    stage, total = make_layers(program.world_size)[rank], torch.zeros((), dtype=inputs.dtype)
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    values: dict[Any, torch.Tensor] = {}
    requests = []
    for op in program.ranks[rank]:
        match op:
            case o.Recv(value, source):
                values[value] = comms.recv_tensor(parts[value.microbatch].shape, source, inputs.dtype)  # type: ignore[union-attr]
            case o.Send(value, to):
                requests.append(comms.isend(values[value], to))
            case o.Forward(_, m):
                received = (parts[m].clone() if rank == 0 else values[Act(rank - 1, m)]).requires_grad_()
                outputs = stage(received)
                values[Act(rank, m)] = outputs.detach()
                if rank == last:
                    outputs = mean_loss(outputs, answers[m]) / len(parts)
                    total += outputs.detach()
                kept[m] = received, outputs
            case o.BackwardInput(_, m):
                received, outputs = kept[m]
                begin = torch.ones_like(outputs) if rank == last else values[Grad(rank, m)]
                values[Grad(rank - 1, m)] = _call(learner.input_half, received, outputs, begin).detach()
            case o.BackwardWeight(_, m):
                _, outputs = kept.pop(m)
                begin = torch.ones_like(outputs) if rank == last else values[Grad(rank, m)]
                _call(learner.weight_half, stage, outputs, begin)
    for request in requests:
        request.wait()
    return total, gradients(stage)
