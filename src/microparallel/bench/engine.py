"""How to spend a given time on measurements: what is worth a try, and when it is enough."""

from __future__ import annotations

import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

from microparallel.comms import Comms
from microparallel.comms.record import Recorder
from microparallel.errors import UsageError
from microparallel.program import Add, Op, Part, Program, Recv, Send
from microparallel.text import count, show_size
from microparallel.topology import available_cores, find_placement

if TYPE_CHECKING:
    from microparallel.bench.all_reduce import Method

FEWEST_REPEATS = 5  # a median with a spread needs as many
MOST_REPEATS = 50


class TimeBudget:
    """So many seconds for all sizes together; or, with `repeats`, as long as so many repeats take.

    A larger size gets a larger share: the second four times that of the first, the third nine times. What a size
    leaves over is shared by those after it.
    """

    def __init__(self, seconds: float, sizes: int, repeats: int | None = None) -> None:
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

    def too_slow(self, calls: Mapping[str, float], repeats: int, spent_here: float) -> set[str]:
        """Choose methods to repeat no more at this size, slowest first, so that the others get their fewest repeats.

        Args:
            calls: what a call of each method takes.
            repeats: how many there have been.
            spent_here: what all of them took together.
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
        """Whether to measure this size once more, after so many repeats, if a round takes so long."""
        if self._repeats is not None:
            return repeats < self._repeats
        return repeats < FEWEST_REPEATS or (repeats < MOST_REPEATS and spent_here + next_round < self.share)

    def fraction(self, repeats: int, spent_here: float) -> float:
        """How much of it all is done."""
        if self._repeats is not None:
            return (self._sizes_done + repeats / self._repeats) / self._sizes
        return min(1.0, (self._spent + spent_here) / self._seconds)

    def end_size(self, spent_here: float) -> None:
        """A size is done, after so many seconds."""
        self._spent += spent_here
        self._sizes_done += 1


# A case: one rank's tensors of one size, on which every method has its turn.


_PERIOD = 10_007  # a prime, so that no two slices of a tensor look alike
_EXACT = 256  # whole numbers up to here are exact in every dtype, bfloat16 too
_SMALL = 65_536  # bytes; calls with up to so many are timed in a row
_ROW = 10  # calls


class Case:
    """One rank's tensors of one size: whole numbers, so that their sum is exact in whatever order they are added.

    Attributes:
        contribution: what this rank adds to the sum.
        expected: the sum.
        tensors: ordinary memory, where a method finds the contribution and leaves the sum; one for each call in a row.
        shared: the same in shared memory; where ranks share none, just the tensors.
        scratch: ordinary memory that nobody reads, where ranks share memory.
    """

    def __init__(self, comms: Comms, size: int, dtype: torch.dtype) -> None:
        length = size // dtype.itemsize
        patterns = [_pattern(rank, comms.world_size) for rank in range(comms.world_size)]
        self.contribution = _repeat(patterns[comms.rank].to(comms.device, dtype), length)
        self.expected = _repeat(torch.stack(patterns).sum(0).to(comms.device, dtype), length)
        row = range(calls_in_a_row(size))
        self.tensors = [torch.empty_like(self.contribution) for _ in row]
        shares_memory = transport_of(comms) == "shm"
        self.shared = [comms.empty(length, dtype) for _ in row] if shares_memory else self.tensors
        self.scratch = torch.empty_like(self.contribution) if shares_memory else self.tensors[0]

    def refill(self, tensor: torch.Tensor) -> None:
        """Put this rank's contribution back."""
        tensor.copy_(self.contribution)

    def is_right(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor holds exactly the sum."""
        return torch.equal(tensor, self.expected)


def calls_in_a_row(size: int) -> int:
    """How many calls are timed together.

    What a small call takes by itself, right after the ranks have met, depends on how each of them woke up. A training
    step makes many, one after another.
    """
    return _ROW if size <= _SMALL else 1


def tensors_of_a_case(comms: Comms) -> int:
    """How many tensors of full size a rank keeps."""
    return 5 if transport_of(comms) == "shm" else 3


def transport_of(comms: Comms) -> str:
    """By which transport these ranks talk: "shm", "nccl" or "gloo"."""
    backends = str(dist.get_backend_config(comms.process_group))
    if "nccl" in backends:
        return "nccl"
    return "shm" if "microparallel" in backends else "gloo"


def _pattern(rank: int, ranks: int) -> torch.Tensor:
    """Whole numbers of one rank, so small that the sum over all ranks is exact too."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, max(2, _EXACT // ranks), (_PERIOD,), generator=generator)


def _repeat(pattern: torch.Tensor, length: int) -> torch.Tensor:
    return pattern.repeat(-(-length // len(pattern)))[:length].clone()


# Rounds: one call of every method after another, on tensors of one size, timed and checked.
#
# A shared machine has good moments and bad ones. So the methods take turns, call by call, and each round begins with
# another one: whatever disturbs a minute of the run disturbs all of them alike. Of small calls, each turn has several
# in
# a row, and what counts is their mean.
#
# round 0   torch  ring   tree        warm-up: not counted
# round 1   ring   tree   torch
# round 2   tree   torch  ring


class Rounds:
    """The calls at one size so far: for every method its seconds, each those of the slowest rank.

    A rank that waits for the others has waited for whoever shares its core too. Where ranks do something alone, the
    slowest one's time leaves that out, so then a call takes at least what keeps all cores busy together.
    """

    def __init__(self, comms: Comms, methods: Sequence[Method], case: Case) -> None:
        self.seconds: dict[str, list[float]] = {method.name: [] for method in methods}
        self.counted = 0
        self.spent = self.last_round = 0.0
        self.wrong: tuple[str, int] | None = None  # a method whose result was not the sum, and on which rank
        self._comms = comms
        self._case = case
        self._cores = min(available_cores(), comms.world_size)
        self._order = list(methods)

    def warm_up(self) -> None:
        """A first round, which is not counted: connections, caches and memory are made ready."""
        self._round()

    def one_more(self) -> dict[str, float]:
        """A round that counts; returns what each call took."""
        together = self._round()
        for name, seconds in together.items():
            self.seconds[name].append(seconds)
        self.counted += 1
        return together

    def end(self, name: str) -> None:
        """Leave a method out of the rounds to come."""
        self._order = [method for method in self._order if method.name != name]

    def _round(self) -> dict[str, float]:
        begun = time.perf_counter()
        calls = [time_call(method, self._case) for method in self._order]
        blamed = [0 if call.right else self._comms.rank + 1 for call in calls]
        slowest = largest(self._comms, [*(call.seconds for call in calls), *blamed])
        work = total(self._comms, [call.work for call in calls])
        together = {}
        for method, seconds, all_work, rank in zip(self._order, slowest, work, slowest[len(calls) :], strict=False):
            together[method.name] = max(seconds, all_work / self._cores) if method.alone else seconds
            self.wrong = (method.name, int(rank) - 1) if rank else self.wrong
        self._order = self._order[1:] + self._order[:1]
        [self.last_round] = largest(self._comms, [time.perf_counter() - begun])
        self.spent += self.last_round
        return together


@dataclass(frozen=True)
class Call:
    """A call on this rank: how long it took, how long it kept a core busy, and whether the sum was right."""

    seconds: float
    work: float
    right: bool


def time_call(method: Method, case: Case) -> Call:
    """Call a method, once or some times in a row. All ranks begin together: waiting for a late one is not its cost."""
    tensors = method.tensors_of(case)
    for tensor in tensors:
        case.refill(tensor)
    method.meet()
    begun, work_before = time.perf_counter(), time.process_time()
    for tensor in tensors:
        method.call(tensor, case)
    if tensors[0].is_cuda:  # a GPU works in the background: stop the clock when it is done
        torch.cuda.synchronize(tensors[0].device)
    seconds, work = time.perf_counter() - begun, time.process_time() - work_before
    right = not method.sums or all(case.is_right(tensor) for tensor in tensors)
    return Call(seconds / len(tensors), work / len(tensors), right)


def largest(comms: Comms, numbers: Sequence[float]) -> list[float]:
    """The largest of all ranks' numbers, position by position; so all ranks go on with the same ones."""
    together: list[float] = comms.all_reduce(torch.tensor(numbers, dtype=torch.float64), op="max").tolist()
    return together


def total(comms: Comms, numbers: Sequence[float]) -> list[float]:
    """The sum of all ranks' numbers, position by position."""
    together: list[float] = comms.all_reduce(torch.tensor(numbers, dtype=torch.float64)).tolist()
    return together


# What the benchmarks of training steps have in common: medians and quartiles, and what a reader must know of them.


def quartiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile."""
    median = statistics.median(seconds)
    if len(seconds) == 1:
        return median, median, median
    lower, _, upper = statistics.quantiles(seconds, n=4, method="inclusive")
    return lower, median, upper


def chance_speaks(model: str, counted: int) -> list[str]:
    """Say so where there were few steps."""
    if counted >= FEWEST_REPEATS:
        return []
    steps = count(counted, "step")
    return [f"{model}: {steps} of each method, so chance speaks loudly; more --seconds or --steps would help"]


def cores_are_shared(ranks_here: int, cores: int, device: str) -> list[str]:
    """Say so where ranks take turns on the cores."""
    if ranks_here <= cores or device != "cpu":
        return []
    available = count(cores, "core")
    return [
        f"{ranks_here} ranks share {available} and take turns: times say more about that than about the methods",
    ]


def count_ranks_here() -> int:
    """How many ranks there are on this machine."""
    return find_placement(os.environ).local_world_size


# How much memory is there, and how much would a collective need?


@dataclass(frozen=True)
class MemoryBudget:
    """What the ranks of one machine may take together; None where nobody says how much there is."""

    available: float | None
    ranks: int
    tensors_held: int  # what each rank keeps anyway, in tensors of full size

    def require(self, size: int) -> None:
        """Refuse a size that not even the leanest method has room for."""
        need = self._need(size, 1)
        if self.available is not None and need > self.available:
            raise UsageError(
                f"tensors of {size:,} bytes: {self.ranks} ranks need {show_size(need)} for them, "
                f"and {show_size(self.available)} are free; choose smaller --sizes or fewer --ranks"
            )

    def too_large(self, programs: Iterable[Program], size: int) -> dict[str, str]:
        """Name the programs that need more memory than there is at this size, each with the reason."""
        needs = {program.name: self._need(size, tensors_needed(program)) for program in programs}
        available = self.available
        if available is None:
            return {}
        return {
            name: f"it needs {show_size(need)} of memory, and {show_size(available)} are free"
            for name, need in needs.items()
            if need > available
        }

    def _need(self, size: int, tensors: int) -> float:
        return self.ranks * size * (self.tensors_held + tensors)


def tensors_needed(program: Program) -> int:
    """How many tensors of full size a rank needs beside its own, at most: the parts of others, and one arrival."""
    return 1 + max(len({part for op in ops for part in _parts(op)}) for ops in program.ranks)


def _parts(op: Op) -> list[Part]:
    return [op.value] if isinstance(op, Add | Recv | Send) and isinstance(op.value, Part) else []


def require_memory(comms: Comms, free: float | None, need: float, what: str, advice: str) -> None:
    """Refuse, on all ranks alike, what would not fit into this machine's memory; all ranks call this.

    Args:
        comms: the ranks.
        free: as many bytes as this rank finds free; None where nobody says.
        need: of all ranks of a machine together.
        what: takes so much.
        advice: what to do then.
    """
    [shortage] = largest(comms, [-math.inf if free is None else -free])
    if comms.device.type == "cpu" and need > -shortage:
        raise UsageError(f"{what} need {show_size(need)} of memory, and {show_size(-shortage)} are free; {advice}")


# Time steps of several methods that take turns, so that a shared machine's good and bad moments are shared too.
#
# Each round begins with another method. Between its turns a method's weights have left the caches and its threads have
# gone to sleep, which is not so in a training that does nothing else: each turn therefore begins with a step that is
# not
# counted.
#
# round 1   none ○●   naive ○●   ddp ○●   torch-ddp ○●      ○ not counted
# round 2   naive ○●   ddp ○●   torch-ddp ○●   none ○●      ● counted, as long as on the slowest rank


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
