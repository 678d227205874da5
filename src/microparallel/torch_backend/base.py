"""A group of the torch backend without its collectives: how calls start and finish, devices, names, the end.

torch asks a `ProcessGroup` for much besides collectives. All of that is in `GroupBase`; `group.py` adds the calls.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from microparallel import torch_private
from microparallel.comms.calls import Call, describe
from microparallel.comms.shared_memory import SharedMemoryGroup
from microparallel.comms.work_queue import QueuedWork
from microparallel.errors import DeviceError, UsageError
from microparallel.observe.flight import Flight, agreed_folder
from microparallel.topology import parse_link
from microparallel.topology.hosts import LINK_VARIABLE, among
from microparallel.torch_backend.tensors import (
    Options,
    TorchReduction,
    bring_back,
    copy_over,
    device_of,
    in_words,
    is_copy,
    plain,
    room_for,
    tensors_of,
)
from microparallel.torch_backend.work import CollectiveWork, DroppedWorks, SeveralWorks, StartedWork
from microparallel.torch_private import gloo_group, nccl_group

Method = TypeVar("Method", bound=Callable[..., Any])


# What torch's profiler calls these methods, where that is not like "c10d::allreduce_" for `allreduce`.
_OPERATORS = {
    "all_gather_single": "_allgather_base_",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced_",
    "reduce_scatter_single": "_reduce_scatter_base_",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced_",
    "all_to_all_single": "alltoall_base_",
    "recv_anysource": "recv_any_source_",
    "send": "send",
    "barrier": "barrier",
}


def carried(method: Method) -> Method:
    """Hand a call whose tensors this group does not carry to the backend that the user chose for their device."""
    name = method.__name__
    operator = f"c10d::{_OPERATORS.get(name, f'{name}_')}"

    @functools.wraps(method)
    def dispatch(self: GroupBase, *arguments: Any, **named: Any) -> Any:
        device = device_of(arguments)
        if device is not None and device.type not in self.carries:
            return torch_private.call_on(self.side_of(device), name, *arguments, **named)
        if torch_private.is_profiling():
            with torch_private.profiled_call(operator, tensors_of(arguments)):
                return method(self, *arguments, **named)
        return method(self, *arguments, **named)

    torch_private.leave_uncompiled(dispatch)
    return dispatch  # type: ignore[return-value]


@torch_private.uncompiled
class GroupBase(torch_private.CalledProcessGroup):
    """One rank's place in a group, as torch sees it, without the calls themselves."""

    # What torch asks a backend; `backend_of` returns this object itself.
    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False

    def __init__(self, store: dist.Store, group: SharedMemoryGroup, timeout: timedelta, *, owns_flight: bool) -> None:
        super().__init__(group.rank, group.world_size)
        self._store = store
        self._group = group
        self.carries = group.carries
        group.process_group = self
        self._timeout = timeout
        self._names = ["", ""]
        self._sides: dict[str, dist.ProcessGroup] = {}
        self._together: list[dist.Work] | None = None
        self._dropped = DroppedWorks()
        self._sequence_number = 0
        self._owns_flight = owns_flight

    @property
    def shared_memory(self) -> SharedMemoryGroup:
        """The same group, as `Comms` sees it."""
        return self._group

    # ── how calls are started and finished ──────────────────────────────────────────────────────────────────────

    def _announce(self, options: Options, name: str, content: str, *details: str) -> Call:
        call = in_words(name, content, *details)
        self._group.announce(call.text, options.timeout, call.agreement)
        return call

    def _wire(
        self,
        tensor: torch.Tensor,
        works: list[QueuedWork],
        reduction: TorchReduction | None = None,
        *,
        separate: bool = False,
    ) -> torch.Tensor:
        """What collectives take in place of a caller's tensor; what it takes to fill it joins the works.

        It is filled in its turn: a collective that was called before may still change the tensor.

        Args:
            tensor: the caller's.
            works: of this call.
            reduction: what is done to the tensor `before` ranks communicate.
            separate: whether the caller's tensor must stay as it is.
        """
        wire = room_for(tensor) if separate else plain(tensor)
        changes = reduction is not None and reduction.changes_input
        if not changes and not is_copy(wire, tensor):
            return wire

        def fill() -> None:
            if is_copy(wire, tensor):
                copy_over(tensor, wire)
            if reduction is not None:
                reduction.before(wire)

        works.append(self._group.in_turn(fill))
        return wire

    def _finish(
        self, wires: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], reduction: TorchReduction | None = None
    ) -> list[QueuedWork]:
        """Queue what this rank must do alone when a collective has run, if anything."""
        changes = reduction is not None and reduction.changes_output
        if not changes and not any(is_copy(wire, tensor) for wire, tensor in zip(wires, tensors, strict=True)):
            return []

        def finish() -> None:
            if reduction is not None:
                for wire in wires:
                    reduction.after(wire)
            bring_back(wires, tensors)

        return [self._group.in_turn(finish)]

    def _work(
        self, call: Call, queued: Sequence[QueuedWork], result: Any, options: Options, *, after_backward: bool = False
    ) -> dist.Work:
        self._sequence_number += 1
        entry = self._group.log.collective(call.text, call.agreement, call.size)
        entry.started()
        work = CollectiveWork(self._group, call, entry, queued, result, self._dropped)
        if torch_private.is_profiling():
            work.profile()
        if options.waits and self._together is None:
            work.wait()
            return work
        if after_backward:
            self._group.run_after_backward()
        else:
            self._group.run_in_background()
        return self._remember(work)

    def _remember(self, work: StartedWork) -> dist.Work:
        if self._together is not None:
            self._together.append(work)
        if torch_private.works_may_enter_graphs():
            work.make_known_in_graphs()
        return work

    def _require_one_for_each(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        if len(tensors) != self.size():
            raise UsageError(f"{name}: the list needs one tensor for each of {self.size()} ranks, not {len(tensors)}")

    def _require_alike(self, call: Call, tensors: Sequence[torch.Tensor], like: torch.Tensor) -> None:
        for tensor in tensors:
            if tensor.numel() != like.numel() or tensor.dtype != like.dtype:
                raise UsageError(f"{call}: {describe(tensor)} in the list does not match {describe(like)}")

    def _world_rank(self, rank: int) -> int:
        return self._group.world_ranks[rank]

    # ── calls that are started together ─────────────────────────────────────────────────────────────────────────

    def start_coalescing(self, device: torch.device) -> None:
        """Start the calls from here on together."""
        if device.type not in self.carries:
            torch_private.start_coalescing(self.side_of(device), device)
        else:
            self._together = []

    def end_coalescing(self, device: torch.device) -> dist.Work:
        """All calls since `start_coalescing`, as one."""
        if device.type not in self.carries:
            return torch_private.end_coalescing(self.side_of(device), device)
        works, self._together = self._together or [], None
        return SeveralWorks(works)

    # ── devices ─────────────────────────────────────────────────────────────────────────────────────────────────

    def side_of(self, device: torch.device) -> dist.ProcessGroup:
        """The process group for the tensors of another device, started when it is first needed."""
        backend = _backends_of(self).get(device.type)
        if backend is None:
            raise no_backend_for(device)
        if device.type not in self._sides:
            self._sides[device.type] = self._start_beside(device, backend)
        return self._sides[device.type]

    def _start_beside(self, device: torch.device, backend: str) -> dist.ProcessGroup:
        """A process group for the tensors of one device."""
        # Not the keys that torch itself would use: it may have begun to start this backend and stopped halfway.
        store = dist.PrefixStore(f"{device.type} beside microparallel", self._store)
        if backend == "microparallel":
            return self._on_gpu(device, store)
        if backend == "nccl":
            return nccl_group(device, store, self.rank(), self._group.world_ranks, self._timeout)
        if backend == "gloo":
            return gloo_group(device, store, self.rank(), self._group.world_ranks, self._timeout)
        raise UsageError(
            f"backend 'microparallel' cannot stand beside {backend!r}, only beside nccl and gloo; "
            f"make a group of its own for {device.type}: torch.distributed.new_group(backend={backend!r})"
        )

    def _on_gpu(self, device: torch.device, store: dist.Store) -> dist.ProcessGroup:
        """A group of the same ranks that share a GPU, for its tensors; an error if they do not."""
        raise NotImplementedError

    def devices(self) -> list[torch.device]:
        """The kinds of devices whose tensors this group carries."""
        return [torch.device(device) for device in _backends_of(self) or ("cpu",)]

    def backend_of(self, device: torch.device) -> Any:
        """The backend of a device's tensors: this group itself, or the one beside it."""
        backends, kind = _backends_of(self), torch.device(device).type
        if kind in self.carries or not backends or backends.get(kind) == "microparallel":
            return self
        return torch_private.backend_of(self.side_of(device), device)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether `allocate_tensor` helps."""
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:  # noqa: ARG002
        """A tensor in shared memory: other ranks read it there, without a copy."""
        return self._group.empty((size,), dtype)

    # ── names, timeouts, the end ────────────────────────────────────────────────────────────────────────────────

    def getBackendName(self) -> str:
        """The name that torch knows this backend by."""
        return "microparallel"

    name = getBackendName

    # torch keeps a group's name in its backends, and this group has none besides itself.

    def getGroupName(self) -> str:
        """The name that torch gave this group."""
        return self._names[0]

    def getGroupDesc(self) -> str:
        """The description that `new_group` was given."""
        return self._names[1]

    def setGroupName(self, name: str) -> None:
        """Called by torch when it has made the group."""
        self._names[0] = name

    def setGroupDesc(self, description: str) -> None:
        """Called by torch when it has made the group."""
        self._names[1] = description

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def get_group_store(self) -> dist.Store:
        """The store through which the ranks of this group met."""
        return self._store

    def sequence_number(self) -> int:
        """How many collectives this rank has called in this group."""
        return self._sequence_number

    @property
    def options(self) -> Any:
        """What torch knows of a group's backend besides its name: its timeout, its ranks."""
        return torch_private.backend_options("microparallel", self._timeout, self._group.world_ranks, self._names[0])

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long calls wait for the other ranks from now on."""
        self._timeout = timeout
        self._group.transport.timeout = timeout.total_seconds()

    def split_group(self, *_: Any, **__: Any) -> Any:
        """Refuse: torch splits groups that are bound to a GPU."""
        raise UsageError("backend 'microparallel' does not split groups; call torch.distributed.new_group(ranks)")

    def shutdown(self) -> None:
        """Leave the group; `destroy_process_group` calls this."""
        for side in self._sides.values():
            side.shutdown()
        self._sides.clear()
        self._group.shut_down()
        self._dropped.clear()
        if self._owns_flight:
            self._group.flight.close()

    abort = shutdown


# ── the other half of a mixed group such as "cpu:microparallel,cuda:nccl" ───────────────────────────────────────────


def _backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Which backend the user chose for which device: {"cpu": "microparallel", "cuda": "nccl"}."""
    try:
        config = dist.get_backend_config(group)
    except (AssertionError, TypeError, ValueError, RuntimeError):  # torch is still making this group
        return {}
    pairs = (part.partition(":") for part in config.split(","))
    return {device: backend for device, _, backend in pairs if backend}


def no_backend_for(device: torch.device) -> DeviceError:
    """The error for a tensor on a device that this group does not carry."""
    return DeviceError(
        f"backend 'microparallel' shares the memory of the CPU, and of one GPU that all ranks use; this tensor is on "
        f"{device}; "
        f"call init_process_group('cpu:microparallel,{device.type}:{'nccl' if device.type == 'cuda' else 'gloo'}')"
    )


# ── what a group has from its world: the flight recorder it writes into, and who shares a host ───────────────────────


_given: ContextVar[tuple[Flight, str] | None] = ContextVar("flight and transport", default=None)


@contextmanager
def using(flight: Flight, transport: str) -> Iterator[None]:
    """Within this block, groups that torch makes write into this flight recorder, and use this transport."""
    token = _given.set((flight, transport))
    try:
        yield
    finally:
        _given.reset(token)


def _of_world() -> SharedMemoryGroup | None:
    return getattr(dist.group.WORLD, "shared_memory", None)


def flight_for(store: dist.Store, rank: int, ranks: int) -> tuple[Flight, bool]:
    """The flight recorder of a new group, and whether the group must close it: its world's, or one of its own."""
    if (given := _given.get()) is not None:
        return given[0], False
    if (world := _of_world()) is not None:
        return world.flight, False
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return Flight.open(agreed_folder(store), rank, ranks, ranks_here), True


def transport_for(world_ranks: Sequence[int]) -> str | None:
    """The transport of a new group of these ranks, if its world knows: which of them share a host."""
    if (given := _given.get()) is not None:
        return given[1]
    world = _of_world()
    return None if world is None else among(world.transport_name, world_ranks)


def agreed_link(store: dist.Store, rank: int) -> str:
    """What rank 0's environment says of the network between hosts: all ranks must choose algorithms by the same."""
    if rank == 0:
        store.set("link", os.environ.get(LINK_VARIABLE, ""))
    text = store.get("link").decode()
    if text:
        parse_link(text, f"{LINK_VARIABLE}={text}")
    return text
