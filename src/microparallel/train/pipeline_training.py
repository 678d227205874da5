"""A training run whose model is spread over the ranks of a pipeline.

Its checkpoints are those of the whole model, as one process would write them: a run can go on with other ranks, in
another layout, or without a pipeline at all.
"""

from __future__ import annotations

from typing import Any

import torch

from microparallel.pipeline import Pipeline
from microparallel.train.checkpoint import Checkpoint
from microparallel.train.gathering import gather_states
from microparallel.train.strategies import Step
from microparallel.train.training import Training


def pipeline_step(pipe: Pipeline) -> Step:
    """A step of a pipeline; the last batch of an epoch may have fewer samples than micro-batches."""

    def step(inputs: Any, targets: torch.Tensor, samples: int) -> torch.Tensor:
        if not len(targets):  # the other replicas have some
            inputs = targets = None  # type: ignore[assignment]
        return pipe.step(inputs, targets, samples=samples, allow_fewer=True)

    return step


class PipelineTraining(Training):
    """One rank's part in a run with pipelines."""

    def __init__(self, pipe: Pipeline, names: dict[str, str], **rest: Any) -> None:
        super().__init__(model=pipe.own_layers, strategy=pipeline_step(pipe), **rest)
        self._pipe = pipe
        self._parameters = pipe.count_parameters()
        self._names = names  # every parameter's name → the first name of that parameter in the whole model

    # ── measuring ───────────────────────────────────────────────────────────────────────────────────────────────

    def _agree_on_buffers(self) -> None:
        self._pipe.broadcast_buffers()

    def _measure(self, inputs: Any, targets: torch.Tensor) -> torch.Tensor:
        outputs = self._pipe.predict(inputs)
        if outputs is None or self.loss_fn is None:  # the last rank of each pipeline tells
            return torch.zeros(4, dtype=torch.float64)
        return self._compare(outputs, targets, self.loss_fn)

    @property
    def parameters(self) -> int:
        """How many numbers the whole model has learnt."""
        return self._parameters

    def replicas_are_identical(self) -> bool:
        """Whether replicas of a stage, and copies of a shared parameter, have the same bits."""
        return self._pipe.replicas_are_identical()

    # ── saving and loading ──────────────────────────────────────────────────────────────────────────────────────

    def model_state(self) -> dict[str, torch.Tensor]:
        """The whole model's state on rank 0."""
        return self._pipe.whole_state_dict() or {}

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state on rank 0, as that of an optimizer of the whole model."""
        mine = self.optimizer.state_dict()
        own = [self._names[name] for name, _ in self._pipe.named_parameters()]
        by_name = {own[index]: state for index, state in mine["state"].items()}
        states: dict[str, Any] = {}
        for theirs in gather_states(by_name if self._pipe.replica == 0 else {}, self.comms):
            states |= theirs
        order = list(dict.fromkeys(self._names.values()))
        group = {**mine["param_groups"][0], "params": list(range(len(order)))}
        return {"state": {order.index(name): state for name, state in states.items()}, "param_groups": [group]}

    def _load_states(self, checkpoint: Checkpoint) -> None:
        self._pipe.load_state_dict(checkpoint.model)
        whole = self._own_part(checkpoint.optimizer_state)
        order = list(dict.fromkeys(self._names.values()))
        own = [order.index(self._names[name]) for name, _ in self._pipe.named_parameters()]
        state = {mine: whole["state"][index] for mine, index in enumerate(own) if index in whole["state"]}
        group = {**whole["param_groups"][0], "params": list(range(len(own)))}
        self.optimizer.load_state_dict({"state": state, "param_groups": [group]})
