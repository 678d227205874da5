"""What takes turns in a benchmark of pipelines: our schedules, each beside torch.distributed.pipelining's same one.

| ours        | torch's                       | stages a rank |
|-------------|-------------------------------|---------------|
| naive       | –                             | 1             |
| gpipe       | ScheduleGPipe                 | 1             |
| 1f1b        | Schedule1F1B                  | 1             |
| interleaved | ScheduleInterleaved1F1B       | 2             |
| zb-h1       | ScheduleInterleavedZeroBubble | 1             |
| zb-h2       | –                             | 1             |
| zbv         | ScheduleZBVZeroBubble         | 2             |
| dualpipev   | ScheduleDualPipeV             | 2             |

Both have the same layers on the same ranks: torch's stages are copies of ours.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from microparallel.comms import Comms
from microparallel.models.loss import cross_entropy
from microparallel.pipeline import Pipeline
from microparallel.pipeline.programs import Schedule
from microparallel.trace import Trace

TORCH_S = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
_TAKES_ONE_STAGE = ("gpipe", "1f1b")  # all others take a list

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Method:
    """A schedule, run by us or by torch."""

    schedule: str
    by_torch: bool = False

    @property
    def label(self) -> str:
        """What it is called where it stands alone."""
        return f"torch's {TORCH_S[self.schedule]}" if self.by_torch else self.schedule


class Ours:
    """`mp.Pipeline` with one schedule, on a copy of the model."""

    alone = False

    def __init__(self, schedule: str, model: nn.Module, batch: Batch, microbatches: int, comms: Comms) -> None:
        self.method = Method(schedule)
        self.homes = tuple(Schedule(schedule, comms.world_size, microbatches).homes)  # the rank of each stage
        self.pipe = Pipeline(copy.deepcopy(model), comms, schedule, microbatches, loss_fn=cross_entropy)
        self.parameters = dict(self.pipe.named_parameters())  # those of this rank, by their names in the whole model
        self._batch = batch
        self._loss = torch.zeros(())

    @property
    def computes_together(self) -> bool:
        """Whether ranks compute at the same time: then they share caches, memory and perhaps cores."""
        return self.method.schedule != "naive"

    @property
    def loss(self) -> float | None:
        """The last step's, where this rank knows it."""
        return float(self._loss)

    def step(self) -> None:
        """Forward and backward of all micro-batches, from no gradients at all."""
        _forget_gradients(self.parameters)
        self._loss = self.pipe.step(*self._batch)

    def traced_step(self) -> Trace:
        """The same, and what every rank did when."""
        _forget_gradients(self.parameters)
        self._loss, trace = self.pipe.traced_step(*self._batch)
        return trace


_FOLDS_OVER_GLOO = "2.13"  # the first version that was seen to run a schedule folded into a V


class TorchRefuses(Exception):
    """torch's schedule cannot do what was asked for; the text says why."""


class Torchs:
    """torch's same schedule, on copies of the same stages.

    Args:
        ours: the pipeline whose stages are copied.
        batch: inputs and targets.
        microbatches: of the batch.
        group: what torch talks through.
    """

    alone = False

    def __init__(self, ours: Ours, batch: Batch, microbatches: int, group: dist.ProcessGroup) -> None:
        self.method = Method(ours.method.schedule, by_torch=True)
        self.parameters: dict[str, nn.Parameter] = {}
        self._arguments: tuple[torch.Tensor, ...] = ()
        self._targets: dict[str, Any] = {}
        self._losses: list[torch.Tensor] = []
        stages = [self._copy_of(index, ours, batch, group) for index in sorted(ours.pipe.stages)]
        schedule = getattr(pipelining, TORCH_S[self.method.schedule])
        given = stages[0] if self.method.schedule in _TAKES_ONE_STAGE else stages
        if len(stages) > 1 and ours.homes[0] == ours.homes[-1] and torch.__version__ < _FOLDS_OVER_GLOO:
            raise TorchRefuses(f"torch {torch.__version__} sends from a rank to itself here, which gloo cannot")
        try:
            self._schedule = schedule(given, microbatches, loss_fn=cross_entropy)
        except ValueError as error:
            raise TorchRefuses(str(error)) from error

    def _copy_of(self, index: int, ours: Ours, batch: Batch, group: dist.ProcessGroup) -> pipelining.PipelineStage:
        stage, count = ours.pipe.stages[index], len(ours.homes)
        modules = copy.deepcopy(stage.modules)
        for layer, module in zip(stage.layers, modules, strict=True):
            names = [name for name, _ in layer.named_parameters()]
            self.parameters |= dict(zip(names, module.parameters(), strict=True))
        inputs, targets = batch
        if index == 0:
            self._arguments = (inputs,)
        if index == count - 1:
            self._targets = {"target": targets, "losses": self._losses}
        return pipelining.PipelineStage(nn.Sequential(*modules), index, count, batch[0].device, group=group)

    @property
    def loss(self) -> float | None:
        """The last step's, where this rank knows it."""
        return float(torch.stack(self._losses).detach().mean()) if self._losses else None

    def step(self) -> None:
        """Forward and backward of all micro-batches, from no gradients at all."""
        _forget_gradients(self.parameters)
        self._losses.clear()
        self._schedule.step(*self._arguments, **self._targets, return_outputs=False)


def _forget_gradients(parameters: Mapping[str, nn.Parameter]) -> None:
    for parameter in parameters.values():
        parameter.grad = None
