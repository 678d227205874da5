"""Time steps of several methods that take turns, so that a shared machine's good and bad moments are shared too.

Each round begins with another method. Between its turns a method's weights have left the caches and its threads have
gone to sleep, which is not so in a training that does nothing else: each turn therefore begins with a step that is not
counted.

    round 1   none ○●   naive ○●   ddp ○●   torch-ddp ○●      ○ not counted
    round 2   naive ○●   ddp ○●   torch-ddp ○●   none ○●      ● counted, as long as on the slowest rank
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch

from microparallel.comms import Comms
from microparallel.comms.record import Recorder
from microparallel.performance.rounds import largest, total
from microparallel.performance.time_budget import TimeBudget
from microparallel.topology import available_cores

_WARM_UP = 2  # rounds: buckets are arranged anew after the first step


class Stepper(Protocol):
    """Something whose steps are timed."""

    @property
    def alone(self) -> bool:
        """Whether no rank waits for another in a step, even where they take turns on a core."""

    def step(self) -> None:
        """Do one step; all ranks call this."""


Kind = TypeVar("Kind", bound=Stepper)


class StepRounds(Generic[Kind]):
    """The steps so far: for everything that takes turns its seconds, each those of the slowest rank.

    Args:
        comms: the ranks.
        steppers: what takes turns.
        after_turn: is told whose turn has ended, when that was a turn that counts.
    """

    def __init__(
        self, comms: Comms, steppers: Sequence[Kind], after_turn: Callable[[Kind], None] = lambda _: None
    ) -> None:
        self.seconds: dict[Kind, list[float]] = {stepper: [] for stepper in steppers}
        self.spent = 0.0
        self.rounds = 0  # those that were not counted too
        self._comms = comms
        self._after_turn = after_turn
        self._order = list(steppers)
        self._cores = min(available_cores(), comms.world_size)

    def fill(self, budget: TimeBudget, tell: Callable[[float, int], None]) -> None:
        """Do rounds for as long as the budget allows; `tell` hears the fraction done, and how many counted."""
        tell(0.0, 0)
        for _ in range(_WARM_UP):
            took = self._round(counts=False)
        counted = 0
        while budget.goes_on(counted, self.spent, took):
            took = self._round(counts=True)
            counted += 1
            tell(budget.fraction(counted, self.spent), counted)

    def _round(self, *, counts: bool) -> float:
        """One turn of each method; returns how long all of them took."""
        begun = time.perf_counter()
        mine = [self._turn(stepper, counts) for stepper in self._order]
        slowest = largest(self._comms, [seconds for seconds, _ in mine])
        work = total(self._comms, [busy for _, busy in mine])
        for stepper, seconds, busy in zip(self._order, slowest, work, strict=True):
            # Ranks that outnumber the cores take turns on them. Where none waits for another, the slowest one's time
            # leaves that out; all of them together keep the cores busy for longer.
            self.seconds[stepper] += [max(seconds, busy / self._cores) if stepper.alone else seconds] * counts
        self._order = self._order[1:] + self._order[:1]
        self.rounds += 1
        [took] = largest(self._comms, [time.perf_counter() - begun])
        self.spent += took
        return took

    def _turn(self, stepper: Kind, counts: bool) -> tuple[float, float]:
        """A step that does not count and one that does: how long it took, and how long it kept a core busy."""
        stepper.step()
        wait_for_gpu(self._comms.device)
        self._comms.barrier()  # waiting for a late rank is nobody's cost
        begun, busy_before = time.perf_counter(), time.process_time()
        stepper.step()
        wait_for_gpu(self._comms.device)
        took = time.perf_counter() - begun, time.process_time() - busy_before
        if counts:
            self._after_turn(stepper)
        return took


def write_traces(comms: Comms, steppers: Mapping[str, Stepper], folder: str) -> None:
    """Record one more step of each, by name, and write it as a Chrome trace; every rank calls this, and one writes."""
    for name, stepper in steppers.items():
        recorder = Recorder(comms)
        comms.barrier()
        recorder.start()
        try:
            stepper.step()
        finally:
            recorder.stop()
        trace = recorder.gather({"step of": name})
        if comms.rank == 0:
            Path(folder).mkdir(parents=True, exist_ok=True)
            trace.to_chrome(Path(folder) / f"{re.sub('[^a-zA-Z0-9]+', '-', name)}.json")


def wait_for_gpu(device: torch.device) -> None:
    """Return when a GPU, which works in the background, has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
