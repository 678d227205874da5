"""The methods that take turns in a benchmark of all-reduce: what each is called, and what is called for it.

    torch             torch.distributed.all_reduce, which the others are measured against
    ring, tree, …     comms.all_reduce(tensor, algorithm=…)
    add               no all-reduce: each rank adds one tensor to another

Where ranks share memory, torch's own runs on a gloo group beside the world, the algorithms run over shared memory, and
there are more:

    torch on shm      torch.distributed.all_reduce, with our backend beneath
    shm               comms.all_reduce(tensor), with the algorithm that it chooses itself
    shm, in place     the same, of a tensor that `comms.empty` made
    bound             no all-reduce: the bytes that one must touch, see `memory_bound`
    bound, in place   the same, for a tensor in shared memory
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from microparallel.comms import Comms
from microparallel.performance.case import Case, transport_of
from microparallel.performance.memory_bound import touch_in_place, touch_ordinary

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
