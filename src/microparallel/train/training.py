"""A training run as an object: do a step, measure, say where it stands, go on from there.

`Training` is one rank's part of it; in `PipelineTraining` the model is spread over the ranks of a pipeline, and in
`FullyShardedTraining` (`fully_sharded.py`) each rank has a part of every parameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from microparallel.comms import Comms
from microparallel.comms.wire import gather_json
from microparallel.course.shortcuts import ParameterAveraging
from microparallel.data_parallel import DataParallel, LossScale, replicas_are_identical
from microparallel.errors import CheckpointError, GradientError
from microparallel.pipeline import Pipeline, Share
from microparallel.train import checkpoint
from microparallel.train.batch import Batch, ModelSignature, ModelWithLoss, placed
from microparallel.train.checkpoint_reader import Checkpoint
from microparallel.train.data import Split
from microparallel.train.fingerprint import changes
from microparallel.train.guard import explain, not_finite
from microparallel.train.layouts import KeepsResiduals, ModelWithinLoss, StagesOfModel, WholeModel
from microparallel.train.loader import Loaded, Loader
from microparallel.train.metrics import Measurement, Metric, Validation
from microparallel.train.mixed_precision import MixedModelWithLoss
from microparallel.train.optimizer import LearningRate
from microparallel.train.random_state import own_randomness, seed_generators
from microparallel.train.replica_check import find_difference
from microparallel.train.shares import Shares
from microparallel.train.strategies import Step


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
        wrapped: the model with its loss, where mp.DataParallel averages its gradients.
        drawn: how random numbers are dealt out, in words.
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
        wrapped: DataParallel | None = None,
        drawn: str = "",
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
        self.own_samples = 0  # of this rank, in the last step
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
        self._drawn = drawn
        self._metrics = metrics or {}
        self._sharded = sharded
        self.held: WholeModel = ModelWithinLoss(
            comms, model, optimizer, compressed, wrapped, learn_apart=averaging is not None
        )

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
        self.last_samples, self.own_samples = samples, sum(map(len, batches))
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
        return not self.comms.all_reduce(torch.tensor(len(mine), device="cpu")).item()

    def require_finite_weights(self) -> None:
        """Raise a GradientError, on every rank, if some rank's parameters are not finite."""
        if not self.has_finite_weights():
            raise self._not_finite(f"weights are not finite after step {self.steps_done}", [])

    def find_difference(self) -> str | None:
        """Which rank has other weights than its replicas, and where; None if there is none; every rank calls it."""
        names = self.held.first_names
        parts = self.held.model_parts()
        return find_difference({names.get(name, name): one for name, one in parts.items()}, self.comms)

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
                for _ in range(self._shares.most_microbatches(loaded.samples, 1) - len(loaded.parts)):
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
        """Do what other ranks need of this one while they measure one share more of a batch than it has."""

    def _compare(self, outputs: Any, batch: Batch, measurement: Measurement) -> None:
        measurement.add(outputs, batch.targets, batch.samples, lambda: self.with_loss.loss(outputs, batch))

    def close(self) -> None:
        """End the processes that load data."""
        for loader in (self.loader, self._measuring):
            if loader is not None:
                loader.close()

    def state(self) -> dict[str, Any]:
        """Where the run stands, beside the model and the optimizer; a collective, so every rank must call it."""
        return {
            "loss": self.last_loss,
            "sampler": self.loader.state_dict(),
            "random": self._random_states(),
            "drawn": self._drawn,
            "made_of": self.made_of,
            **({} if self.loss_scale is None else {"loss_scale": self.loss_scale.state_dict()}),
        }

    def _random_states(self) -> list[dict[str, Any]]:
        """The state of the random generators of each share of all ranks."""
        return [state for states in gather_json(self._shares.random_states(), self.comms) for state in states]

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
        checkpoint.save(folder, **self.contents(), **keeping)

    def contents(self) -> dict[str, Any]:
        """All that a checkpoint is made of (see `checkpoint.save`); every rank must call it."""
        return {**self.held.contents(), "step": self.steps_done, "state": self.state(), "comms": self.comms}

    def load(self, saved: Checkpoint) -> str | None:
        """Go on from a checkpoint, bit for bit when the world has the size it had then; returns a remark, if any."""
        then = saved.state.get("made_of")
        changed = [] if then is None or self.made_of is None else changes(then, self.made_of)
        try:
            self.held.load(saved)
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(f"the checkpoint does not fit the model: {error}") from error
        remarks = [self.loader.load_state_dict(saved.state["sampler"])]
        self.steps_done = saved.step
        self.last_loss = saved.state["loss"]
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(saved.state["loss_scale"])
        if self.averaging is not None:
            self.averaging.steps = saved.step
        self._shares.restore_random_states(saved.state["random"])
        then_drawn = saved.state.get("drawn", self._drawn)
        if then_drawn != self._drawn:
            remarks.append(
                f"note: random numbers are not those of the undisturbed run from here on, which matters with dropout: "
                f"there are {self._drawn}, and there were {then_drawn}"
            )
        if changed:
            remarks.append(f"warning: the run goes on with something else than it was saved with: {'; '.join(changed)}")
        return "\n".join(remark for remark in remarks if remark is not None) or None


class PipelineTraining(Training):
    """One rank's part in a run whose model is spread over the ranks of a pipeline.

    Its checkpoints are those of the whole model, as one process would write them: a run can go on with other ranks, in
    another layout, or without a pipeline at all.
    """

    def __init__(
        self,
        pipe: Pipeline,
        names: dict[str, str],
        microbatches: int,
        compressed: KeepsResiduals | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(model=pipe.own_layers, strategy=self._step_of_pipeline, **rest)
        self.held = StagesOfModel(self.comms, pipe, self.optimizer, names, compressed)
        self._pipe = pipe
        self._microbatches = microbatches  # of each share
        self._parameters = pipe.count_parameters()

    def _not_finite(self, what: str, batches: Sequence[Batch]) -> GradientError:  # noqa: ARG002
        return super()._not_finite(what, [])  # no rank can compute its share alone

    def _step_of_pipeline(self, batches: Sequence[Batch], samples: int) -> torch.Tensor:
        """Compute this replica's shares; the last of them, and it may be all, have no samples in a small batch."""
        shares = [
            Share(batch.arguments[0], batch.targets, partial(self._seed_layer, number))
            for batch, number in zip(batches, self._shares.mine, strict=False)
        ]
        with own_randomness():  # what the data draws goes on where it was, on all ranks of the pipeline alike
            return self._pipe.step_in_shares(shares, self._microbatches, samples=samples)

    def _seed_layer(self, share: int, microbatch: int, layer: int) -> None:
        """Let a layer draw the same for a micro-batch of a share, on whatever rank and at whatever time."""
        seed, step = self._shares.seed, self.steps_done
        seed_generators(f"seed {seed}, step {step}, share {share}, micro-batch {microbatch}, layer {layer}")

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

    def model_state(self) -> dict[str, torch.Tensor]:
        """The whole model's state on rank 0."""
        return self._pipe.whole_state_dict() or {}

    def _random_states(self) -> list[dict[str, Any]]:
        """As the data draws for each share, which all ranks of a pipeline do alike."""
        everyones = gather_json(self._shares.random_states(), self.comms)
        return [state for states in everyones[:: self._pipe.mesh.pp] for state in states]
