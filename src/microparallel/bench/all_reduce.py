"""Time every all-reduce algorithm and torch's own, side by side, from small tensors to large ones.

    torch             torch.distributed.all_reduce, which the others are compared with
    ring, tree, …     comms.all_reduce(tensor, algorithm=…)
    add               no all-reduce: each rank adds one tensor to another

Where ranks share memory, torch's own runs on a gloo group beside the world, the algorithms run over shared memory, and
there are more:

    torch on shm      torch.distributed.all_reduce, with our backend beneath
    shm               comms.all_reduce(tensor), with the algorithm that it chooses itself
    shm, in place     the same, of a tensor that `comms.empty` made
    bound             no all-reduce: the bytes that one must touch, and nothing else (see `touch_ordinary`)
    bound, in place   the same, for a tensor in shared memory

Where ranks share a GPU, each reads the others' tensors where they are, and there are:

    torch on cuda     torch.distributed.all_reduce, with our backend beneath
    torch on nccl     the same on NCCL, to which each rank says that it is on a host of its own
    cuda              comms.all_reduce(tensor), with the algorithm that it chooses itself
    bound             as above, on the GPU; all ranks share its time
    torch, cuda again the same methods once more: how far they are from themselves is chance
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from microparallel.bench.engine import (
    AGAIN,
    Call,
    Measured,
    Rounds,
    TimeBudget,
    Wrong,
    count_ranks_here,
    free_memory,
    largest,
    shares_memory,
    timed,
    torch_group,
    transport_of,
    wait_for_gpu,
    where,
)
from microparallel.bench.gpu_use import gpu_of
from microparallel.bench.other_groups import nccl_group
from microparallel.bench.settings import AllReduceSettings, Progress
from microparallel.collectives import all_reduce_program
from microparallel.comms import Comms
from microparallel.errors import UsageError
from microparallel.program import Add, Op, Part, Program, Recv, Send
from microparallel.text import show_size

TORCH, ADD = "torch", "add"
TORCH_ON_SHM, SHM, SHM_IN_PLACE = "torch on shm", "shm", "shm, in place"
TORCH_ON_CUDA, TORCH_ON_NCCL, CUDA = "torch on cuda", "torch on nccl", "cuda"
BOUND, BOUND_IN_PLACE = "bound", "bound, in place"

# What limits each method that goes through memory which ranks share.
BOUNDS = {
    TORCH_ON_SHM: BOUND,
    SHM: BOUND,
    SHM_IN_PLACE: BOUND_IN_PLACE,
    TORCH_ON_CUDA: BOUND,
    CUDA: BOUND,
    CUDA + AGAIN: BOUND,
}
_WARM_UP = {"cpu": 1, "cuda": 3}  # rounds: a GPU's memory is opened to other ranks when these first read it


@dataclass(frozen=True)
class Timing:
    """The calls of one method at one size, each with the time of the slowest rank; or why there are none."""

    method: str
    size: int
    seconds: tuple[float, ...]
    left_out: str | None = None


@dataclass(frozen=True)
class Measurements(Measured):
    """Everything one run measured; it ends at the first wrong result."""

    dtype: str
    timings: tuple[Timing, ...]
    without: str | None = None  # why NCCL was not measured, where it could have been


def bench_all_reduce(comms: Comms, settings: AllReduceSettings, progress: Progress = lambda *_: None) -> Measurements:
    """Measure all methods at all sizes; every rank calls this, and all get the same numbers."""
    sizes = sorted(set(settings.sizes))
    dtype: torch.dtype = getattr(torch, settings.dtype)
    programs = [all_reduce_program(name, comms.world_size) for name in settings.algorithms]
    [ranks_here] = largest(comms, [count_ranks_here()])
    memory = MemoryBudget(free_memory(comms), int(ranks_here), tensors_of_a_case(comms))
    memory.require(sizes[-1])
    budget = TimeBudget(settings.seconds, len(sizes), settings.repeats)
    timings: list[Timing] = []
    wrong = None
    with _nccl(comms, settings) as nccl, methods_for(comms, settings.algorithms, nccl) as methods:
        # The smallest of calls makes all connections: that may take seconds, and no size shall pay for it.
        rounds_of(comms, methods, Case(comms, dtype.itemsize, dtype)).warm_up()
        for size in sizes:
            left_out = memory.too_large(programs, size)
            rounds = rounds_of(comms, [one for one in methods if one.name not in left_out], Case(comms, size, dtype))
            algorithms = [one for one in methods if one.name in settings.algorithms]
            rounds.fill(budget, lambda part, times, size=size: progress(part, show_size(size), times), algorithms)  # type: ignore[misc]
            timings += [
                Timing(one.name, size, tuple(rounds.seconds.get(one, ())), left_out.get(one.name)) for one in methods
            ]
            if rounds.wrong is not None:
                method, rank = rounds.wrong
                wrong = Wrong(method.name, f"gave a wrong sum on rank {rank}, at {show_size(size)}")
                break
        gpu = gpu_of(comms)
    without = nccl if isinstance(nccl, str) else None
    return Measurements(*where(comms), settings.dtype, tuple(timings), without, wrong=wrong, gpu=gpu)


# ── tensors ─────────────────────────────────────────────────────────────────────────────────────────────────────────

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
        scratch: ordinary memory whose content does not matter, where ranks share memory.
    """

    def __init__(self, comms: Comms, size: int, dtype: torch.dtype) -> None:
        length = size // dtype.itemsize
        patterns = [_pattern(rank, comms.world_size) for rank in range(comms.world_size)]
        self.contribution = _repeat(patterns[comms.rank].to(comms.device, dtype), length)
        self.expected = _repeat(torch.stack(patterns).sum(0).to(comms.device, dtype), length)
        row = range(calls_in_a_row(size))
        self.tensors = [torch.empty_like(self.contribution) for _ in row]
        beside = shares_memory(transport_of(comms))
        self.shared = [comms.empty(length, dtype) for _ in row] if beside else self.tensors
        self.scratch = torch.empty_like(self.contribution) if beside else self.tensors[0]

    def refill(self, tensor: torch.Tensor) -> None:
        """Put this rank's contribution back."""
        tensor.copy_(self.contribution)

    def is_right(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor holds exactly the sum."""
        return torch.equal(tensor, self.expected)


def calls_in_a_row(size: int) -> int:
    """How many calls are timed together.

    The time of a single small call, right after the ranks have met, depends on how each of them woke up. A training
    step makes many, one after another.
    """
    return _ROW if size <= _SMALL else 1


def _pattern(rank: int, ranks: int) -> torch.Tensor:
    """Whole numbers of one rank, so small that the sum over all ranks is exact too."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, max(2, _EXACT // ranks), (_PERIOD,), generator=generator, device="cpu")


def _repeat(pattern: torch.Tensor, length: int) -> torch.Tensor:
    return pattern.repeat(-(-length // len(pattern)))[:length].clone()


# ── methods ─────────────────────────────────────────────────────────────────────────────────────────────────────────

Action = Callable[[torch.Tensor, Case], object]


@dataclass(frozen=True)
class Method:
    """Something to be timed, on a case's tensors.

    Attributes:
        name: as in the table.
        call: does it once, on one tensor.
        meet: brings the ranks together before a call, over the connections of the method itself, which are then awake.
        in_place: it works on tensors in shared memory.
        sums: it leaves the sum, which is then checked.
        alone: no rank waits for another.
    """

    name: str
    call: Action
    meet: Callable[[], object]
    in_place: bool = False
    sums: bool = True
    alone: bool = False

    def tensors_of(self, case: Case) -> list[torch.Tensor]:
        """The tensors that it works on, call by call."""
        return case.shared if self.in_place else case.tensors


def rounds_of(comms: Comms, methods: Sequence[Method], case: Case) -> Rounds[Method]:
    """Rounds in which each method is called on tensors of one size."""
    return Rounds(comms, methods, partial(time_call, case=case), _WARM_UP[comms.device.type])


def time_call(method: Method, case: Case) -> Call:
    """Call a method, once or some times in a row, and check it. All ranks begin together."""
    tensors = method.tensors_of(case)
    for tensor in tensors:
        case.refill(tensor)

    wait_for_gpu(tensors[0].device)  # for the contributions

    def call_all() -> None:
        for tensor in tensors:
            method.call(tensor, case)

    method.meet()
    call = timed(call_all, tensors[0].device, len(tensors))
    return replace(call, right=not method.sums or all(case.is_right(tensor) for tensor in tensors))


def _nccl(comms: Comms, settings: AllReduceSettings) -> AbstractContextManager[dist.ProcessGroup | str | None]:
    """NCCL's group, or why there is none; None where it is not wanted."""
    wanted = settings.with_nccl and transport_of(comms) == "cuda" and comms.world_size > 1
    return nccl_group(comms) if wanted else nullcontext()


@contextmanager
def methods_for(
    comms: Comms, algorithms: Sequence[str], nccl: dist.ProcessGroup | str | None = None
) -> Iterator[list[Method]]:
    """Everything to be timed in this world; the group of torch's own is closed at the end."""
    named = [algorithm_method(comms, name) for name in algorithms]
    transport = transport_of(comms)
    ours = _over_shared_memory(comms) if shares_memory(transport) else _on_one_gpu(comms) if transport == "cuda" else []
    with torch_group(comms) as group:
        meet = partial(dist.all_reduce, torch.zeros(1, device="cpu"), group=group) if ours else comms.barrier
        torchs = Method(TORCH, _run(partial(dist.all_reduce, group=group)), meet)
        others = [replace(torchs, name=TORCH + AGAIN)] if transport == "cuda" else []
        if nccl is not None and not isinstance(nccl, str):
            others.append(_nccl_method(comms, nccl))
        yield [torchs, *others, *ours, *named, add_method(comms)]


def algorithm_method(comms: Comms, name: str) -> Method:
    """`comms.all_reduce` by one algorithm."""
    return Method(name, _run(partial(comms.all_reduce, algorithm=name)), comms.barrier)


def add_method(comms: Comms) -> Method:
    """Each rank adds one tensor to another."""
    return Method(ADD, lambda tensor, case: tensor.add_(case.contribution), comms.barrier, sums=False)


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


def _on_one_gpu(comms: Comms) -> list[Method]:
    """Where every rank reads the others' tensors where they are, a tensor is in place wherever it is."""
    ours = [
        Method(TORCH_ON_CUDA, _run(partial(dist.all_reduce, group=comms.process_group)), comms.barrier),
        Method(CUDA, _run(comms.all_reduce), comms.barrier),
        Method(CUDA + AGAIN, _run(comms.all_reduce), comms.barrier),
    ]
    if comms.world_size == 1:
        return ours
    touch = partial(touch_in_place, comms.rank, comms.world_size)
    return [*ours, Method(BOUND, touch, comms.barrier, sums=False, alone=True)]


def _nccl_method(comms: Comms, group: dist.ProcessGroup) -> Method:
    token = torch.zeros(1, device=comms.device)

    def meet() -> None:
        dist.all_reduce(token, group=group)
        wait_for_gpu(comms.device)

    return Method(TORCH_ON_NCCL, _run(partial(dist.all_reduce, group=group)), meet)


def _run(all_reduce: Callable[[torch.Tensor], object]) -> Action:
    return lambda tensor, _: all_reduce(tensor)


# ── the bound: how fast could an all-reduce over shared memory be? ──────────────────────────────────────────────────
#
# As fast as memory. Of p ranks with n bytes each, every rank sums up a p-th of the tensor, its piece, and then gets the
# other pieces, which the other ranks have summed up. So it reads each byte of the others that it needs exactly once:
#
#     add     its piece, with those of the p−1 others       (p−1)/p × n bytes are added
#     copy    the p−1 other pieces, when they are sums      (p−1)/p × n bytes are copied
#
# That is all where the tensor lives in shared memory ("in place"). An ordinary tensor is seen by its own rank alone, so
# what the others need is copied to where they see it as well, another n bytes:
#
#     copy    the others' pieces, before they add them      (p−1)/p × n bytes
#     copy    its own piece, when it is the sum                 1/p × n bytes
#
# Here each rank does that in its own ordinary memory, all ranks at once, since they share the memory's bandwidth, and
# perhaps cores. No all-reduce that adds and copies in this way is faster, as long as the bytes come from memory. Caches
# are the exception. The real all-reduce works on a large tensor block by block: the next rank finds in the cache what
# one has just written, while here the whole tensor has gone by before its first byte is read again. So an all-reduce of
# tensors that outgrow the cache can reach more than 100 % of the bound. With tensors that fit into the cache it is the
# other way round: here every rank stays in its own core's cache, where an all-reduce must get the bytes out of another
# core's, and has to wait for it as well.


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


# ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class MemoryBudget:
    """What the ranks of one machine may take together.

    Attributes:
        available: free bytes; infinite where the system does not say.
        ranks: on the machine.
        tensors_held: what each rank keeps anyway, in tensors of full size.
    """

    available: float
    ranks: int
    tensors_held: int

    def require(self, size: int) -> None:
        """Refuse a size that not even the leanest method has room for."""
        need = self._need(size, 1)
        if need > self.available:
            raise UsageError(
                f"tensors of {size:,} bytes: {self.ranks} ranks need {show_size(need)} for them, "
                f"and {show_size(self.available)} are free; choose smaller --sizes or fewer --ranks"
            )

    def too_large(self, programs: Iterable[Program], size: int) -> dict[str, str]:
        """Name the programs that need more memory than there is at this size, each with the reason."""
        needs = {program.name: self._need(size, tensors_needed(program)) for program in programs}
        return {
            name: f"it needs {show_size(need)} of memory, and {show_size(self.available)} are free"
            for name, need in needs.items()
            if need > self.available
        }

    def _need(self, size: int, tensors: int) -> float:
        return self.ranks * size * (self.tensors_held + tensors)


def tensors_of_a_case(comms: Comms) -> int:
    """How many tensors of full size a rank keeps."""
    return 5 if shares_memory(transport_of(comms)) else 3


def tensors_needed(program: Program) -> int:
    """How many tensors of full size a rank needs beside its own, at most: the parts of others, and one arrival."""
    return 1 + max(len({part for op in ops for part in _parts(op)}) for ops in program.ranks)


def _parts(op: Op) -> list[Part]:
    return [op.value] if isinstance(op, Add | Recv | Send) and isinstance(op.value, Part) else []
