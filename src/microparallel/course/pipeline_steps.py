"""Pipeline steps as functions: every rank brings its own piece of the model, and `Pipeline` runs the schedule."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from microparallel.comms import Comms
from microparallel.pipeline.pipeline import Pipeline
from microparallel.pipeline.stage import LossFunction


def naive_pipeline_step(
    model: nn.Module, comms: Comms, inputs: Any, targets: Any, loss_fn: LossFunction | None = None
) -> torch.Tensor:
    """Pass the whole batch through the ranks, one after another, and back: at any time all ranks but one wait.

    Args:
        model: this rank's piece, such as `mp.models.ShardedMLP`; the last one returns the mean loss when it is called
            with targets, unless there is a `loss_fn`.
        comms: the ranks, in the order of the pieces.
        inputs: the batch; only the first rank looks at it.
        targets: only the last rank looks at them.
        loss_fn: takes the last piece's outputs and the targets, and returns the mean loss.

    Returns:
        the mean loss, the same on every rank. Gradients are in the parameters, as after `loss.backward()`.
    """
    return _step("naive", model, comms, inputs, targets, 1, loss_fn)


def gpipe_pipeline_step(
    model: nn.Module, comms: Comms, inputs: Any, targets: Any, chunks: int, loss_fn: LossFunction | None = None
) -> torch.Tensor:
    """Cut the batch into `chunks` micro-batches: all their forwards, then all their backwards."""
    return _step("gpipe", model, comms, inputs, targets, chunks, loss_fn)


def onef_oneb_pipeline_step(
    model: nn.Module, comms: Comms, inputs: Any, targets: Any, chunks: int, loss_fn: LossFunction | None = None
) -> torch.Tensor:
    """Cut the batch into `chunks` micro-batches, and do the backward of each as early as possible (1F1B)."""
    return _step("1f1b", model, comms, inputs, targets, chunks, loss_fn)


def _step(
    schedule: str,
    model: nn.Module,
    comms: Comms,
    inputs: Any,
    targets: Any,
    chunks: int,
    loss_fn: LossFunction | None,
) -> torch.Tensor:
    """Do a step with the pipeline that an earlier call made of this model, or with a new one."""
    known: _Pipelines = model.__dict__.setdefault(_PIPELINES, _Pipelines())
    key = (schedule, chunks, id(comms))
    if key not in known:
        known[key] = Pipeline.of_stage(model, comms, schedule, chunks)
    pipe = known[key]
    for stage in pipe.stages.values():
        stage.loss_fn = loss_fn  # each call may pass another function, such as a new lambda
    return pipe.step(inputs, targets)


_PIPELINES = "_microparallel_pipelines"  # the attribute of a model that holds the pipelines made of it


class _Pipelines(dict[tuple[object, ...], Pipeline]):
    """The pipelines of one model, which are not copied or pickled with it."""

    def __deepcopy__(self, _: object) -> _Pipelines:
        return _Pipelines()

    def __reduce__(self) -> tuple[type[_Pipelines], tuple[()]]:
        return _Pipelines, ()
