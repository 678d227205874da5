"""The engine of all benchmarks: contenders take turns, every rank times them, and a time budget says when to stop.

A shared machine has good moments and bad ones. So the contenders (algorithms, strategies, schedules) take turns, and
each round begins with another one: what disturbs a minute of the run disturbs all of them alike.

    round 1   torch  ring   tree        warm-up: not counted
    round 2   ring   tree   torch
    round 3   tree   torch  ring

A benchmark brings its contenders, a function that measures one of them, and a check of the result. The engine does the
rest: `Rounds` collects the seconds, `TimeBudget` limits them, `Measured` says where they come from.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

from microparallel.bench.gpu_use import Gpu
from microparallel.comms import Comms
from microparallel.comms.record import Recorder
from microparallel.errors import UsageError
from microparallel.text import show_size
from microparallel.topology import available_cores, available_memory, find_placement
from microparallel.topology.hosts import MIXED

# ── what every benchmark returns ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Wrong:
    """A method whose result was wrong, and what it did: `ring` and `gave a wrong sum on rank 2, at 64 KB`."""

    method: str
    problem: str

    def __str__(self) -> str:
        """One sentence for the error message."""
        return f"{self.method} {self.problem}"


@dataclass(frozen=True)
class Measured:
    """Where a benchmark ran; each benchmark adds what it measured. All ranks have the same numbers.

    Attributes:
        ranks: how many took part.
        ranks_here: how many of them run on this machine.
        cores: of this machine, as far as this process may use them.
        transport: "shm", "shm+gloo", "cuda", "nccl" or "gloo".
        device: "cpu" or "cuda".
        wrong: the first wrong result, which ended the run.
        dtype_of_model: of weights, gradients and activations.
        gpu: what was seen of the GPU, where the ranks compute on one.
    """

    ranks: int
    ranks_here: int
    cores: int
    transport: str
    device: str
    wrong: Wrong | None = field(default=None, kw_only=True)
    dtype_of_model: str = field(default="float32", kw_only=True)
    gpu: Gpu | None = field(default=None, kw_only=True)

    @property
    def torch_group(self) -> str:
        """What torch's own talks through: where our ranks share memory, it runs on gloo beside."""
        return "gloo" if has_gloo_beside(self.transport) else self.transport


def where(comms: Comms) -> tuple[int, int, int, str, str]:
    """The first fields of `Measured`, for the ranks of this world."""
    return comms.world_size, count_ranks_here(), available_cores(), transport_of(comms), comms.device.type


def count_ranks_here() -> int:
    """How many ranks run on this machine."""
    return find_placement(os.environ).local_world_size


def transport_of(comms: Comms) -> str:
    """The transport between these ranks: "shm", "shm+gloo", "cuda", "nccl" or "gloo"."""
    return comms.transport_name.partition(":")[0]


def shares_memory(transport: str) -> bool:
    """Whether our collectives run in shared memory of the CPU, at least inside of hosts."""
    return transport in ("shm", MIXED)


def has_gloo_beside(transport: str) -> bool:
    """Whether our collectives run in memory that ranks share, the CPU's or a GPU's, and torch's own on gloo beside."""
    return shares_memory(transport) or transport == "cuda"


# ── how long to measure ─────────────────────────────────────────────────────────────────────────────────────────────

FEWEST_REPEATS = 5  # a median with quartiles needs as many
MOST_REPEATS = 50

Key = TypeVar("Key")


class TimeBudget:
    """Seconds for all sizes together; or, with `repeats`, as long as so many repeats take.

    A larger size gets a larger share: the second four times that of the first, the third nine times. What a size
    leaves over is shared by the sizes after it.
    """

    def __init__(self, seconds: float, sizes: int = 1, repeats: int | None = None) -> None:
        self._seconds = seconds
        self._sizes = sizes
        self._repeats = repeats
        self._spent = 0.0
        self._sizes_done = 0

    @property
    def share(self) -> float:
        """The seconds for the next size."""
        weights = [position**2 for position in range(self._sizes_done + 1, self._sizes + 1)]
        return max(0.0, self._seconds - self._spent) * weights[0] / sum(weights)

    def too_slow(self, calls: Mapping[Key, float], repeats: int, spent_here: float) -> set[Key]:
        """Choose methods to repeat no more at this size, slowest first, so that the others get their fewest repeats.

        Args:
            calls: the seconds of a call of each method.
            repeats: how many rounds have been counted.
            spent_here: the seconds of all rounds at this size.
        """
        missing = FEWEST_REPEATS - repeats
        if self._repeats is not None or missing <= 0:
            return set()
        fastest_first = sorted(calls, key=lambda method: calls[method])
        kept = len(fastest_first)
        while kept and spent_here + missing * sum(calls[method] for method in fastest_first[:kept]) > self.share:
            kept -= 1
        return set(fastest_first[kept:])

    def goes_on(self, repeats: int, spent_here: float, next_round: float) -> bool:
        """Whether there is time for one more round at this size, after so many, if it takes `next_round` seconds."""
        if self._repeats is not None:
            return repeats < self._repeats
        return repeats < FEWEST_REPEATS or (repeats < MOST_REPEATS and spent_here + next_round < self.share)

    def fraction(self, repeats: int, spent_here: float) -> float:
        """The share of the whole budget that is used, from 0 to 1."""
        if self._repeats is not None:
            return (self._sizes_done + repeats / self._repeats) / self._sizes
        return min(1.0, (self._spent + spent_here) / self._seconds)

    def end_size(self, spent_here: float) -> None:
        """Go on to the next size; this one took so many seconds."""
        self._spent += spent_here
        self._sizes_done += 1


# ── rounds ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Contender(Protocol):
    """Something that is timed in turn with others."""

    @property
    def alone(self) -> bool:
        """Whether no rank waits for another while this is measured."""


@dataclass(frozen=True)
class Call:
    """One measurement on this rank: how long it took, how long it kept a core busy, whether the result was right."""

    seconds: float
    busy: float
    right: bool = True


C = TypeVar("C", bound=Contender)


class Rounds(Generic[C]):
    """The rounds so far: for each contender its seconds, each those of the slowest rank.

    Ranks that outnumber the cores take turns on them. A rank that waits for the others waits for that too. Where no
    rank waits for another (`alone`), the slowest rank's time leaves it out; then a call takes at least as long as all
    ranks' work keeps the cores busy.

    Args:
        comms: the ranks.
        contenders: what takes turns.
        measure: times one contender on this rank; all ranks call it at the same time.
        warm_up: rounds at the beginning that do not count: connections, caches and memory are made ready.
        after_each: is called with a contender after each of its measurements that counts.
    """

    def __init__(
        self,
        comms: Comms,
        contenders: Sequence[C],
        measure: Callable[[C], Call],
        warm_up: int = 1,
        after_each: Callable[[C], None] = lambda _: None,
    ) -> None:
        self.seconds: dict[C, list[float]] = {contender: [] for contender in contenders}
        self.counted = 0
        self.rounds = 0  # those of the warm-up too
        self.spent = self.last_round = 0.0
        self.wrong: tuple[C, int] | None = None  # a contender with a wrong result, and on which rank
        self._comms = comms
        self._measure = measure
        self._warm_up = warm_up
        self._after_each = after_each
        self._order = list(contenders)
        self._cores = min(available_cores(), comms.world_size)

    def fill(
        self,
        budget: TimeBudget,
        progress: Callable[[float, int], None] = lambda *_: None,
        may_end: Collection[C] = (),
    ) -> None:
        """Do rounds for as long as the budget allows; a wrong result ends them.

        Args:
            budget: how long.
            progress: is told the fraction done, and how many rounds have counted.
            may_end: contenders that may be left out of further rounds where they are too slow for the budget.
        """
        progress(budget.fraction(0, 0), 0)
        for _ in range(self._warm_up):
            self.warm_up()
        while self.wrong is None and budget.goes_on(self.counted, self.spent, self.last_round):
            calls = self.one_more()
            slow = {contender: seconds for contender, seconds in calls.items() if contender in may_end}
            for contender in budget.too_slow(slow, self.counted, self.spent):
                self.end(contender)
            progress(budget.fraction(self.counted, self.spent), self.counted)
        budget.end_size(self.spent)

    def warm_up(self) -> None:
        """One round that does not count."""
        self._round(counts=False)

    def one_more(self) -> dict[C, float]:
        """One round that counts; returns the seconds of each contender."""
        together = self._round(counts=True)
        for contender, seconds in together.items():
            self.seconds[contender].append(seconds)
        self.counted += 1
        return together

    def end(self, contender: C) -> None:
        """Leave a contender out of the rounds to come."""
        self._order.remove(contender)

    def _round(self, *, counts: bool) -> dict[C, float]:
        begun = time.perf_counter()
        calls = []
        for contender in self._order:
            calls.append(self._measure(contender))
            if counts:
                self._after_each(contender)
        failed = [0 if call.right else self._comms.rank + 1 for call in calls]
        slowest = largest(self._comms, [*(call.seconds for call in calls), *failed])
        busy = total(self._comms, [call.busy for call in calls])
        together = {}
        for contender, seconds, work, rank in zip(self._order, slowest, busy, slowest[len(calls) :], strict=False):
            together[contender] = max(seconds, work / self._cores) if contender.alone else seconds
            self.wrong = (contender, int(rank) - 1) if rank else self.wrong
        self._order = self._order[1:] + self._order[:1]
        self.rounds += 1
        [self.last_round] = largest(self._comms, [time.perf_counter() - begun])
        self.spent += self.last_round
        return together


def timed(work: Callable[[], object], device: torch.device, calls: int = 1) -> Call:
    """Do some work, which is so many calls, and time it on this rank; the clock stops when the GPU is done.

    A core that waits for a GPU counts as idle: what all ranks compute there takes no core's time.
    """
    begun, busy_before = time.perf_counter(), time.process_time()
    work()
    wait_for_gpu(device)
    busy = 0.0 if device.type == "cuda" else time.process_time() - busy_before
    return Call((time.perf_counter() - begun) / calls, busy / calls)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Do some work, and return the seconds it took on this rank; the clock stops when the GPU is done."""
    begun = time.perf_counter()
    work()
    wait_for_gpu(device)
    return time.perf_counter() - begun


def wait_for_gpu(device: torch.device) -> None:
    """Return when a GPU, which works in the background, has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def largest(comms: Comms, numbers: Sequence[float]) -> list[float]:
    """The largest of all ranks' numbers, position by position; so all ranks go on with the same ones."""
    together: list[float] = comms.all_reduce(torch.tensor(numbers, dtype=torch.float64), op="max").tolist()
    return together


def total(comms: Comms, numbers: Sequence[float]) -> list[float]:
    """The sum of all ranks' numbers, position by position."""
    together: list[float] = comms.all_reduce(torch.tensor(numbers, dtype=torch.float64)).tolist()
    return together


# ── training steps ──────────────────────────────────────────────────────────────────────────────────────────────────

WARM_UP = 2  # rounds: buckets are arranged anew after the first step


class Stepper(Contender, Protocol):
    """Something whose training steps are timed."""

    def step(self) -> None:
        """Do one step; all ranks call this."""


S = TypeVar("S", bound=Stepper)


def step_rounds(comms: Comms, steppers: Sequence[S], after_each: Callable[[S], None] = lambda _: None) -> Rounds[S]:
    """Rounds of training steps.

    While the others step, a method's weights leave the caches and its threads go to sleep, which does not happen in a
    training that does nothing else. So each measurement begins with a step that is not timed.

        round 3   ddp ○●   torch-ddp ○●   none ○●   naive ○●      ○ not timed   ● timed
    """
    return Rounds(comms, steppers, partial(_time_step, comms), WARM_UP, after_each)


def _time_step(comms: Comms, stepper: Stepper) -> Call:
    stepper.step()
    wait_for_gpu(comms.device)
    comms.barrier()  # waiting for a late rank is no cost of this method
    return timed(stepper.step, comms.device)


def write_traces(comms: Comms, steppers: Mapping[str, Stepper], folder: str) -> None:
    """Record one more step of each, and write it as a Chrome trace under its name; all ranks call this, rank 0 writes.

    Args:
        comms: the ranks.
        steppers: by name.
        folder: is made if it is not there.
    """
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


# ── memory, and the group of torch's own ────────────────────────────────────────────────────────────────────────────


AGAIN = ", again"  # the same method once more: what lies between a method and itself is chance


def free_memory(comms: Comms) -> float:
    """Free bytes where the ranks' tensors are, on the machine that has least; all ranks call this.

    That is the memory of the GPU which all share, or else main memory; infinite where no machine says.
    """
    on_one_gpu = transport_of(comms) == "cuda"
    free = torch.cuda.mem_get_info(comms.device)[0] if on_one_gpu else available_memory()
    [shortage] = largest(comms, [-math.inf if free is None else -free])
    return -shortage


def require_memory(comms: Comms, need: float, what: str, advice: str) -> None:
    """Refuse, on all ranks alike, what does not fit into a machine's memory; all ranks call this.

    Args:
        comms: the ranks.
        need: bytes that all ranks of a machine need together.
        what: needs them, for the error message.
        advice: what to do about it, for the error message.
    """
    free = free_memory(comms)
    if (comms.device.type == "cpu" or transport_of(comms) == "cuda") and need > free:
        raise UsageError(f"{what} need {show_size(need)} of memory, and {show_size(free)} are free; {advice}")


@contextmanager
def torch_group(comms: Comms) -> Iterator[dist.ProcessGroup]:
    """The group that torch's own talks through: beside shared memory one on gloo, elsewhere the world's own."""
    if not has_gloo_beside(transport_of(comms)):
        yield comms.process_group
        return
    ranks = dist.get_process_group_ranks(comms.process_group)
    group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)
