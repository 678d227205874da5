"""Send fewer bytes: what does it save, and what does it do to the loss?

Three ways to learn from the same batches in the same order, from the same weights, once for each seed:

```
whole                 g ────────────────────────────► sum       every rank sends its gradients as they are
with feedback         g + left over ──compress──► sent          what was not sent is added to the next gradients
without feedback      g ──compress──► sent                      what was not sent is lost
```
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from microparallel.comms import Comms
from microparallel.comms.record import Recorder
from microparallel.compression import parse
from microparallel.train.build import build
from microparallel.train.compare import Progress
from microparallel.train.config import TrainConfig
from microparallel.world import Pool

WHOLE, WITH, WITHOUT = "whole", "with feedback", "without feedback"
WAYS: dict[str, dict[str, Any]] = {
    WHOLE: {"compress": None, "no_feedback": None, "compress_warmup": None},
    WITH: {"no_feedback": None},
    WITHOUT: {"no_feedback": True},
}
_LAST = 10  # steps, whose mean loss is the final one: a single batch says little


@dataclass(frozen=True)
class CompressedCurve:
    """What came of one way to learn, over all seeds.

    Attributes:
        way: one of the three.
        losses: of every step, the mean over the seeds.
        final: for each seed, the mean loss of the last steps.
        accuracy: for each seed, the share of right answers on samples that were held back; None where none are.
        bytes_a_step: sent by the rank that sent most, in the last step.
    """

    way: str
    losses: list[float]
    final: list[float]
    accuracy: list[float | None]
    bytes_a_step: float

    @property
    def final_loss(self) -> float:
        """The mean over the seeds."""
        return statistics.fmean(self.final)


@dataclass(frozen=True)
class _Learnt:
    """What one seed gave."""

    losses: list[float]
    accuracy: float | None
    bytes_a_step: float


def compare_compression(
    config: TrainConfig, seeds: Sequence[int], pool: Pool, progress: Progress = lambda _: None
) -> list[CompressedCurve]:
    """Learn in each of the three ways, with each seed; `config` names the method.

    A method that has no error feedback of its own accord (bf16 rounds, and what it rounds away is little) has two ways.
    """
    curves = []
    ways = WAYS if parse(config.compress or "none").feedback else {WHOLE: WAYS[WHOLE], WITHOUT: WAYS[WITHOUT]}
    for way, settings in ways.items():
        found = []
        for seed in seeds:
            progress(f"{way}, seed {seed}, on {config.ranks} ranks")
            job = replace(config, seed=seed, **settings)
            found.append(
                pool.run(learn, config.ranks, job, transport=config.transport, device=config.device, mps=config.mps)[0]
            )
        curves.append(_curve(way, found))
    return curves


def learn(comms: Comms, config: TrainConfig) -> _Learnt:
    """One rank's part in one run; its last step is recorded, to count what was sent."""
    training = build(replace(config, on_nan="ignore"), comms)  # a method may fail: that is measured
    steps = config.steps or 1
    losses = [training.step() for _ in range(steps - 1)]
    recorder = Recorder(comms, memory=False)
    recorder.start()
    losses.append(training.step())
    recorder.stop()
    sent = max(recorder.gather({}).bytes_sent)
    held_back = training.validate()
    return _Learnt(losses, None if held_back is None else held_back.accuracy, sent)


def _curve(way: str, found: Sequence[_Learnt]) -> CompressedCurve:
    return CompressedCurve(
        way=way,
        losses=[statistics.fmean(each) for each in zip(*(one.losses for one in found), strict=True)],
        final=[statistics.fmean(one.losses[-_LAST:]) for one in found],
        accuracy=[one.accuracy for one in found],
        bytes_a_step=found[0].bytes_a_step,
    )
