"""A training run as an object: do a step, measure, say where it stands, go on from there.

`Training` is one rank's part of it; in `PipelineTraining` the model is spread over the ranks of a pipeline, and in
`FullyShardedTraining` (`fully_sharded.py`) each rank has a part of every parameter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from microparallel.comms import Comms
from microparallel.comms.wire import gather_json
from microparallel.course.shortcuts import ParameterAveraging
from microparallel.data_parallel import DataParallel, LossScale, replicas_are_identical
from microparallel.data_parallel.layout import Part
from microparallel.errors import CheckpointError, ConfigError, GradientError
from microparallel.pipeline import Pipeline
from microparallel.train import checkpoint
from microparallel.train.batch import Batch, ModelSignature, ModelWithLoss, placed
from microparallel.train.checkpoint_reader import Checkpoint, StateReader, StoredTensor, read_whole
from microparallel.train.data import Split
from microparallel.train.fingerprint import changes
from microparallel.train.guard import explain, not_finite
from microparallel.train.loader import Loaded, Loader
from microparallel.train.metrics import Measurement, Metric, Validation
from microparallel.train.mixed_precision import MixedModelWithLoss
from microparallel.train.optimizer import LearningRate
from microparallel.train.random_state import own_randomness, restore_random_state
from microparallel.train.replica_check import find_difference
from microparallel.train.shares import Shares
from microparallel.train.state_memory import Slot
from microparallel.train.strategies import Step


@runtime_checkable
class HasParts(Protocol):
    """An optimizer of which each rank holds the state of some elements only (ZeRO).

    `state_parts` returns what the `state_dict` of an optimizer of all elements would, with a `Part` for each tensor of
    which this rank has some elements, and without those of which it has none. `load_state_parts` takes the groups of
    such a state, and calls `read(index, key, start, stop)` for the elements that it needs.
    """

    def state_parts(self) -> dict[str, Any]:
        """Return this rank's part of the state."""

    def load_state_parts(self, groups: list[dict[str, Any]], read: StateReader) -> None:
        """Take this rank's part out of a whole state."""


class KeepsResiduals(Protocol):
    """A wrapper with `compress=`: DataParallel, say."""

    def compression_state(self) -> dict[str, Any]:
        """Return what this rank keeps from pass to pass."""

    def load_compression_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on with what all ranks had kept."""


class Training:
    """One rank's part in a training run.

    Args:
        comms: the ranks.
        model: the plain model, or this rank's layers of it.
        with_loss: the model that is called with a batch and returns the loss.
        signature: how the model is called with a batch.
        optimizer: of the model's parameters; its learning rates are the peaks of `learning_rate`.
        data: to learn from and to measure on.
        loader: of the training data.
        measuring: a loader of the held-back data, if there is any.
        strategy: how a step is done.
        shares: this rank's, of every batch.
        learning_rate: over the steps.
        dtype: of real numbers.
        clip: the largest norm of all gradients together.
        on_nan: what a step does whose loss is not finite: "stop", "skip" or "ignore".
        metrics: what else is measured, by name.
        averaging: of the ranks' parameters, where gradients are not averaged.
        sharded: the wrapped model, where each rank has its part of the gradients alone.
        loss_scale: of a run in float16.
        compressed: what keeps what was not sent of gradients, where they are compressed.
    """

    def __init__(
        self,
        *,
        comms: Comms,
        model: nn.Module,
        with_loss: ModelWithLoss | MixedModelWithLoss,
        signature: ModelSignature,
        optimizer: torch.optim.Optimizer,
        data: Split,
        loader: Loader,
        measuring: Loader | None,
        strategy: Step,
        shares: Shares,
        learning_rate: LearningRate,
        dtype: torch.dtype,
        clip: float | None = None,
        on_nan: str = "ignore",
        metrics: Mapping[str, Metric] | None = None,
        averaging: ParameterAveraging | None = None,
        sharded: DataParallel | None = None,
        loss_scale: LossScale | None = None,
        compressed: KeepsResiduals | None = None,
    ) -> None:
        self.comms = comms
        self.model = model
        self.with_loss = with_loss
        self.optimizer = optimizer
        self.data = data
        self.loader = loader
        self.strategy = strategy
        self.averaging = averaging
        self.loss_scale = loss_scale
        self.steps_done = 0
        self.last_loss: float | None = None
        self.last_samples = 0  # of all ranks together, in the last step
        self.made_of: dict[str, Any] | None = None  # the fingerprint of code, data and parameters
        self.left_out = 0  # steps whose loss or gradients were not finite, and which changed nothing
        self._signature = signature
        self._shares = shares
        shares.draw_apart(model)
        self._measuring = measuring
        self._learning_rate = learning_rate
        self._peaks = [group["lr"] for group in optimizer.param_groups]
        self._dtype = dtype
        self._clip = clip
        self._on_nan = on_nan
        self._metrics = metrics or {}
        self._sharded = sharded
        self._compressed = compressed

    @property
    def total_steps(self) -> int:
        """How many steps the run has from its beginning to its end."""
        return self._learning_rate.steps

    def step(self) -> float:
        """Do one step, and return the mean loss of its global batch."""
        batches, samples = self.draw()
        self.set_learning_rate(self.steps_done)
        self.optimizer.zero_grad()
        overflows = self._overflows
        loss = float(self.strategy(batches, samples))
        # In float16 a sum may overflow: then the wrapper has left no gradients, and has made the scale smaller.
        finite = math.isfinite(loss) or self._overflows > overflows
        if not finite and self._on_nan == "stop":
            raise self._not_finite(f"the loss of step {self.steps_done + 1} is {loss}", batches)
        norm = self.clip_gradients()
        if self._on_nan == "skip" and not (finite and math.isfinite(norm)):
            self.optimizer.zero_grad()
            self.left_out += 1
        else:
            self.optimizer.step()
        if self.averaging is not None:
            self.averaging.after_step(samples=sum(map(len, batches)))
        self.steps_done += 1
        self.last_samples = samples
        self.last_loss = loss
        return loss

    @property
    def _overflows(self) -> int:
        return 0 if self.loss_scale is None else self.loss_scale.skipped

    def _not_finite(self, what: str, batches: Sequence[Batch]) -> GradientError:
        where = explain(self.model, self.with_loss, batches, self.comms, self.steps_done + 1)
        return GradientError(
            f"{what}, and nothing of this step was kept\n{where}\n"
            "  try: a smaller --lr, or --on-nan skip, which leaves such steps out"
        )

    def has_finite_weights(self) -> bool:
        """Whether the parameters of all ranks are finite: the same answer on each, all of which ask."""
        mine = not_finite(self.model.named_parameters())
        return not self.comms.all_reduce(torch.tensor(len(mine))).item()

    def require_finite_weights(self) -> None:
        """Raise a GradientError, on every rank, if some rank's parameters are not finite."""
        if not self.has_finite_weights():
            raise self._not_finite(f"weights are not finite after step {self.steps_done}", [])

    def find_difference(self) -> str | None:
        """Which rank has other weights than its replicas, and where; None if there is none; every rank calls it."""
        names = self.first_names
        return find_difference({names.get(name, name): one for name, one in self.model_parts().items()}, self.comms)

    def draw(self) -> tuple[list[Batch], int]:
        """Take the next batch: this rank's micro-batches of it, and how many samples all ranks have."""
        loaded = self.loader.next()
        self._shares.will_compute(loaded.shares)
        return self.batches(loaded), loaded.samples

    def batches(self, loaded: Loaded) -> list[Batch]:
        """What was loaded as the model takes it, on this rank's device."""
        device, dtype = self.comms.device, self._dtype
        return [self._signature.batch(placed(part, device, dtype), samples) for part, samples in loaded.parts]

    def set_learning_rate(self, step: int) -> None:
        """Tell the optimizer the learning rate of that step."""
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = self._learning_rate.at(step, peak)

    def clip_gradients(self) -> float:
        """Scale all gradients so that their norm is at most `clip`, and return that norm; every rank calls it.

        Nobody needs the norm where nothing is clipped and such steps are not left out: then it is not computed.
        """
        most = math.inf if self._clip is None and self._on_nan == "skip" else self._clip
        return 0.0 if most is None else float(self._clip_to(most))

    def _clip_to(self, most: float) -> torch.Tensor:
        if self._sharded is not None:
            return self._sharded.clip_grad_norm_(most)
        return nn.utils.clip_grad_norm_(self.model.parameters(), most)  # every rank has all, and does the same

    def come_together(self) -> None:
        """Make the ranks' models the same at the end, where each has been learning on its own."""
        if self.averaging is not None:
            self.averaging.average()

    def validate(self) -> Validation | None:
        """Measure on the held-back data, every rank on its share; None when nothing was held back."""
        if self._measuring is None:
            return None
        self._agree_on_buffers()
        measurement = Measurement(self._metrics)
        self.model.eval()
        with torch.no_grad(), own_randomness():  # measuring changes nothing of what is learnt later
            for loaded in self._measuring.one_pass():
                for batch in self.batches(loaded):
                    self._measure(batch, measurement)
                if not loaded.parts:
                    self._measure_nothing()
        self.model.train()
        return measurement.over_all_ranks(self.comms)

    def _agree_on_buffers(self) -> None:
        """Let all ranks have rank 0's batch statistics: those are the ones that are kept."""
        for buffer in self.model.buffers():
            self.comms.broadcast(buffer)

    def _measure(self, batch: Batch, measurement: Measurement) -> None:
        """Measure one batch, if this rank has the outputs."""
        outputs = measurement.outputs(lambda: self.with_loss.outputs(batch))
        if outputs is not None:
            self._compare(outputs, batch, measurement)

    def _measure_nothing(self) -> None:
        """Do what the other ranks need of this one, which has no samples of a batch."""

    def _compare(self, outputs: Any, batch: Batch, measurement: Measurement) -> None:
        measurement.add(outputs, batch.targets, batch.samples, lambda: self.with_loss.loss(outputs, batch))

    def close(self) -> None:
        """End the processes that load data."""
        for loader in (self.loader, self._measuring):
            if loader is not None:
                loader.close()

    def state(self) -> dict[str, Any]:
        """Where the run stands, beside the model and the optimizer; a collective, so every rank must call it."""
        everyones = gather_json(self._shares.random_states(), self.comms)
        return {
            "loss": self.last_loss,
            "sampler": self.loader.state_dict(),
            "random": [state for states in everyones for state in states],
            "made_of": self.made_of,
            **({} if self.loss_scale is None else {"loss_scale": self.loss_scale.state_dict()}),
        }

    def model_state(self) -> dict[str, torch.Tensor]:
        """The whole model's state on rank 0, to compare it with another's; every rank must call it."""
        state: dict[str, torch.Tensor] = self.model.state_dict()
        return state

    @property
    def parameters(self) -> int:
        """How many numbers the whole model has learnt."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def replicas_are_identical(self) -> bool:
        """Whether ranks that should have the same parameters have the same bits; every rank must call it."""
        return replicas_are_identical(self.model, self.comms)

    # ── saving and loading ──────────────────────────────────────────────────────────────────────────────────────

    def save(self, folder: Path, **keeping: Any) -> None:
        """Save a checkpoint in a folder that all ranks see; every rank must call it, and writes its own part.

        `keeping` says what is kept beside it (see `checkpoint.save`).
        """
        checkpoint.save(folder, **self._contents(), **keeping)

    def copy(self, slots: Sequence[Slot], choose: Callable[[], int | None], finite: bool = True) -> int | None:
        """Copy into memory what `save` would write (see `checkpoint.copy`); every rank must call it."""
        return checkpoint.copy(slots, choose, **self._contents(), finite=finite)

    def _contents(self) -> dict[str, Any]:
        """All that a checkpoint is made of; every rank must call it."""
        return {
            "step": self.steps_done,
            "model": self.model_parts(),
            "optimizer_state": self.optimizer_parts(),
            "state": self.state(),
            "comms": self.comms,
            "first_names": self.first_names,
            "by_rank": self.parts_by_rank(),
        }

    @property
    def first_names(self) -> Mapping[str, str]:
        """For tensors that other ranks hold under other names, the name they are stored under."""
        return {}

    def model_parts(self) -> Mapping[str, torch.Tensor | Part]:
        """The model's tensors that this rank can save: all ranks have the same parameters, rank 0's buffers count."""
        state: dict[str, torch.Tensor] = self.model.state_dict()
        return state if self.comms.rank == 0 else _parameters_of(self.model.parameters(), state)

    def optimizer_parts(self) -> dict[str, Any]:
        """What this rank holds of the state of the whole model's optimizer; every rank must call it."""
        if self.averaging is not None:  # each rank has another
            return {"by_rank": {f"rank_{self.comms.rank}": self.optimizer.state_dict()}}
        return self.optimizer.state_parts() if isinstance(self.optimizer, HasParts) else self.optimizer.state_dict()

    def parts_by_rank(self) -> dict[str, Any]:
        """What each rank keeps for itself: what it has not sent of gradients; the state of the method is everyone's."""
        if self._compressed is None:
            return {}
        state = self._compressed.compression_state()
        residuals = {self._saved_name(name): residual for name, residual in state["residuals"].items()}
        return {"compression": state | {"residuals": {f"replica_{self._replica}": residuals}}}

    @property
    def _replica(self) -> int:
        """The number of this rank's replica of the model."""
        return self.comms.rank

    @property
    def _replicas(self) -> int:
        """How many replicas there are."""
        return self.comms.world_size

    def _saved_name(self, name: str) -> str:
        """What a residual is called in a checkpoint: as its parameter in the plain model."""
        return name.removeprefix("model.")

    def _own_name(self, name: str, holder: str) -> str:  # noqa: ARG002
        """What the wrapper calls a residual: here there is one for each parameter, whoever else held one before."""
        return name

    def _load_compression(self, stored: Mapping[str, Any]) -> None:
        """Take this rank's share of what all replicas had not sent; nothing else is read."""
        if self._compressed is None or "compression" not in stored:
            return
        saved = stored["compression"]
        whole = {"passes": saved["passes"], "methods": read_whole(saved["methods"])}
        by_replica = {int(name.removeprefix("replica_")): one for name, one in saved["residuals"].items()}
        self._compressed.load_compression_state(
            [
                {**whole, "residuals": self._own_residuals(one) if number % self._replicas == self._replica else {}}
                for number, one in sorted(by_replica.items())
            ]
        )

    def _own_residuals(self, stored: Mapping[str, StoredTensor]) -> dict[str, torch.Tensor]:
        """Read what one replica had not sent, as far as this rank has the parameters, by the wrapper's names."""
        assert self._compressed is not None
        mine = (name.partition("@")[0] for name in self._compressed.compression_state()["residuals"])
        names = {self._saved_name(name): name for name in mine}
        residuals: dict[str, torch.Tensor] = {}
        for saved, residual in stored.items():
            base, _, holder = saved.partition("@")  # a parameter that stages share has one on each
            if base in names:
                name = self._own_name(names[base], holder)
                residuals[name] = residual.whole() + residuals.get(name, 0.0)
        return residuals

    def load(self, saved: Checkpoint) -> str | None:
        """Go on from a checkpoint, bit for bit when the world has the size it had then; returns a remark, if any."""
        then = saved.state.get("made_of")
        changed = [] if then is None or self.made_of is None else changes(then, self.made_of)
        try:
            self._load_states(saved)
            self._load_compression(saved.stored_by_rank)
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(f"the checkpoint does not fit the model: {error}") from error
        remark = self.loader.load_state_dict(saved.state["sampler"])
        self.steps_done = saved.step
        self.last_loss = saved.state["loss"]
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(saved.state["loss_scale"])
        if self.averaging is not None:
            self.averaging.steps = saved.step
        self._restore_random(saved.state["random"])
        if changed:
            warning = f"warning: the run goes on with something else than it was saved with: {'; '.join(changed)}"
            remark = warning if remark is None else f"{remark}\n{warning}"
        return remark

    def _restore_random(self, states: Sequence[dict[str, Any]]) -> None:
        """Go on with the random numbers of this rank's shares."""
        self._shares.restore_random_states(states)

    def _load_states(self, checkpoint: Checkpoint) -> None:
        self.model.load_state_dict(read_whole(checkpoint.stored_model))
        self._load_optimizer(self._own_part(checkpoint.stored_optimizer))

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        """Read the optimizer's state from the disk, or only this rank's part of it."""
        if isinstance(self.optimizer, HasParts):
            self.optimizer.load_state_parts(read_whole(state["param_groups"]), StateReader(state["state"]))
        else:
            self.optimizer.load_state_dict(read_whole(state))

    def _own_part(self, state: dict[str, Any]) -> dict[str, Any]:
        """Find this rank's optimizer state; a rank that was not there before takes another's."""
        if "by_rank" not in state:
            return state
        by_rank = state["by_rank"]
        states: list[dict[str, Any]] = list(by_rank.values()) if isinstance(by_rank, dict) else by_rank  # of format 1
        return states[self.comms.rank % len(states)]


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

    def _measure(self, batch: Batch, measurement: Measurement) -> None:
        outputs = self._pipe.predict(*batch.arguments)
        if outputs is not None:  # the last rank of each pipeline counts
            self._compare(outputs, batch, measurement)

    def _clip_to(self, most: float) -> torch.Tensor:
        return self._pipe.clip_grad_norm_(most)

    @property
    def parameters(self) -> int:
        """How many numbers the whole model has learnt."""
        return self._parameters

    def replicas_are_identical(self) -> bool:
        """Whether replicas of a stage, and copies of a shared parameter, have the same bits."""
        return self._pipe.replicas_are_identical()

    # ── saving and loading ──────────────────────────────────────────────────────────────────────────────────────

    @property
    def _replica(self) -> int:
        return self._pipe.replica

    @property
    def _replicas(self) -> int:
        return self._pipe.mesh.dp

    def _saved_name(self, name: str) -> str:
        base, at, holder = name.partition("@")
        return f"{self._names[base]}{at}{holder}"

    def _own_name(self, name: str, holder: str) -> str:
        return f"{name}@{holder}" if holder else name

    def model_state(self) -> dict[str, torch.Tensor]:
        """The whole model's state on rank 0."""
        return self._pipe.whole_state_dict() or {}

    @property
    def first_names(self) -> Mapping[str, str]:
        """For weights that stages share, the first of their names in the whole model."""
        return self._names

    def model_parts(self) -> Mapping[str, torch.Tensor | Part]:
        """The tensors of this rank's stages that it can save: replicas have the same parameters, and buffers differ."""
        state = self._pipe.state_dict()
        return state if self._pipe.replica == 0 else _parameters_of(self._pipe.parameters(), state)

    def optimizer_parts(self) -> dict[str, Any]:
        """The state of this rank's optimizer, with the numbers that its parameters have in one of the whole model."""
        mine = super().optimizer_parts()
        own = self._own_groups()
        groups, names = self._whole_groups(own), list(itertools.chain.from_iterable(own))
        order = _numbers(groups)
        return {
            "state": {order[names[index]]: state for index, state in mine["state"].items()},
            "param_groups": [
                {**group, "params": [order[name] for name in members]}
                for group, members in zip(mine["param_groups"], groups, strict=True)
            ],
        }

    def _own_groups(self) -> list[list[str]]:
        """The names in the whole model of this rank's parameters, in the groups of its optimizer."""
        names = {parameter: self._names[name] for name, parameter in self._pipe.named_parameters()}
        return [[names[parameter] for parameter in group["params"]] for group in self.optimizer.param_groups]

    def _whole_groups(self, mine: list[list[str]]) -> list[list[str]]:
        """The parameters of each group of the whole model's optimizer, in the model's order; every rank calls this."""
        everyones = gather_json(mine, self.comms)
        if len({len(groups) for groups in everyones}) > 1:
            raise ConfigError(
                f"--optimizer made {sorted({len(groups) for groups in everyones})} groups of parameters on different "
                "ranks of a pipeline: make the same groups on each, empty ones too"
            )
        order = list(dict.fromkeys(self._names.values()))
        members = [{name for groups in everyones for name in groups[index]} for index in range(len(mine))]
        return [[name for name in order if name in group] for group in members]

    def _restore_random(self, states: Sequence[dict[str, Any]]) -> None:
        if len(states) == self.comms.world_size:  # each rank draws for its own stages
            restore_random_state(states[self.comms.rank])

    def _load_states(self, checkpoint: Checkpoint) -> None:
        stored = checkpoint.stored_model
        self._pipe.load_state_dict({name: stored[name].whole() for name in self._pipe.state_dict() if name in stored})
        whole = self._own_part(checkpoint.stored_optimizer)
        own = self._own_groups()
        order = _numbers(self._whole_groups(own))
        names = enumerate(itertools.chain.from_iterable(own))
        state = {index: whole["state"][order[name]] for index, name in names if order[name] in whole["state"]}
        numbers = itertools.count()
        groups = [
            {**group, "params": [next(numbers) for _ in mine]}
            for group, mine in zip(whole["param_groups"], own, strict=True)
        ]
        self._load_optimizer({"state": state, "param_groups": groups})


def _numbers(groups: Iterable[Iterable[str]]) -> dict[str, int]:
    """The numbers that parameters have in the state of an optimizer with these groups."""
    return {name: number for number, name in enumerate(itertools.chain.from_iterable(groups))}


def _parameters_of(parameters: Iterable[nn.Parameter], state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a state that are parameters."""
    memories = {parameter.data_ptr() for parameter in parameters}
    return {name: one for name, one in state.items() if isinstance(one, torch.Tensor) and one.data_ptr() in memories}


def pipeline_step(pipe: Pipeline) -> Step:
    """How a pipeline does a step; the last batch of an epoch may have fewer samples than micro-batches."""

    def step(batches: Sequence[Batch], samples: int) -> torch.Tensor:
        # A replica without samples passes none: the other replicas have some.
        batch = (*batches[0].arguments, batches[0].targets) if batches else (None, None)
        return pipe.step(*batch, samples=samples, allow_fewer=True)

    return step
