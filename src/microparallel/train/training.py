"""A training run as an object: do a step, measure, say where you stand, go on from there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from microparallel.comms import Comms
from microparallel.comms.notes import gather_json
from microparallel.data_parallel import LossFunction, ParameterAveraging, mean_loss, replicas_are_identical
from microparallel.errors import CheckpointError
from microparallel.train import random_state
from microparallel.train.checkpoint import Checkpoint
from microparallel.train.data import Dataset, Split
from microparallel.train.gathering import gather_states
from microparallel.train.learning_rate import LearningRate
from microparallel.train.sampler import ShardedSampler
from microparallel.train.strategies import Step

_VALIDATION_BATCH = 256


@dataclass(frozen=True)
class Validation:
    """How well a model does on data it has not learnt from; accuracy is None where there is nothing to count."""

    loss: float
    accuracy: float | None


class Training:
    """One rank's part in a training run."""

    def __init__(
        self,
        comms: Comms,
        model: nn.Module,
        loss_fn: LossFunction | None,
        optimizer: torch.optim.Optimizer,
        data: Split,
        sampler: ShardedSampler,
        strategy: Step,
        learning_rate: LearningRate,
        dtype: torch.dtype,
        averaging: ParameterAveraging | None = None,
    ) -> None:
        self.comms = comms
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.data = data
        self.sampler = sampler
        self.strategy = strategy
        self.averaging = averaging
        self.steps_done = 0
        self.last_loss: float | None = None
        self.last_samples = 0  # of all ranks together, in the last step
        self._learning_rate = learning_rate
        self._dtype = dtype
        self._batches: Iterator[list[int]] = iter(())

    def step(self) -> float:
        """Do one step, and return the mean loss of its global batch."""
        inputs, targets, samples = self.draw()
        self.set_learning_rate(self.steps_done)
        self.optimizer.zero_grad()
        loss = self.strategy(inputs, targets, samples)
        self.optimizer.step()
        if self.averaging is not None:
            self.averaging.after_step(samples=len(targets))
        self.steps_done += 1
        self.last_samples = samples
        self.last_loss = float(loss)
        return self.last_loss

    def draw(self) -> tuple[Any, torch.Tensor, int]:
        """Take the next batch: this rank's inputs and targets of it, and how many samples all ranks have."""
        indices, samples = self._next_batch()
        return *self.batch(self.data.training, indices), samples

    def set_learning_rate(self, step: int) -> None:
        """Tell the optimizer the learning rate of that step."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate.at(step)

    def come_together(self) -> None:
        """Make the ranks' models the same at the end, where each has been learning on its own."""
        if self.averaging is not None:
            self.averaging.average()

    def validate(self) -> Validation | None:
        """Measure on the held-back data, every rank on its share; None when nothing was held back."""
        data = self.data.validation
        if data is None:
            return None
        self._agree_on_buffers()
        sums = torch.zeros(4, dtype=torch.float64)  # loss, right answers, answers, samples
        sampler = ShardedSampler(data, _VALIDATION_BATCH, comms=self.sampler, shuffle=False)
        self.model.eval()
        with torch.no_grad():
            for indices in sampler:
                if indices:
                    sums += self._measure(*self.batch(data, indices))
        self.model.train()
        loss, right, answers, samples = self.comms.all_reduce(sums).tolist()
        return Validation(loss / samples, right / answers if answers else None)

    def _agree_on_buffers(self) -> None:
        """Let all ranks have rank 0's batch statistics: those are the ones that are kept."""
        for buffer in self.model.buffers():
            self.comms.broadcast(buffer)

    def _measure(self, inputs: Any, targets: torch.Tensor) -> torch.Tensor:
        """Add up loss, right answers, answers and samples of a batch, as far as this rank is to tell them."""
        samples = len(targets)
        if self.loss_fn is None:
            return torch.tensor([float(mean_loss(self.model, inputs, targets)) * samples, 0, 0, samples])
        return self._compare(self.model(inputs), targets, self.loss_fn)

    def _compare(self, outputs: torch.Tensor, targets: torch.Tensor, loss_fn: LossFunction) -> torch.Tensor:
        samples = len(targets)
        loss = float(loss_fn(outputs, targets)) * samples
        classes = not targets.dtype.is_floating_point and outputs.shape[:-1] == targets.shape
        right = int((outputs.argmax(-1) == targets).sum()) if classes else 0
        return torch.tensor([loss, right, targets.numel() if classes else 0, samples], dtype=torch.float64)

    def state(self) -> dict[str, Any]:
        """Where the run stands, beside the model and the optimizer; every rank must ask for it together."""
        return {
            "loss": self.last_loss,
            "sampler": self.sampler.state_dict(),
            "random": gather_json(random_state.capture(), self.comms),
        }

    def model_state(self) -> dict[str, torch.Tensor]:
        """The whole model's state, for rank 0 to save; all must ask together."""
        state: dict[str, torch.Tensor] = self.model.state_dict()
        return state

    @property
    def parameters(self) -> int:
        """How many numbers the whole model has learnt."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def replicas_are_identical(self) -> bool:
        """Whether ranks that should have the same parameters have the same bits; all must ask together."""
        return replicas_are_identical(self.model, self.comms)

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state, for rank 0 to save: the same on every rank, or everybody's; all must ask together."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return state if self.averaging is None else {"by_rank": gather_states(state, self.comms)}

    def load(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint, bit for bit when the world has the size it had then."""
        try:
            self._load_states(checkpoint)
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(f"the checkpoint does not fit the model: {error}") from error
        self.sampler.load_state_dict(checkpoint.state["sampler"])
        self._batches = iter(())
        self.steps_done = checkpoint.step
        self.last_loss = checkpoint.state["loss"]
        if self.averaging is not None:
            self.averaging.steps = checkpoint.step
        states = checkpoint.state["random"]
        if len(states) == self.comms.world_size:
            random_state.restore(states[self.comms.rank])

    def _load_states(self, checkpoint: Checkpoint) -> None:
        self.model.load_state_dict(checkpoint.model)
        self.optimizer.load_state_dict(self._own_part(checkpoint.optimizer_state))

    def _own_part(self, state: dict[str, Any]) -> dict[str, Any]:
        """Find this rank's optimizer state; a rank that was not there before takes another's."""
        if "by_rank" not in state:
            return state
        states: list[dict[str, Any]] = state["by_rank"]
        return states[self.comms.rank % len(states)]

    def _next_batch(self) -> tuple[list[int], int]:
        number = self.sampler.state_dict()["batch"]
        indices = next(self._batches, None)
        if indices is None:  # an epoch is over, or nothing has begun
            self._batches = iter(self.sampler)
            indices = next(self._batches)
        return indices, self.sampler.global_batch_size(number)

    def batch(self, data: Dataset, indices: list[int]) -> tuple[Any, torch.Tensor]:
        """Some samples of a dataset, on this rank's device."""
        inputs, targets = data.batch(indices)
        return self._place(inputs), self._place(targets)

    def _place(self, value: Any) -> Any:
        """Bring a batch to this rank's device, and its real numbers to the run's dtype."""
        if isinstance(value, torch.Tensor):
            return value.to(self.comms.device, self._dtype if value.is_floating_point() else value.dtype)
        if isinstance(value, dict):
            return {key: self._place(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._place(part) for part in value)
        return value
