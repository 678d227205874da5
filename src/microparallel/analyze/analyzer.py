"""DDPPerformanceAnalyzer: where does the time of a data-parallel step go, and what does communication cost?

```python
analyzer = mp.analyze.DDPPerformanceAnalyzer(comms)
for inputs, targets in batches:
    timing = analyzer.time_step(model, inputs, targets, optimizer, loss_fn)
print(analyzer.analyze_communication_overhead())
```

Every number comes from events that were recorded while the step ran as it always does. No barriers are put between its
phases: they would make ranks wait for each other where they do not, stop communication from hiding behind computation,
and book the waiting as work. `barriers=True` does another step with them, to show just that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from microparallel.analyze.step_timing import (
    CommunicationOverhead,
    Phases,
    StepTiming,
    median_of,
    overhead_of,
    time_of_step,
)
from microparallel.bench.engine import wait_for_gpu
from microparallel.bench.messages import MessageCosts, measure_message_costs, time_all_reduce
from microparallel.collectives import all_reduce_program
from microparallel.comms import Comms
from microparallel.comms.record import record
from microparallel.comms.wire import gather_json
from microparallel.course.ddp import ddp_step
from microparallel.course.naive import naive_data_parallel_step
from microparallel.data_parallel import DataParallel
from microparallel.errors import UsageError
from microparallel.models.loss import LossFunction, mean_loss
from microparallel.pipeline import Pipeline

# (model, comms, inputs, targets, loss_fn) → the loss; leaves the averaged gradients in the model
Gradients = Callable[[Any, Comms, Any, torch.Tensor, LossFunction | None], torch.Tensor]

_MOST_MEASURED = 256 * 10**6  # bytes: a larger message is estimated, and not sent


@dataclass(frozen=True)
class CommunicationEstimate:
    """How long an all-reduce takes.

    Attributes:
        algorithm: by its name in `mp.collectives`.
        bytes: of the tensor.
        world_size: how many ranks take part.
        seconds: what the simulator makes of the measured latency and bandwidth.
        measured: what it took; None where it could not be tried, as with more ranks than there are.
        latency: of a message, in seconds.
        bandwidth: of a message, in bytes a second.
    """

    algorithm: str
    bytes: int
    world_size: int
    seconds: float
    measured: float | None
    latency: float
    bandwidth: float


class DDPPerformanceAnalyzer:
    """Times training steps of all ranks, from real events.

    Args:
        comms: the ranks.
        device: where the model is, if that is not where `comms` is.
    """

    def __init__(self, comms: Comms, device: torch.device | str | None = None) -> None:
        self._comms = comms
        self._device = comms.device if device is None else torch.device(device)
        self._timings: list[StepTiming] = []
        self._costs: MessageCosts | None = None

    def time_step(
        self,
        model: nn.Module | Pipeline,
        inputs: Any,
        targets: torch.Tensor,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFunction | None = None,
        strategy: str | Gradients = "auto",
        *,
        steps: int = 1,
        barriers: bool = False,
    ) -> StepTiming:
        """Do a training step, and say where its time went; every rank calls this with its own samples.

        Args:
            model: what is trained: a plain module, `mp.DataParallel`, `mp.FullyShardedDataParallel`, one with
                `mp.course.register_ddp_hooks`, torch's DistributedDataParallel, or `mp.Pipeline`.
            inputs: this rank's share of the batch.
            targets: one a sample.
            optimizer: of the model's parameters.
            loss_fn: takes outputs and targets; without it, `model(inputs, targets)` is the loss.
            strategy: how ranks average gradients: "auto" as the model does it by itself, and a plain module in buckets
                that are made for the step; "naive" an all-reduce for each after backward; "none" not at all; or a
                function of (model, comms, inputs, targets, loss_fn).
            steps: how many to do with these samples; the result is the one that took the median time.
            barriers: do one step more with barriers between the phases, to show how they distort.
        """
        if steps < 1:
            raise UsageError(f"time_step: steps={steps} must be at least 1")
        if barriers and isinstance(model, Pipeline):
            raise UsageError("time_step: barriers=True is for data parallelism; a pipeline's phases are interwoven")
        gradients = _gradients(model, strategy)

        def backward() -> torch.Tensor:
            optimizer.zero_grad()
            return gradients(model, self._comms, inputs, targets, loss_fn)

        timing = self._record(backward, optimizer.step, len(targets), steps)
        if barriers and not isinstance(model, Pipeline):
            phases, distorted = self.time_with_barriers(model, backward, optimizer.step, len(targets))
            timing = replace(timing, phases=phases, with_barriers=distorted)
        self._timings.append(timing)
        return timing

    def time_steps(self, step: Callable[[], Any], samples: int | Callable[[], int], steps: int = 1) -> StepTiming:
        """Time any step, and return the one that took the median time.

        Args:
            step: does all of it, the optimizer too.
            samples: how many this rank has in each step; or a function that tells it after a step.
            steps: how many to do.
        """
        timing = self._record(step, lambda: None, samples, steps)
        self._timings.append(timing)
        return timing

    def time_with_barriers(
        self, model: nn.Module, backward: Callable[[], Any], update: Callable[[], Any], samples: int
    ) -> tuple[Phases, StepTiming]:
        """Do one step with a barrier between its phases.

        Args:
            model: whose forward ends the first phase.
            backward: does forward and backward, and averages gradients.
            update: updates the weights.
            samples: of this rank.

        Returns:
            What clocks between the barriers show, and where the time of that step really went.
        """
        moments: list[float] = []

        def meet(*_: Any) -> None:
            wait_for_gpu(self._device)
            self._comms.barrier()
            moments.append(time.perf_counter())

        def slow_backward() -> Any:
            meet()
            loss = backward()
            meet()
            return loss

        def slow_update() -> None:
            update()
            meet()

        handle = model.register_forward_hook(meet)
        try:
            distorted = self._record(slow_backward, slow_update, samples, 1)
        finally:
            handle.remove()
        # A model that was called several times has several forwards: the last one's end is where backward begins.
        phases = moments[-3] - moments[0], moments[-2] - moments[-3], moments[-1] - moments[-2]
        by_rank = gather_json(phases, self._comms)
        means = [sum(part) / len(by_rank) for part in zip(*by_rank, strict=True)]
        return Phases(*means), distorted

    def analyze_communication_overhead(self) -> CommunicationOverhead:
        """What communication cost in the steps so far: those after the first, which makes buckets and memory ready."""
        if not self._timings:
            raise UsageError("analyze_communication_overhead: time some steps first, by time_step(…)")
        return overhead_of(median_of(self._timings[1:] or self._timings))

    def estimate_communication(
        self, algorithm: str, bytes: int, world_size: int | None = None
    ) -> CommunicationEstimate:
        """How long an all-reduce of so many bytes would take among so many ranks; every rank calls this.

        Latency and bandwidth of a message are measured when this is first called, and the simulator does the rest.
        Where there are just so many ranks, the all-reduce is done, too, so that both times stand side by side.
        """
        ranks = self._comms.world_size if world_size is None else world_size
        if bytes < 1:
            raise UsageError(f"estimate_communication: bytes={bytes} must be at least 1")
        program = all_reduce_program(algorithm, ranks)
        costs = self.message_costs()
        measured = None
        if ranks == self._comms.world_size and bytes <= _MOST_MEASURED:
            measured = time_all_reduce(self._comms, bytes, algorithm)
        return CommunicationEstimate(
            algorithm,
            bytes,
            ranks,
            costs.predict(program, bytes),
            measured,
            costs.latency,
            1 / costs.seconds_per_byte if costs.seconds_per_byte else float("inf"),
        )

    def message_costs(self) -> MessageCosts:
        """What a message costs between these ranks; measured once."""
        if self._costs is None:
            self._costs = measure_message_costs(self._comms)
        return self._costs

    # ── how a step is recorded ──────────────────────────────────────────────────────────────────────────────────

    def _record(
        self, backward: Callable[[], Any], update: Callable[[], Any], samples: int | Callable[[], int], steps: int
    ) -> StepTiming:
        mine: list[tuple[int, float]] = []  # samples and seconds of each step on this rank
        numbers: list[tuple[int, int]] = []
        loss: Any = None
        with record(self._comms) as recorder:
            for _ in range(steps):
                first, begun = recorder.step, time.perf_counter()
                loss = backward()
                update()
                wait_for_gpu(self._device)
                mine.append((samples() if callable(samples) else samples, time.perf_counter() - begun))
                recorder.step = max(recorder.step, first + 1)  # an optimizer of the user's own does not count steps
                numbers.append((first, recorder.step))
        together = list(zip(*gather_json(mine, self._comms), strict=True))  # for each step, those of every rank
        trace = recorder.trace
        timings = []
        for (first, last), ranks in zip(numbers, together, strict=True):
            step = replace(trace, events=[event for event in trace.events if first <= event.step < last])
            took = max(seconds for _, seconds in ranks)
            timings.append(time_of_step(step, sum(count for count, _ in ranks), took, _number(loss)))
        return median_of(timings)


def _gradients(model: nn.Module | Pipeline, strategy: str | Gradients) -> Gradients:
    if callable(strategy):
        return strategy
    if isinstance(model, Pipeline):
        return _of_pipeline
    if strategy == "naive":
        return naive_data_parallel_step
    if strategy == "none" or (strategy == "auto" and isinstance(model, DataParallel | DistributedDataParallel)):
        return _by_itself
    if strategy == "auto":
        return ddp_step
    raise UsageError(f"time_step: strategy={strategy!r}; choose 'auto', 'naive' or 'none', or pass a function")


def _by_itself(
    model: Any, comms: Comms, inputs: Any, targets: torch.Tensor, loss_fn: LossFunction | None
) -> torch.Tensor:
    """Only forward and backward: wrapped models average their gradients themselves."""
    del comms
    loss = mean_loss(model, inputs, targets, loss_fn)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def _of_pipeline(
    model: Any, comms: Comms, inputs: Any, targets: torch.Tensor, loss_fn: LossFunction | None
) -> torch.Tensor:
    del comms, loss_fn
    loss: torch.Tensor = model.step(inputs, targets)
    return loss


def _number(loss: Any) -> float | None:
    return float(loss) if isinstance(loss, torch.Tensor | float | int) else None
