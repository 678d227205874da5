"""Member: one rank of a pipeline, with its stages, and the parameters and gradients that it shares with other ranks.

Gradients are summed over the replicas of a stage, and over the stages that share a weight (`column.py`). The state of
the whole model is gathered from all ranks of a pipeline.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import nn

from microparallel.comms import Comms
from microparallel.comms.wire import gather_json
from microparallel.compression import Compressor
from microparallel.data_parallel.compressed_bucket import (
    compression_state,
    is_large,
    load_compression_state,
    stage_algorithm,
)
from microparallel.data_parallel.precision import LossScale, MixedPrecision
from microparallel.data_parallel.replicate import broadcast_buffers, filled, replicas_are_identical, replicate
from microparallel.data_parallel.sharding import clip_parts
from microparallel.data_parallel.sync_batch_norm import SyncBatchNorm
from microparallel.data_parallel.without_norm import GradientWithoutNorm
from microparallel.errors import UsageError
from microparallel.pipeline.column import Column, TiedSum, summed_with
from microparallel.pipeline.cut import shared_parameters
from microparallel.pipeline.interpreter import GroupSum, Sum, Worker
from microparallel.pipeline.layers import NamedLayer
from microparallel.pipeline.overflow import OverflowSum, PipelineGuard
from microparallel.pipeline.precision import StagePrecision
from microparallel.pipeline.stage import Stage
from microparallel.program import AUTO, BUFFERS, NORM, SAMPLES, WORLD, AllReduce, Broadcast, Value, overflow, tied
from microparallel.topology import Mesh


class Member:
    """One rank of a pipeline: its stages, and the groups of ranks with which it shares parameters.

    Its *row* are the ranks of its own pipeline. Its *column* are the ranks that have the same stages in the other
    replicas. Its *place* is its number in its row, and the *home* of a stage is the place that has it.
    """

    def __init__(
        self,
        comms: Comms,
        mesh: Mesh,
        homes: Sequence[int],
        stages: dict[int, Stage],
        bucket_cap_mb: float,
        level: int = 0,
        compressor: Compressor | None = None,
        precision: StagePrecision | None = None,
    ) -> None:
        self.comms = comms
        self.mesh = mesh
        self.stages = stages
        self.replica, self._place = mesh.where(comms.rank)
        self._homes = homes  # of each stage
        self._row = _own_group(comms, [mesh.row(replica) for replica in range(mesh.dp)])
        column = _own_group(comms, [mesh.column(place) for place in range(mesh.pp)])
        self._precision = StagePrecision() if precision is None else precision
        for layer in self._layers():
            _require_own_samples(layer)
            layer.module.to(comms.device)
        self._precision.take([layer.module for layer in self._layers()])
        for layer in self._layers():
            if mesh.dp > 1:
                replicate(layer.module, column)
        wire = None if self.precision is None else self.precision.wire
        self._column = Column(stages, column, bucket_cap_mb * 2**20, level, compressor, wire)
        self._algorithms: str | tuple[str, ...] = AUTO  # of the sums over replicas, after the warm-up
        self._ties: list[TiedSum] = []
        self._shared_places: tuple[int, ...] = ()  # that have several stages which share a parameter
        self._tied_places: tuple[tuple[int, ...], ...] = ()  # for each parameter that several places share, the places
        self._buffered_places: tuple[int, ...] = ()  # that have buffers
        self._sums: dict[Value, GroupSum] = dict(self._column.sums)
        self._guard: PipelineGuard | None = None
        if self._precision.loss_scale is not None:
            self._guard = PipelineGuard(self._precision.loss_scale)
            self._guard.watch(self.parameters())
            self._sums[overflow()] = OverflowSum(self._guard, comms, self._gradients)

    def _tie(self, pieces: Sequence[Sequence[NamedLayer]]) -> None:
        """Find the parameters that several stages share, and make a group of the ranks that have those stages."""
        for parameter, places in shared_parameters(pieces):
            stages_at = Counter(self._homes[stage] for stage in dict.fromkeys(stage for stage, _ in places))
            several = (home for home, stages in stages_at.items() if stages > 1)
            self._shared_places = tuple(sorted({*self._shared_places, *several}))
            homes = tuple(sorted(stages_at))
            if len(homes) == 1:
                continue
            for replica in range(self.mesh.dp):
                group = self.comms.group([self.mesh.rank(replica, home) for home in homes])
                if group is not None:
                    tie = TiedSum(parameter, group, self._column)
                    self._ties.append(tie)
                    self._column.tied[parameter] = len(self._tied_places)
                    self._sums[tied(len(self._tied_places))] = tie
            self._tied_places = (*self._tied_places, homes)

    def _find_buffers(self, pieces: Sequence[Sequence[NamedLayer]]) -> None:
        """Find the places of a pipeline that have buffers to copy."""
        having = {
            self._homes[stage]
            for stage, layers in enumerate(pieces)
            if filled(buffer for layer in layers for buffer in layer.module.buffers())
        }
        self._buffered_places = tuple(sorted(having))

    def _name_sums(self, pieces: Sequence[Sequence[NamedLayer]]) -> None:
        """Find the name of each stage's sum, which says how many bytes it sends compressed."""
        compressor = self._column.compressor
        if compressor is None:
            return
        names = [AUTO] * len(pieces)
        for place in range(self.mesh.pp):
            mine = {stage: pieces[stage] for stage, home in enumerate(self._homes) if home == place}
            of_stages = {stage: _parameters_of(layers) for stage, layers in mine.items()}
            for stage, parameters in summed_with(of_stages).items():
                trained = [one for one in parameters if one.requires_grad]
                if any(is_large(one, compressor) for one in trained):
                    names[stage] = stage_algorithm(trained, compressor)
        self._algorithms = tuple(names)

    def _algorithm(self) -> str | tuple[str, ...]:
        """How the next step sums over replicas."""
        compressor = self._column.compressor
        return AUTO if compressor is None or self._column.passes < compressor.warmup else self._algorithms

    @property
    def precision(self) -> MixedPrecision | None:
        """In which dtypes the stages compute and keep their parameters, if that was asked for."""
        return self._precision.precision

    @property
    def loss_scale(self) -> LossScale | None:
        """By what gradients are multiplied on their way through the stages, in float16; the same on every rank.

        A checkpoint keeps `loss_scale.state_dict()`. None where no gradients are scaled.
        """
        return self._precision.loss_scale

    @property
    def _has_first(self) -> bool:
        return 0 in self.stages

    @property
    def _has_last(self) -> bool:
        return len(self._homes) - 1 in self.stages

    def _samples_of_all(self, mine: int) -> int:
        """How many samples all replicas have together; every rank calls this."""
        if self.mesh.dp == 1:
            return mine
        return int(self._column.comms.all_reduce(torch.tensor(mine, device="cpu"), operation=AllReduce(SAMPLES, "dp")))

    def _summed_parameters(self) -> set[nn.Parameter]:
        """The parameters whose gradients are sums over ranks."""
        return set(self.parameters()) if self.mesh.dp > 1 else {tie.parameter for tie in self._ties}

    def _scale_gradients(self, factor: float) -> None:
        if factor != 1.0 and self._column.level:
            self._column.scale(factor)
        elif factor != 1.0:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def _refuse_norms(self) -> None:
        """After a step: let torch's `clip_grad_norm_` refuse gradients that are those of some of the layers."""
        if self.mesh.pp > 1:
            for parameter in self.parameters():
                if type(parameter.grad) is torch.Tensor:  # not one in parts, which refuses more
                    parameter.grad = parameter.grad.as_subclass(GradientOfStage)

    def _gradients(self) -> Iterator[torch.Tensor]:
        """The gradients of this rank, or its parts of them."""
        if self._column.level:
            parts = (gradient for bucket in self._column.sharded_buckets for gradient in bucket.gradients())
            return (part for part in parts if part is not None)
        return (parameter.grad for parameter in self.parameters() if parameter.grad is not None)

    # ── compression ─────────────────────────────────────────────────────────────────────────────────────────────

    def compression_state(self) -> dict[str, Any]:
        """What this rank keeps from step to step with `compress=`: for a checkpoint, which needs that of every rank.

        A parameter that stages on several ranks share has a residual on each: that of the first has its name, and the
        others have `name@1` and so on.
        """
        self._column.prepare()
        return compression_state(self._column.buckets, self._residual_names(), self._column.passes)

    def load_compression_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on with what `compression_state` returned; every rank calls this.

        Args:
            states: for each old replica, in order, that of its ranks together. There may be more replicas now, or
                fewer, and other stages: a rank takes what it has parameters for.
        """
        self._column.prepare()
        names = self._residual_names()
        known = set(names.values())
        mine = []
        for state in states[self.replica :: self.mesh.dp]:
            residuals: dict[str, torch.Tensor] = {}
            for name, saved in state["residuals"].items():
                base, _, holder = name.partition("@")
                taken = name if name in known or int(holder or 0) < self._holders(base) else base
                if taken in known:
                    residuals[taken] = residuals[taken] + saved if taken in residuals else saved
            mine.append({"residuals": residuals})
        load_compression_state(self._column.buckets, names, mine, states[0]["methods"])
        self._column.passes = int(states[0]["passes"])

    def _residual_names(self) -> dict[nn.Parameter, str]:
        holder = {tie.parameter: tie.holders.rank for tie in self._ties}
        suffix = {one: f"@{number}" if number else "" for one, number in holder.items()}
        return {one: name + suffix.get(one, "") for name, one in self.named_parameters()}

    def _holders(self, name: str) -> int:
        """How many ranks of a pipeline have this parameter, as far as this rank is one of them; otherwise 1."""
        parameters = dict(self.named_parameters())
        return next((tie.holders.world_size for tie in self._ties if tie.parameter is parameters.get(name)), 1)

    # ── parameters ──────────────────────────────────────────────────────────────────────────────────────────────

    def _layers(self) -> list[NamedLayer]:
        return [layer for _, stage in sorted(self.stages.items()) for layer in stage.layers]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank's stages, each once, by their names in the whole model."""
        seen: set[nn.Parameter] = set()
        for layer in self._layers():
            for name, parameter in layer.named_parameters():
                if parameter not in seen:
                    seen.add(parameter)
                    yield name, parameter

    def first_names(self) -> dict[str, str]:
        """Every name of every parameter of the whole model, with the first name of that parameter; all ranks call this.

        They are in the order of the stages. Weights that stages share have several names.
        """
        mine, own = [], {parameter: name for name, parameter in self.named_parameters()}
        for index, stage in sorted(self.stages.items()):
            for layer in stage.layers:
                for name, parameter in layer.named_parameters():
                    number = self._column.tied.get(parameter)
                    mine.append([index, name, own[parameter] if number is None else number])
        everyones = [row for rows in gather_json(mine, self._row) for row in rows]
        first: dict[str | int, str] = {}
        names: dict[str, str] = {}
        homes: dict[str, int] = {}
        for index, name, key in sorted(everyones, key=lambda row: row[0]):
            home = self._homes[index]
            if isinstance(key, str) and homes.setdefault(name, home) != home:
                raise UsageError(
                    f"two stages of this pipeline have a {name}, so there is no whole model with these names; give the "
                    "whole model to mp.Pipeline, which cuts it"
                )
            names[name] = first.setdefault(key, name)
        return names

    @property
    def own_layers(self) -> nn.ModuleList:
        """The layers of this rank's stages."""
        return nn.ModuleList(layer.module for layer in self._layers())

    def count_parameters(self) -> int:
        """How many numbers the whole model has, those that stages share counted once; all ranks call this."""
        elsewhere = {tie.parameter for tie in self._ties if tie.holders.rank > 0}
        mine = sum(parameter.numel() for parameter in self.parameters() if parameter not in elsewhere)
        return int(self._row.all_reduce(torch.tensor(mine, device="cpu")))

    def replicas_are_identical(self) -> bool:
        """Whether replicas of a stage, and copies of a shared parameter, have the same bits; all ranks call this."""
        identical = replicas_are_identical(self.own_layers, self._column.comms)
        for tie in self._ties:
            identical &= replicas_are_identical(nn.ParameterList([tie.parameter]), tie.holders)
        return bool(self.comms.all_reduce(torch.tensor(int(identical), device="cpu"), op="min"))

    def broadcast_buffers(self) -> None:
        """Give every replica the first one's buffers, such as BatchNorm's running statistics; all ranks call this."""
        if self.mesh.dp > 1:
            operation = Broadcast(BUFFERS, "dp", self.mesh.rank(0, self._place))
            broadcast_buffers(self.own_layers.buffers(), self._column.comms, 0, operation)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages, for an optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients of this rank's parameters, or set them to zero, as `nn.Module.zero_grad` does.

        Gradients that are in parts are always removed.
        """
        if self._guard is not None:
            self._guard.forget()
        self._remove_gradients(set_to_none)

    def _remove_gradients(self, set_to_none: bool = True) -> None:
        self._column.forget_sums()
        for parameter in self.parameters():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad = torch.zeros_like(parameter.grad)

    def train(self, mode: bool = True) -> Self:
        """Set the layers of this rank to training mode, or to evaluation mode (`evaluate` does so by itself)."""
        for layer in self._layers():
            layer.module.train(mode)
        return self

    def eval(self) -> Self:
        """Set the layers of this rank to evaluation mode."""
        return self.train(False)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of the model's state, by the names it has in the whole model."""
        return own_state(self._layers())

    def whole_state_dict(self) -> dict[str, torch.Tensor] | None:
        """The whole model's state on the first rank of a pipeline, and None on the others; all ranks call this."""
        return gather_state(self.state_dict(), self._row)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's part out of the state of the whole model."""
        load_own_part(self._layers(), state)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their norm over the whole model is at most `max_norm`; returns what it was.

        Every rank calls it, after a step. A parameter that two stages share counts once.
        """
        elsewhere = {tie.parameter for tie in self._ties if tie.holders.rank > 0}
        if self._column.level:
            buckets = self._column.sharded_buckets
            once = [bucket for bucket in buckets if elsewhere.isdisjoint(bucket.parameters)]
            return clip_parts(buckets, self.comms, max_norm, counted=once, axis=WORLD)
        mine = list(self.parameters())
        counted = [parameter for parameter in mine if parameter not in elsewhere]
        return clip_gradients(mine, counted, max_norm, self._row)


def _parameters_of(layers: Sequence[NamedLayer]) -> list[nn.Parameter]:
    return list(dict.fromkeys(one for layer in layers for one in layer.module.parameters()))


def _own_group(comms: Comms, groups: list[list[int]]) -> Comms:
    """Make every one of these groups, which all ranks do together, and return the one this rank is in."""
    if len(groups) == 1:
        return comms
    mine = [group for group in (comms.group(ranks) for ranks in groups) if group is not None]
    return mine[0]


def _require_own_samples(layer: NamedLayer) -> None:
    if any(isinstance(part, SyncBatchNorm) for part in layer.module.modules()):
        raise UsageError(
            f"Pipeline: {layer.name} has a SyncBatchNorm, which needs all ranks at once, and the ranks of a pipeline "
            "have different layers; leave the BatchNorm as it is (it sees micro-batches), or use LayerNorm or GroupNorm"
        )


# ── sums over ranks ─────────────────────────────────────────────────────────────────────────────────────────────────


class LossSum:
    """The loss of the whole batch: the sum of all ranks' parts of it, and of what they count for.

    Attributes:
        factor: gradients must be multiplied by it, where losses are counted; they are those of the sum for each sample.
    """

    def __init__(self, worker: Worker, comms: Comms, samples: int) -> None:
        self._loss: torch.Tensor | None = None
        self.factor = 1.0
        self._worker = worker
        self._comms = comms
        self._samples = samples

    def start(self, operation: Sum) -> None:
        """Add up the parts of all ranks."""
        count = self._worker.count
        parts = torch.tensor(
            [float(self._worker.loss), count or 0.0, float(count is not None)], dtype=torch.float64, device="cpu"
        )
        loss, total, counted = self._comms.all_reduce(parts, operation=operation).tolist()
        if counted:
            # Without any count there is no mean, and the gradients are those of a sum of nothing: zero.
            self.factor = self._samples / total if total else 1.0
            loss = loss * self.factor if total else math.nan
        self._loss = torch.tensor(loss, dtype=torch.float64, device="cpu")

    @property
    def loss(self) -> torch.Tensor:
        """Of the whole batch, after `start`; a rank that is alone does not add up."""
        return self._worker.loss if self._loss is None else self._loss

    def finish(self) -> None:
        """Do nothing: `start` has waited for the sum."""


@contextmanager
def beside_earlier_gradients(parameters: Iterable[nn.Parameter], summed: Collection[nn.Parameter]) -> Iterator[None]:
    """Begin with no gradients, and add the earlier ones at the end: they are means of batches already.

    Args:
        parameters: of this rank.
        summed: those whose gradients are sums over ranks; they may lie in buckets, which are filled again.
    """
    earlier = [
        (parameter, parameter.grad.clone() if parameter in summed else parameter.grad)
        for parameter in parameters
        if parameter.grad is not None
    ]
    for parameter, _ in earlier:
        parameter.grad = None
    try:
        yield
    finally:  # also after a step that failed
        for parameter, gradient in earlier:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


class GradientOfStage(GradientWithoutNorm):
    """A gradient of a rank that has some of the layers: the norm of all that it has is not that of the model."""

    refusal = (
        "the norm of this rank's gradients is that of its own layers, not of the whole pipeline; to clip, call "
        "pipe.clip_grad_norm_ on every rank; the norm of one gradient is parameter.grad.norm()"
    )


def clip_gradients(
    parameters: Iterable[nn.Parameter], counted: Iterable[nn.Parameter], most: float, row: Comms
) -> torch.Tensor:
    """Scale gradients so that the norm of all ranks' gradients together is at most `most`; returns what it was.

    Args:
        parameters: of this rank: their gradients are scaled.
        counted: those that count here; what two ranks share counts on one.
        most: the largest norm.
        row: the ranks of the pipeline.
    """
    gradients = [parameter.grad for parameter in counted if parameter.grad is not None]
    square = sum(
        (gradient.double().square().sum() for gradient in gradients), torch.zeros((), dtype=torch.float64, device="cpu")
    )
    norm = row.all_reduce(square.cpu().reshape(1), operation=AllReduce(NORM, "pp")).sqrt().reshape(())
    factor = most / (float(norm) + 1e-6)  # as torch does
    if factor < 1:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
    return norm


# ── the state of the whole model ────────────────────────────────────────────────────────────────────────────────────


def own_state(layers: Iterable[NamedLayer]) -> dict[str, torch.Tensor]:
    """The parameters and buffers of some layers, by their names in the whole model."""
    return {layer.whole_name(name): tensor for layer in layers for name, tensor in layer.module.state_dict().items()}


def gather_state(mine: Mapping[str, torch.Tensor], row: Comms) -> dict[str, torch.Tensor] | None:
    """Collect all ranks' parts on the first rank of a pipeline; None on the others. All of its ranks call this."""
    contents = [[name, str(tensor.dtype).removeprefix("torch."), tensor.shape] for name, tensor in mine.items()]
    all_contents = gather_json(contents, row)
    if row.rank != 0:
        for tensor in mine.values():
            row.send_tensor(tensor, 0)
        return None
    whole = dict(mine)
    for rank, theirs in enumerate(all_contents[1:], start=1):
        for name, dtype, shape in theirs:
            whole[name] = row.recv_tensor(shape, rank, getattr(torch, dtype))
    return whole


def load_own_part(layers: Iterable[NamedLayer], state: Mapping[str, torch.Tensor]) -> None:
    """Load some layers from the state of the whole model."""
    for layer in layers:
        own = {}
        for name in layer.module.state_dict():
            whole_name = layer.whole_name(name)
            if whole_name not in state:
                raise UsageError(
                    f"load_state_dict: {whole_name} is missing; it needs the state of the whole model, or of the same "
                    "stages"
                )
            own[name] = state[whole_name]
        layer.module.load_state_dict(own)
