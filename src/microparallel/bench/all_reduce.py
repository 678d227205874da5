"""How fast could an all-reduce over shared memory be? As fast as memory: the bytes it must touch, and nothing else.

Of p ranks with n bytes each, every one sums up a p-th of the tensor, its piece, and then gets the other pieces, which
the others have summed up. So it reads each byte of the others that it needs exactly once, and waits for nobody:

    add     its piece, with those of the p−1 others       (p−1)/p × n bytes are added
    copy    the p−1 other pieces, when they are sums      (p−1)/p × n bytes are copied

That is all where the tensor lives in shared memory ("in place"). An ordinary tensor is seen by its own rank alone, so
whatever the others need is copied to where they see it as well, another n bytes:

    copy    the others' pieces, before they add them      (p−1)/p × n bytes
    copy    its own piece, when it is the sum                 1/p × n bytes

Here each rank does that in its own ordinary memory, all ranks at once, since they share the memory's bandwidth, and
perhaps cores. No all-reduce that adds and copies in this way is faster, as long as the bytes come from memory. Caches
are the exception. The real one works on a large tensor block by block: what a rank has just written, the next one finds
in the cache, while here the whole tensor has gone by before its first byte is read again. So an all-reduce of tensors
that outgrow the cache can beat the bound, and reach more than 100 % of it. Tensors that fit into the cache are another
matter: here every rank stays in its own core's cache, where an all-reduce must get the bytes out of another's, and has
to wait for it as well.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from microparallel.bench.engine import Case, MemoryBudget, Rounds, TimeBudget, largest, tensors_of_a_case, transport_of
from microparallel.bench.settings import AllReduceSettings, Progress
from microparallel.collectives import all_reduce_program
from microparallel.comms import Comms
from microparallel.program import Program
from microparallel.text import show_size
from microparallel.topology import available_cores, available_memory, find_placement


def touch_in_place(rank: int, ranks: int, tensor: torch.Tensor, case: Case) -> None:
    """Add and copy what an all-reduce of a tensor in shared memory must."""
    pieces, contributions, sums = (_pieces(whole, ranks) for whole in (tensor, case.contribution, case.expected))
    for other in _others(rank, ranks):
        pieces[rank].add_(contributions[other])
    for other in _others(rank, ranks):
        pieces[other].copy_(sums[other])


def touch_ordinary(rank: int, ranks: int, tensor: torch.Tensor, case: Case) -> None:
    """Add and copy what an all-reduce of an ordinary tensor must."""
    pieces, seen_by_others = _pieces(tensor, ranks), _pieces(case.scratch, ranks)
    for other in _others(rank, ranks):
        seen_by_others[other].copy_(pieces[other])
    touch_in_place(rank, ranks, tensor, case)
    seen_by_others[rank].copy_(pieces[rank])


def _pieces(tensor: torch.Tensor, ranks: int) -> tuple[torch.Tensor, ...]:
    """Equal pieces, one for each rank; the few numbers that are left over do not matter to the time."""
    length = tensor.numel() // ranks
    return tensor[: ranks * length].view(ranks, length).unbind()


def _others(rank: int, ranks: int) -> list[int]:
    return [other for other in range(ranks) if other != rank]


# The methods that take turns in a benchmark of all-reduce: what each is called, and what is called for it.
#
# torch             torch.distributed.all_reduce, which the others are measured against
# ring, tree, …     comms.all_reduce(tensor, algorithm=…)
# add               no all-reduce: each rank adds one tensor to another
#
# Where ranks share memory, torch's own runs on a gloo group beside the world, the algorithms run over shared memory,
# and
# there are more:
#
# torch on shm      torch.distributed.all_reduce, with our backend beneath
# shm               comms.all_reduce(tensor), with the algorithm that it chooses itself
# shm, in place     the same, of a tensor that `comms.empty` made
# bound             no all-reduce: the bytes that one must touch, see `memory_bound`
# bound, in place   the same, for a tensor in shared memory


TORCH, ADD = "torch", "add"
TORCH_ON_SHM, SHM, SHM_IN_PLACE = "torch on shm", "shm", "shm, in place"
BOUND, BOUND_IN_PLACE = "bound", "bound, in place"

# What limits each method that goes through shared memory.
BOUNDS = {TORCH_ON_SHM: BOUND, SHM: BOUND, SHM_IN_PLACE: BOUND_IN_PLACE}

Action = Callable[[torch.Tensor, Case], object]


@dataclass(frozen=True)
class Method:
    """Something to be timed, on a case's tensors."""

    name: str
    call: Action
    meet: Callable[[], object]  # how ranks come together before a call: the way it goes itself, which is then awake
    in_place: bool = False  # on tensors in shared memory
    sums: bool = True  # leaves the sum, which is then checked
    alone: bool = False  # no rank waits for another, even where they take turns on a core

    def tensors_of(self, case: Case) -> list[torch.Tensor]:
        """The tensors that it works on, call by call."""
        return case.shared if self.in_place else case.tensors


@contextmanager
def methods_for(comms: Comms, algorithms: Sequence[str]) -> Iterator[list[Method]]:
    """Everything to be timed in this world, with these algorithms; the groups that it takes are closed at the end."""
    named = [Method(name, _run(partial(comms.all_reduce, algorithm=name)), comms.barrier) for name in algorithms]
    add = Method(ADD, lambda tensor, case: tensor.add_(case.contribution), comms.barrier, sums=False)
    if transport_of(comms) != "shm":
        torch_s_own = Method(TORCH, _run(partial(dist.all_reduce, group=comms.process_group)), comms.barrier)
        yield [torch_s_own, *named, add]
        return
    with gloo_beside(comms) as group:
        meet = partial(dist.all_reduce, torch.zeros(1), group=group)
        torch_s_own = Method(TORCH, _run(partial(dist.all_reduce, group=group)), meet)
        yield [torch_s_own, *_over_shared_memory(comms), *named, add]


def _over_shared_memory(comms: Comms) -> list[Method]:
    ours = [
        Method(TORCH_ON_SHM, _run(partial(dist.all_reduce, group=comms.process_group)), comms.barrier),
        Method(SHM, _run(comms.all_reduce), comms.barrier),
        Method(SHM_IN_PLACE, _run(comms.all_reduce), comms.barrier, in_place=True),
    ]
    if comms.world_size == 1:  # nothing to be added, nothing to be copied
        return ours
    place = comms.rank, comms.world_size
    bounds = [
        Method(BOUND, partial(touch_ordinary, *place), comms.barrier, sums=False, alone=True),
        Method(BOUND_IN_PLACE, partial(touch_in_place, *place), comms.barrier, sums=False, alone=True),
    ]
    return [*ours, *bounds]


def _run(all_reduce: Callable[[torch.Tensor], object]) -> Action:
    return lambda tensor, _: all_reduce(tensor)


@contextmanager
def gloo_beside(comms: Comms) -> Iterator[dist.ProcessGroup]:
    """A gloo group of the same ranks, for as long as it is needed."""
    ranks = dist.get_process_group_ranks(comms.process_group)
    group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


@contextmanager
def gloo_for(comms: Comms) -> Iterator[dist.ProcessGroup]:
    """The group that torch's own talks through: beside shared memory one of gloo, elsewhere the world's."""
    if transport_of(comms) == "shm":
        with gloo_beside(comms) as group:
            yield group
    else:
        yield comms.process_group


# Time every all-reduce algorithm and torch's own, side by side, from small tensors to large ones.


@dataclass(frozen=True)
class Timing:
    """The calls of one method at one size, each with the time of the slowest rank; or why there are none."""

    method: str
    size: int
    seconds: tuple[float, ...]
    left_out: str | None = None


@dataclass(frozen=True)
class WrongSum:
    """A method that did not give the sum."""

    method: str
    size: int
    rank: int


@dataclass(frozen=True)
class Measurements:
    """Everything one run measured; it ends at the first wrong result."""

    ranks: int
    ranks_here: int  # on this machine
    cores: int
    transport: str
    device: str
    dtype: str
    timings: tuple[Timing, ...]
    wrong: WrongSum | None = None


def bench_all_reduce(comms: Comms, settings: AllReduceSettings, progress: Progress = lambda *_: None) -> Measurements:
    """Measure all methods at all sizes; every rank calls this, and all get the same numbers."""
    sizes = sorted(set(settings.sizes))
    memory_budget = _memory_budget(comms)
    memory_budget.require(sizes[-1])
    time_budget = TimeBudget(settings.seconds, len(sizes), settings.repeats)
    timings: list[Timing] = []
    wrong = None
    with methods_for(comms, settings.algorithms) as methods:
        bench = _Bench(comms, methods, settings, memory_budget)
        bench.connect()
        for size in sizes:
            measured, wrong = bench.measure(size, time_budget, progress)
            timings += measured
            if wrong is not None:
                break
    return Measurements(
        comms.world_size,
        _ranks_here(),
        available_cores(),
        transport_of(comms),
        comms.device.type,
        settings.dtype,
        tuple(timings),
        wrong,
    )


class _Bench:
    """What stays the same from size to size."""

    def __init__(
        self, comms: Comms, methods: Sequence[Method], settings: AllReduceSettings, memory: MemoryBudget
    ) -> None:
        self._comms = comms
        self._methods = methods
        self._dtype: torch.dtype = getattr(torch, settings.dtype)
        self._programs: list[Program] = [all_reduce_program(name, comms.world_size) for name in settings.algorithms]
        self._memory = memory

    def connect(self) -> None:
        """Make all connections, by the smallest of calls: that may take seconds, and no size shall pay for it."""
        Rounds(self._comms, self._methods, Case(self._comms, self._dtype.itemsize, self._dtype)).warm_up()

    def measure(self, size: int, budget: TimeBudget, progress: Progress) -> tuple[list[Timing], WrongSum | None]:
        """Measure one size for as long as the budget allows; a wrong result ends it."""
        left_out = self._memory.too_large(self._programs, size)
        methods = [method for method in self._methods if method.name not in left_out]
        rounds = Rounds(self._comms, methods, Case(self._comms, size, self._dtype))
        self._fill(rounds, size, budget, progress)
        timings = [
            Timing(method.name, size, tuple(rounds.seconds.get(method.name, ())), left_out.get(method.name))
            for method in self._methods
        ]
        wrong = None if rounds.wrong is None else WrongSum(rounds.wrong[0], size, rounds.wrong[1])
        return timings, wrong

    def _fill(self, rounds: Rounds, size: int, budget: TimeBudget, progress: Progress) -> None:
        may_end_early = {program.name for program in self._programs}
        progress(budget.fraction(0, 0), show_size(size), 0)
        rounds.warm_up()
        while rounds.wrong is None and budget.goes_on(rounds.counted, rounds.spent, rounds.last_round):
            calls = rounds.one_more()
            algorithms = {name: seconds for name, seconds in calls.items() if name in may_end_early}
            for name in budget.too_slow(algorithms, rounds.counted, rounds.spent):
                rounds.end(name)
            progress(budget.fraction(rounds.counted, rounds.spent), show_size(size), rounds.counted)
        budget.end_size(rounds.spent)


def _memory_budget(comms: Comms) -> MemoryBudget:
    """What the ranks of this machine may take, or of the machine that has least."""
    free = available_memory()
    [shortage, ranks] = largest(comms, [-math.inf if free is None else -free, _ranks_here()])
    return MemoryBudget(None if math.isinf(shortage) else -shortage, int(ranks), tensors_of_a_case(comms))


def _ranks_here() -> int:
    return find_placement(os.environ).local_world_size
