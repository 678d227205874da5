"""A training run as an object: do a step, measure, say where it stands, go on from there.

`Training` is one rank's part of it; in `PipelineTraining` the model is spread over the ranks of a pipeline. Below them
stands what a step needs to be repeatable: the learning rate, a function of the step's number, and the random state.
"""

from __future__ import annotations

import base64
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from microparallel.comms import Comms
from microparallel.comms.wire import gather_json
from microparallel.course.shortcuts import ParameterAveraging
from microparallel.data_parallel import replicas_are_identical
from microparallel.errors import CheckpointError
from microparallel.models.loss import LossFunction, mean_loss
from microparallel.pipeline import Pipeline
from microparallel.train.checkpoint import Checkpoint, gather_states
from microparallel.train.data import Dataset, Split
from microparallel.train.sampler import ShardedSampler
from microparallel.train.strategies import Step

_VALIDATION_BATCH = 256
_WARM_UP = 0.1  # the part of a run in which a linear learning rate goes up


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
        """Add up loss, right answers, answers and samples of a batch; zeros where another rank counts them."""
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
        """Where the run stands, beside the model and the optimizer; a collective, so every rank must call it."""
        return {
            "loss": self.last_loss,
            "sampler": self.sampler.state_dict(),
            "random": gather_json(random_state(), self.comms),
        }

    def model_state(self) -> dict[str, torch.Tensor]:
        """The whole model's state, for rank 0 to save; every rank must call it."""
        state: dict[str, torch.Tensor] = self.model.state_dict()
        return state

    @property
    def parameters(self) -> int:
        """How many numbers the whole model has learnt."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def replicas_are_identical(self) -> bool:
        """Whether ranks that should have the same parameters have the same bits; every rank must call it."""
        return replicas_are_identical(self.model, self.comms)

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state for rank 0 to save, or every rank's where they differ; every rank must call it."""
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
            restore_random_state(states[self.comms.rank])

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


class PipelineTraining(Training):
    """One rank's part in a run whose model is spread over the ranks of a pipeline.

    Its checkpoints are those of the whole model, as one process would write them: a run can go on with other ranks, in
    another layout, or without a pipeline at all.
    """

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
        if outputs is None or self.loss_fn is None:  # the last rank of each pipeline counts
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


def pipeline_step(pipe: Pipeline) -> Step:
    """How a pipeline does a step; the last batch of an epoch may have fewer samples than micro-batches."""

    def step(inputs: Any, targets: torch.Tensor, samples: int) -> torch.Tensor:
        if not len(targets):  # the other replicas have some
            inputs = targets = None  # type: ignore[assignment]
        return pipe.step(inputs, targets, samples=samples, allow_fewer=True)

    return step


# ── the learning rate ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class LearningRate:
    """A learning rate over a run of so many steps: constant, or linear.

    ```
    linear   peak    ╱╲__
                    ╱    ╲__
             0     ╱        ╲__
                   0  10 %    100 % of the steps
    ```

    It is a function of the step alone, so a resumed run needs to remember nothing; one that is made longer follows the
    longer schedule from there on.
    """

    schedule: str
    peak: float
    steps: int

    def at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if self.schedule == "constant":
            return self.peak
        up = max(1, round(_WARM_UP * self.steps))
        if step < up:
            return self.peak * (step + 1) / up
        return self.peak * max(0, self.steps - step) / max(1, self.steps - up)


# ── the random state ──────────────────────────────────────────────────────────────────────────────────────────────────


def random_state() -> dict[str, Any]:
    """Return the state of every random generator of this process, so that a resumed run draws what this one would.

    The values are plain, as JSON holds them. The generators are Python's `random`, torch's on the CPU, one for each GPU
    once CUDA is in use, and numpy's global one once numpy is imported: a run that uses neither cannot depend on them.
    """
    state: dict[str, Any] = {"python": _without_tuples(random.getstate()), "torch": _text(torch.get_rng_state())}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = [_text(generator) for generator in torch.cuda.get_rng_state_all()]
    if "numpy" in sys.modules:
        import numpy

        state["numpy"] = _without_arrays(numpy.random.get_state(legacy=False))
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Put every generator back to where `random_state` found it; the next draws are bit-identical.

    On a machine with fewer GPUs the generators of the missing ones are left out.
    """
    generator = "python"
    try:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        generator = "torch"
        torch.set_rng_state(_tensor(state["torch"]))
        generator = "cuda"
        if "cuda" in state and torch.cuda.is_available():
            for device, text in enumerate(state["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(_tensor(text), device)
        generator = "numpy"
        if "numpy" in state:
            import numpy

            numpy.random.set_state(state["numpy"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"the random state of {generator} cannot be restored ({error}); "
            "it may have been saved with another version of that library: install that one, or start a new run"
        ) from error


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode("ascii")


def _tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(base64.b64decode(text, validate=True)), dtype=torch.uint8)


def _without_tuples(value: Any) -> Any:
    return [_without_tuples(part) for part in value] if isinstance(value, tuple) else value


def _without_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_arrays(part) for key, part in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
