"""The other half of a mixed group such as "cpu:microparallel,cuda:nccl": torch's own backends for other devices."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from microparallel.errors import UsageError
from microparallel.torch_private import gloo_group, nccl_group


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Which backend the program chose for which device: {"cpu": "microparallel", "cuda": "nccl"}."""
    try:
        config = dist.get_backend_config(group)
    except (AssertionError, TypeError, ValueError, RuntimeError):  # torch is still making this group
        return {}
    pairs = (part.partition(":") for part in config.split(","))
    return {device: backend for device, _, backend in pairs if backend}


def start(
    device: torch.device, backend: str, store: dist.Store, rank: int, world_ranks: Sequence[int], timeout: timedelta
) -> dist.ProcessGroup:
    """A process group of torch's own for the tensors of one device."""
    # Not the keys that torch itself would use: it may have begun to start this backend, and left it.
    store = dist.PrefixStore(f"{device.type} beside microparallel", store)
    if backend == "nccl":
        return nccl_group(device, store, rank, world_ranks, timeout)
    if backend == "gloo":
        return gloo_group(device, store, rank, world_ranks, timeout)
    raise UsageError(
        f"backend 'microparallel' cannot stand beside {backend!r}, only beside nccl and gloo; "
        f"make a group of its own for {device.type}: torch.distributed.new_group(backend={backend!r})"
    )


def refusal(device: torch.device) -> UsageError:
    """Say why tensors of a device go nowhere in this group."""
    return UsageError(
        f"backend 'microparallel' shares the CPU's memory, and this tensor is on {device}; "
        f"call init_process_group('cpu:microparallel,{device.type}:{'nccl' if device.type == 'cuda' else 'gloo'}')"
    )
