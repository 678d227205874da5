"""Predict a step of every method from a short calibration, and measure it in the same run.

What is calibrated takes turns with the steps that are predicted, so that whatever else the machine does disturbs both
alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import nn

from microparallel.bench.data_parallel import Batch, Contender, Method
from microparallel.bench.engine import (
    StepRounds,
    TimeBudget,
    chance_speaks,
    cores_are_shared,
    count_ranks_here,
    quartiles,
    transport_of,
)
from microparallel.bench.output import console_for_results, machine, show_step
from microparallel.bench.pipeline import Ours, describe, pipeline_subject
from microparallel.bench.pipeline_costs import Alone, kinds_in
from microparallel.bench.predict import (
    SMALL,
    MessagesAlone,
    MessageTimes,
    Prediction,
    RankTimes,
    WorkAlone,
    medians_of,
    predict_ddp,
    predict_naive,
    predict_pipeline,
)
from microparallel.bench.settings import PREDICTED_REPLICAS, PredictSettings, Progress
from microparallel.comms import Comms
from microparallel.data_parallel.bucket import split
from microparallel.errors import UsageError
from microparallel.simulator.fitted import Fitted
from microparallel.text import count, show_seconds
from microparallel.topology import available_cores

Homes = tuple[int, ...]  # the rank of each stage of a pipeline


@dataclass(frozen=True)
class Predictions:
    """Everything that was predicted and measured in one run; the same on every rank."""

    ranks: int
    ranks_here: int
    cores: int
    transport: str
    device: str
    text: str  # what is trained, for people
    bucket_cap_mb: float
    rows: tuple[Prediction, ...]
    work: tuple[RankTimes, ...]
    messages: MessageTimes


def bench_predictions(comms: Comms, settings: PredictSettings, progress: Progress = lambda *_: None) -> Predictions:
    """Calibrate, predict and measure; every rank calls this, and all get the same."""
    if comms.world_size < 2:
        raise UsageError("one rank sends nothing, so there is little to predict; start at least 2")
    bench = _Bench(comms, settings)
    subject = pipeline_subject(settings)
    budget = TimeBudget(settings.seconds, 1, settings.steps)
    bench.rounds.fill(budget, lambda part, steps: progress(part, subject.name, steps))
    steps, messages = bench.work.steps(), bench.messages.times()
    return Predictions(
        comms.world_size,
        count_ranks_here(),
        available_cores(),
        transport_of(comms),
        comms.device.type,
        describe(subject, settings.microbatches),
        settings.bucket_cap_mb,
        bench.predictions(steps, messages),
        medians_of(steps),
        messages,
    )


class _Bench:
    """All methods on one model, and what is calibrated."""

    def __init__(self, comms: Comms, settings: PredictSettings) -> None:
        subject = pipeline_subject(settings)
        model = subject.model().to(comms.device)
        inputs, targets = (part.to(comms.device) for part in subject.on_rank(0))
        share = slice(comms.rank, None, comms.world_size)
        mine = inputs[share].contiguous(), targets[share].contiguous()
        self._comms = comms
        self._settings = settings
        self._parameters = [one for one in model.parameters() if one.requires_grad]
        self._sizes = [parameter.nbytes for parameter in self._parameters]
        pieces = settings.microbatches
        self._contenders: dict[str, Contender | Ours] = {}
        for name in settings.methods:
            if name in PREDICTED_REPLICAS:
                method = Method(name, settings.bucket_cap_mb if name == "ddp" else None)
                self._contenders[name] = Contender(method, model, mine, comms, comms.process_group)
            else:
                self._contenders[name] = Ours(name, model, (inputs, targets), pieces, comms)
        self._activation = _largest_activation(model, inputs[: max(1, len(inputs) // pieces)])
        self.work = WorkAlone(comms, model, mine)
        totals = [sum(self._sizes[index] for index in bucket) for bucket in self._buckets(range(len(self._sizes)))]
        self.messages = MessagesAlone(comms, [SMALL, *totals], [SMALL, *self._sizes], [SMALL, self._activation])
        self._stages = self._stages_alone(model, (inputs, targets))
        steppers: list[Contender | Ours | WorkAlone | MessagesAlone | Alone] = [
            *self._contenders.values(),
            self.work,
            self.messages,
            *self._stages.values(),
        ]
        self.rounds = StepRounds(comms, steppers, _keep)

    def _stages_alone(self, model: nn.Module, batch: Batch) -> dict[Homes, Alone]:
        """The stages' computations by themselves, for each way in which the model is cut."""
        cuts: dict[Homes, list[Ours]] = {}
        for one in self._contenders.values():
            if isinstance(one, Ours):
                cuts.setdefault(one.homes, []).append(one)
        pieces = self._settings.microbatches
        return {
            homes: Alone(same[0], kinds_in(one.pipe.program for one in same), model, batch, pieces)
            for homes, same in cuts.items()
        }

    def _buckets(self, order: Sequence[int]) -> list[list[int]]:
        """Parameters by their numbers, cut into buckets in the order in which their gradients arrive."""
        numbers = {id(self._parameters[index]): index for index in order}
        groups = split([self._parameters[index] for index in order], self._settings.bucket_cap_mb * 2**20)
        return [[numbers[id(parameter)] for parameter in group] for group in groups]

    def predictions(self, steps: Sequence[Sequence[RankTimes]], messages: MessageTimes) -> tuple[Prediction, ...]:
        """One for each method.

        In every step another rank is the slower one, and ranks that wait for each other take as long as the slower one
        each time. So each step of the calibration is simulated by itself, and the median is the prediction.
        """
        usual = medians_of(steps)
        stages = {homes: alone.stage_times() for homes, alone in self._stages.items()}
        by_step = {homes: alone.steps() for homes, alone in self._stages.items()}
        rows = []
        for name, contender in self._contenders.items():
            if isinstance(contender, Ours):
                program, size = contender.pipe.program, self._activation
                fitted = predict_pipeline(program, stages[contender.homes], size, messages)
                each = [predict_pipeline(program, times, size, messages) for times in by_step[contender.homes]]
                # Before a pipeline's step the first rank says what is coming.
                before = messages.message.at(SMALL)
                seconds = statistics.median(one.makespan for one in each) + before
            else:
                fitted = self._data_parallel(name, usual, messages)
                seconds = statistics.median(self._data_parallel(name, work, messages).makespan for work in steps)
            rows.append(Prediction(name, seconds, tuple(self.rounds.seconds[contender]), fitted))
        return tuple(rows)

    def _data_parallel(self, name: str, work: Sequence[RankTimes], messages: MessageTimes) -> Fitted:
        if name == "naive":
            return predict_naive(work, self._sizes, messages)
        first = work[0].arrivals
        order = sorted(range(len(first)), key=lambda index: first[index])
        return predict_ddp(work, self._buckets(order), self._sizes, messages, self._comms.can_overlap)


def _keep(stepper: Contender | Ours | WorkAlone | MessagesAlone | Alone) -> None:
    if isinstance(stepper, WorkAlone | MessagesAlone | Alone):
        stepper.keep()


def _largest_activation(model: nn.Module, inputs: torch.Tensor) -> int:
    """How many bytes travel between the layers of a pipeline, for one micro-batch."""
    sizes = [0]

    def look(_: nn.Module, arguments: tuple[object, ...], __: object) -> None:
        sizes.extend(one.nbytes for one in arguments if isinstance(one, torch.Tensor) and one.is_floating_point())

    layers = getattr(model, "pipeline_layers", None)
    handles = [layer.register_forward_hook(look) for layer in (layers() if layers is not None else model.children())]
    try:
        with torch.no_grad():
            model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return max(sizes)


# How the results of `bench predict` are shown: as a table for people, as JSON for scripts.


_AIM = 0.1


def as_json(found: Predictions) -> dict[str, Any]:
    """Everything that was measured and predicted, in plain types."""
    return {
        "machine": machine(found.cores),
        "ranks": found.ranks,
        "transport": found.transport,
        "device": found.device,
        "model": found.text,
        "bucket_cap_mb": found.bucket_cap_mb,
        "results": [
            {
                "method": row.method,
                "predicted_seconds": row.seconds,
                "measured_seconds": row.median,
                "error": row.error,
                "steps": list(row.measured),
            }
            for row in found.rows
        ],
        "calibration": {"work": [asdict(one) for one in found.work], "messages": asdict(found.messages)},
        "notes": notes(found),
    }


def show(found: Predictions) -> None:
    """Print the table, and what a reader must know."""
    console = console_for_results()
    ranks, cores = count(found.ranks, "rank"), count(found.cores, "core")
    where = f"{found.transport}, float32 on {found.device}, torch {torch.__version__}"
    console.print(f"[bold]predicted step[/], {ranks} on {cores}: {where}\n")
    console.print(f"{found.text}; buckets of {found.bucket_cap_mb:g} MB", soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for heading in ("method", "predicted", "measured", "quartiles", "error"):
        table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    for row in found.rows:
        lower, median, upper = quartiles(row.measured)
        style = "green" if abs(row.error) <= _AIM else "yellow"
        cells = [*show_step(median, lower, upper, len(row.measured)), f"[{style}]{row.error:+.1%}[/]"]
        table.add_row(row.method, show_seconds(row.seconds), *cells)
    console.print(table)
    typical = statistics.median(abs(row.error) for row in found.rows)
    console.print(f"\ntypically off by {typical:.1%}; within {_AIM:.0%}: {_within(found)} of {len(found.rows)}")
    for note in notes(found):
        console.print(f"[yellow]![/] {note}")


def _within(found: Predictions) -> int:
    return sum(abs(row.error) <= _AIM for row in found.rows)


def notes(found: Predictions) -> list[str]:
    """What a reader must know."""
    shared = cores_are_shared(found.ranks_here, found.cores, found.device)
    return [*shared, *chance_speaks("here", len(found.rows[0].measured))]
