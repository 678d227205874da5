"""Make the tensors of torch programs fit for the wire: plain, contiguous memory that may be written to anywhere.

A collective writes behind autograd's back, as those of torch's own backends do: into leaves that require a gradient,
and without marking what autograd has saved as changed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from microparallel.comms.calls import Call, content_bytes, describe
from microparallel.errors import UsageError

_ONE_TENSOR = re.compile(r"\w+\[[\d, ]*\]")  # as `describe` writes it


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a contiguous tensor that autograd does not watch; a copy where that cannot be."""
    if tensor.layout is not torch.strided:
        raise UsageError(f"backend 'microparallel' moves dense tensors, not {tensor.layout}; call .to_dense() first")
    if not tensor.is_cpu:
        raise UsageError(f"backend 'microparallel' was given tensors on the CPU and on {tensor.device} in one call")
    if tensor.is_inference():
        return _same_memory(tensor).contiguous()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.data.contiguous()


def _same_memory(tensor: torch.Tensor) -> torch.Tensor:
    # Tensors made in inference mode may be changed only inside it, and the thread that runs a collective is not.
    memory = torch.empty(0, dtype=tensor.dtype)
    return memory.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def is_copy(wire: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a result in `wire` still has to be brought back to the caller's tensor."""
    return wire.numel() > 0 and wire.data_ptr() != tensor.data_ptr()


def bring_back(wires: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy results to where the caller wants them, as far as they are not there already."""
    for wire, tensor in zip(wires, tensors, strict=True):
        if is_copy(wire, tensor):
            (_same_memory(tensor) if tensor.is_inference() else tensor.data).copy_(wire)


def pieces(tensor: torch.Tensor, sizes: Sequence[int], ranks: int) -> list[torch.Tensor]:
    """One tensor cut along its first dimension, a piece for each rank: equal pieces unless sizes are given."""
    if sizes:
        return list(torch.split(tensor, list(sizes)))
    if tensor.dim() == 0 or tensor.shape[0] % ranks:
        raise UsageError(f"{describe(tensor)} cannot be cut into {ranks} equal pieces along its first dimension")
    return list(torch.split(tensor, tensor.shape[0] // ranks)) if tensor.shape[0] else [tensor] * ranks


def flat_pieces(tensor: torch.Tensor, like: torch.Tensor, ranks: int, call: str) -> list[torch.Tensor]:
    """A contiguous tensor as one piece for each rank, each the size of `like`, whatever its shape."""
    if tensor.numel() != like.numel() * ranks:
        raise UsageError(f"{call}: {describe(tensor)} is not {ranks} times {describe(like)}")
    if tensor.dtype != like.dtype:
        raise UsageError(f"{call}: {describe(tensor)} and {describe(like)} have different dtypes")
    return list(tensor.view(ranks, -1).unbind()) if like.numel() else [tensor.view(-1)] * ranks


def first_tensor(arguments: Iterable[Any]) -> torch.Tensor | None:
    """The first tensor among a call's arguments, which may be lists of lists."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            return argument
        if isinstance(argument, list | tuple) and (found := first_tensor(argument)) is not None:
            return found
    return None


@functools.lru_cache(maxsize=4096)
def in_words(name: str, content: str, *details: str) -> Call:
    """A call as every rank must make it; training makes the same few again and again."""
    size = content_bytes(content) if _ONE_TENSOR.fullmatch(content) else 0
    return Call.of_all(name, content, *details, size=size)
