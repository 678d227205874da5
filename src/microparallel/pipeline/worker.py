"""What one rank computes in a training step, and what it holds meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from microparallel.errors import StageError, UsageError
from microparallel.pipeline.boundary import Boundary
from microparallel.pipeline.stage import Pass, Stage
from microparallel.program import Act, Backward, BackwardInput, BackwardWeight, Forward, Grad, Op, Value, halves
from microparallel.program.rules import Compute
from microparallel.torch_private import pytree

_WORDS = {
    Forward: "forward",
    Backward: "backward",
    BackwardInput: "input half of the backward",
    BackwardWeight: "weight half of the backward",
}


@dataclass(frozen=True)
class Microbatch:
    """One micro-batch, as a rank sees it.

    Attributes:
        boundaries: what crosses into each of the rank's stages and out of it: -1 is the batch itself, s what stage s
            returns.
        inputs: what the first stage gets, where this rank has it.
        targets: what the last stage's outputs are compared with, where this rank has it.
        weight: how much of the whole batch it is.
    """

    boundaries: Mapping[int, Boundary]
    inputs: Any = None
    targets: Any = None
    weight: float = 1.0


class Worker:
    """The stages of a rank, and the tensors of one step by the names that a program gives them."""

    def __init__(
        self,
        rank: int,
        stages: Mapping[int, Stage],
        last_stage: int,
        microbatches: Sequence[Microbatch],
        device: torch.device,
    ) -> None:
        self.values: dict[Value, list[torch.Tensor]] = {}
        self.loss = torch.zeros((), dtype=torch.float64)  # the mean over the batch, as far as it is known here
        self.outputs: dict[int, Any] = {}  # the last stage's, where there is no loss to compute
        self.most_kept = 0  # activations at once
        self._rank = rank
        self._stages = stages
        self._last = last_stage
        self._microbatches = microbatches
        self._device = device
        self._kept: dict[tuple[int, int], Pass] = {}

    def compute(self, op: Op) -> None:
        """Do an operation on a stage, or a pair of them."""
        for half in halves(op):
            try:
                self._compute(half)
            except (StageError, UsageError):
                raise
            except Exception as error:
                raise self._failure(half, f"{type(error).__name__}: {error}") from error

    def _compute(self, op: Compute) -> None:
        match op:
            case Forward(stage, number):
                self._forward(self._stages[stage], number)
            case Backward(stage, number):
                self._pass_on(op, self._stages[stage].backward(self._kept[stage, number], self._gradients(op)))
                del self._kept[stage, number]
            case BackwardInput(stage, number):
                self._pass_on(op, self._stages[stage].backward_input(self._kept[stage, number], self._gradients(op)))
            case BackwardWeight(stage, number):
                self._stages[stage].backward_weight(self._kept.pop((stage, number)))

    # ── forward ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _forward(self, stage: Stage, number: int) -> None:
        microbatch = self._microbatches[number]
        boundary = microbatch.boundaries[stage.index - 1]
        targets = self._targets(number) if stage.index == self._last else None
        outputs, leaves, put_off = stage.forward(boundary, self._inputs(stage.index, number), targets)
        results = self._results(stage, number, outputs)
        self.values[Act(stage.index, number)] = [result.detach() for result in results]
        if torch.is_grad_enabled():
            self._kept[stage.index, number] = Pass(
                leaves, [result for result in results if result.requires_grad], put_off
            )
            self.most_kept = max(self.most_kept, len(self._kept))

    def _inputs(self, stage: int, number: int) -> list[torch.Tensor]:
        if stage > 0:
            return self.values[Act(stage - 1, number)]
        leaves = pytree.tree_leaves(self._microbatches[number].inputs)
        return [leaf.to(self._device) for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def _targets(self, number: int) -> Any:
        targets = self._microbatches[number].targets
        return pytree.tree_map_only(torch.Tensor, lambda target: target.to(self._device), targets)

    def _results(self, stage: Stage, number: int, outputs: Any) -> list[torch.Tensor]:
        """What is sent on: the outputs; at the end of the model, the loss."""
        microbatch = self._microbatches[number]
        if stage.index != self._last:
            expected = microbatch.boundaries[stage.index]
            returned = Boundary.of(outputs, f"what stage {stage.index} returns")
            if returned != expected:
                raise self._failure(
                    Forward(stage.index, number),
                    f"returned {returned}, and its dry run {expected}{_and_gradients(returned, expected)}",
                )
            return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        if microbatch.targets is None:
            self.outputs[number] = outputs
            return []
        if not isinstance(outputs, torch.Tensor) or outputs.numel() != 1:
            got = f"a tensor of shape {list(outputs.shape)}" if isinstance(outputs, torch.Tensor) else repr(outputs)
            raise UsageError(f"loss_fn returned {got}; it must return the mean over the samples, one number")
        weighted = outputs * microbatch.weight
        self.loss += weighted.detach().double().cpu().reshape(())
        return [weighted]

    # ── backward ────────────────────────────────────────────────────────────────────────────────────────────────

    def _gradients(self, op: Backward | BackwardInput) -> list[torch.Tensor]:
        """The gradients of a stage's outputs; the loss's own is 1."""
        if op.stage == self._last:
            return [torch.ones_like(output) for output in self._kept[op.stage, op.microbatch].outputs]
        return self.values[Grad(op.stage, op.microbatch)]

    def _pass_on(self, op: Backward | BackwardInput, gradients: list[torch.Tensor]) -> None:
        if op.stage > 0:
            self.values[Grad(op.stage - 1, op.microbatch)] = gradients

    # ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────

    def free(self, value: Value) -> None:
        """Forget a value."""
        self.values.pop(value, None)

    def buffers(self, value: Value) -> list[torch.Tensor]:
        """Memory to receive a value into."""
        if not isinstance(value, Act | Grad):
            raise UsageError(f"{value} cannot be received; only activations and their gradients travel")
        boundary = self._microbatches[value.microbatch].boundaries[value.stage]
        contents = boundary.contents if isinstance(value, Act) else boundary.gradients
        return [torch.empty(content.shape, dtype=content.dtype, device=self._device) for content in contents]

    def _failure(self, op: Compute, reason: str) -> StageError:
        boundary = self._microbatches[op.microbatch].boundaries[op.stage - 1]
        return StageError(
            f"rank {self._rank}, stage {op.stage}, {_WORDS[type(op)]} of micro-batch {op.microbatch} on {boundary}: "
            f"{reason}"
        )


def _and_gradients(returned: Boundary, expected: Boundary) -> str:
    """Where shapes agree, the difference is in who needs a gradient."""
    if str(returned) != str(expected):
        return ""
    needs = [content.needs_gradient for content in returned.contents]
    return f": tensors need gradients {needs}; freeze parameters before the pipeline is made"
