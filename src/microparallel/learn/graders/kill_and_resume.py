"""Kill and resume: one training, killed again and again, beside one that was left alone."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from microparallel.learn.exam import Exam
from microparallel.learn.graders._history import History, Rows, Training, require_each_sample, require_each_step
from microparallel.learn.graders._killing import SAMPLES, Kill, Log, Plan, Watch
from microparallel.learn.graders._resuming import BATCH, RANKS, TrueRun
from microparallel.learn.requirements import require_type
from microparallel.learn.verdict import Wrong

_STEPS, _SAVE_EVERY = 60, 4
_BETWEEN_SAVES = (Kill(0, "draw", 2), Kill(0, "draw", 7), Kill(1, "backward", 7), Kill(0, "report", 7))


def check(exam: Exam) -> None:
    """The undisturbed run; kills between saves and in a save; a power cut, and the weights at the end."""
    with tempfile.TemporaryDirectory(prefix="kill-and-resume-") as name:
        training = Training(_attempt, RANKS, _STEPS, _SAVE_EVERY, _require_right, _explanation)
        history = History(exam, Path(name), training)
        with exam.step("undisturbed: each sample once an epoch, and saving changes nothing"):
            history.learn_what_is_right()
            history.learn_what_a_save_does()
        history.survive(
            _BETWEEN_SAVES,
            Kill(0, "draw", _SAVE_EVERY + 1),
            between="killed between two saves, four times: the same samples and losses, bit for bit",
            saving="killed while it saves: the checkpoint before is still there",
        )


def _attempt(load: Callable[[], Any], comms: Any, plan: Plan) -> list[torch.Tensor]:
    """Call the learner's `train` on this rank; returns the tensors of the model."""
    watch = Watch(comms, plan)
    learner = load()
    model = learner.train(comms, watch.data, SAMPLES, watch.report, Path(plan.folder), plan.steps, plan.save_every)
    watch.ends()
    require_type(model, nn.Module, "what train returns", "the model")
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


@functools.cache
def _true_run() -> TrueRun:
    return TrueRun(_STEPS)


def _explanation(rows: Rows, saved: int) -> str | None:
    return _true_run().explanation(rows, saved)


def _require_right(logs: Sequence[Log], weights: Sequence[Sequence[torch.Tensor]]) -> None:
    """Every step is reported once, every sample is used once an epoch, and both ranks have learned the same."""
    require_each_step(logs, _STEPS)
    require_each_sample(logs, _STEPS, SAMPLES // (BATCH * RANKS))
    if any(not torch.equal(one, other) for one, other in zip(weights[0], weights[1], strict=True)):
        raise Wrong(
            "without any kill, the ranks end with different weights: average the gradients, comms.all_reduce"
            '(parameter.grad, op="mean")'
        )
    _require_learning([log.rows for log in logs])


def _require_learning(rows: Rows) -> None:
    """The run is that of the exercise; an answer with other random numbers must at least learn something."""
    losses = [sum(same) / RANKS for same in zip(*([row.loss for row in mine] for mine in rows), strict=True)]
    third = len(losses) // 3
    if not sum(losses[-third:]) < 0.9 * sum(losses[:third]):
        raise Wrong(
            f"without any kill the loss does not fall: {losses[0]:.3g} in step 1, {losses[-1]:.3g} in step {_STEPS}. "
            "Is the training still the one of the exercise?"
        )
