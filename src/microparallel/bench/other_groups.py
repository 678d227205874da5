"""Groups of torch's own that can do on one GPU what ours does there: NCCL and gloo, each against its will.

    nccl_group     NCCL refuses two ranks on one GPU, unless they say that they are on different hosts
    StagedGloo     gloo sends and receives main memory alone: tensors of a GPU are copied there, and back

They stand beside our transport in benchmarks. Both are what a person with one GPU has without it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from microparallel.bench.engine import largest
from microparallel.comms import Comms
from microparallel.torch_private import CalledProcessGroup, CalledWork

_HOST = "NCCL_HOSTID"  # NCCL takes ranks with different ones for ranks on different hosts
_PATIENCE = timedelta(seconds=120)  # connections over sockets take NCCL seconds


# ── NCCL ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def nccl_group(comms: Comms) -> Iterator[dist.ProcessGroup | str]:
    """A group of these ranks on NCCL, each on a host of its own as far as NCCL knows; or why there is none.

    All ranks enter and leave it. The variable is set for this block alone, and NCCL reads it once in a process.
    """
    if not dist.is_nccl_available():
        yield "this build of torch comes without NCCL"
        return
    before = os.environ.get(_HOST)
    os.environ[_HOST] = f"microparallel-{comms.rank}"
    groups: list[dist.ProcessGroup] = []
    try:
        problem = _connect(comms, groups)
        yield groups[0] if problem is None else problem
    finally:
        for group in groups:
            dist.destroy_process_group(group)
        if before is None:
            del os.environ[_HOST]
        else:
            os.environ[_HOST] = before


def _connect(comms: Comms, groups: list[dist.ProcessGroup]) -> str | None:
    """Add a group, and let NCCL connect; what it says if it cannot, on any rank."""
    problem = ""
    try:
        ranks = dist.get_process_group_ranks(comms.process_group)
        groups.append(dist.new_group(ranks, timeout=_PATIENCE, backend="nccl", use_local_synchronization=True))
        dist.all_reduce(torch.zeros(1, device=comms.device), group=groups[0])
        torch.cuda.synchronize(comms.device)
    except RuntimeError as error:
        problem = str(error).partition("\n")[0]
    [failed] = largest(comms, [float(bool(problem))])
    return (problem or "it failed on another rank") if failed else None


# ── gloo ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def staged_gloo(comms: Comms) -> Iterator[dist.ProcessGroup]:
    """A group whose messages are copied to main memory and sent by gloo; all ranks enter and leave it."""
    if "staged" not in dist.Backend.backend_list:
        dist.Backend.register_backend("staged", _make, devices=["cpu", "cuda"])
    ranks = dist.get_process_group_ranks(comms.process_group)
    group = dist.new_group(ranks, backend="staged", use_local_synchronization=True)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def _make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> StagedGloo:
    return StagedGloo(store, rank, size, timeout)


class StagedGloo(CalledProcessGroup):
    """Messages between two ranks, by way of pinned main memory; torch's pipelines need no more."""

    supports_splitting = False
    supports_coalescing = False

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._names = {"name": "", "description": ""}

    def send(self, tensors: list[torch.Tensor], to: int, tag: int = 0) -> dist.Work:
        """Copy a tensor to main memory, and start sending the copy."""
        copies = [_host_like(tensor) for tensor in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor.detach(), non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.current_stream(tensors[0].device).synchronize()
        return _Staged(self._gloo.send(copies, to, tag), copies)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> dist.Work:
        """Start receiving into main memory; whoever waits copies it to where it belongs."""
        copies = [_host_like(tensor) for tensor in tensors]
        return _Staged(self._gloo.recv(copies, source, tag), copies, tensors)

    # ── what torch asks of a group ──────────────────────────────────────────────────────────────────────────────

    def getBackendName(self) -> str:
        """What torch calls its kind."""
        return "staged"

    def backend_of(self, device: torch.device) -> StagedGloo:  # noqa: ARG002
        """The group itself."""
        return self

    def devices(self) -> list[torch.device]:
        """Where tensors may be."""
        return [torch.device("cpu"), torch.device("cuda")]

    def setGroupName(self, name: str) -> None:
        """Keep the name that torch gives it."""
        self._names["name"] = name

    def setGroupDesc(self, description: str) -> None:
        """Keep the description that torch gives it."""
        self._names["description"] = description

    @property
    def group_name(self) -> str:
        """The name that torch has given it."""
        return self._names["name"]

    @property
    def group_desc(self) -> str:
        """The description that torch has given it."""
        return self._names["description"]

    def sequence_number(self) -> int:
        """Collectives so far: it has none."""
        return 0


class _Staged(CalledWork):
    """A message under way, with its memory."""

    def __init__(self, work: dist.Work, copies: list[torch.Tensor], into: list[torch.Tensor] | None = None) -> None:
        super().__init__()
        self._work: dist.Work | None = work
        self._copies = copies
        self._into = into

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when it has been sent; or when it has come, and the thread's stream copies it."""
        work, self._work = self._work, None  # to wait twice is to wait for another message, for gloo
        if work is not None:
            _ = work.wait() if timeout is None else work.wait(timeout)
        into, self._into = self._into or [], None
        for copy, tensor in zip(self._copies, into, strict=False):
            tensor.copy_(copy, non_blocking=True)
        return True

    def is_completed(self) -> bool:
        """Whether it needs no waiting."""
        return self._work is None


def _host_like(tensor: torch.Tensor) -> Any:
    """Main memory for such a tensor; pinned, if a GPU is to read or write it."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
