"""Make any tensor fit for the wire, and bring what arrives back into it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from microparallel.errors import UsageError


def to_wire(tensor: torch.Tensor, carries: frozenset[str]) -> torch.Tensor:
    """A contiguous tensor with the same values on a device the transport carries; the same memory where possible."""
    wire = tensor.detach()
    _require_strided(tensor)
    if wire.device.type not in carries:
        wire = wire.cpu()  # gloo moves host memory only: a CUDA tensor is staged through it
    return wire.contiguous()


def from_wire(wire: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Copy what arrived into the caller's tensor, unless it arrived there in the first place."""
    if wire.device != tensor.device or wire.data_ptr() != tensor.data_ptr() or wire.dtype != tensor.dtype:
        tensor.detach().copy_(wire)
    return tensor


def empty_on_wire(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, carries: frozenset[str]
) -> torch.Tensor:
    """A fresh tensor to receive into: on its final device where the transport carries that, else on the host."""
    return torch.empty(tuple(shape), dtype=dtype, device=device if device.type in carries else "cpu")


def as_bytes(wire: torch.Tensor) -> torch.Tensor:
    """The same memory as a row of bytes: moving needs no knowledge of dtypes that a backend might lack."""
    # A dimension of size 1 may have any stride in a contiguous tensor, which `view` would stumble over.
    return wire.as_strided((wire.numel(),), (1,)).view(torch.uint8)


def require_writable(tensor: torch.Tensor, call: str) -> None:
    """Refuse to write into a tensor whose elements share memory with each other."""
    _require_strided(tensor)
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise UsageError(
            f"{call} writes into its tensor, and this one of shape {list(tensor.shape)} is expanded: "
            "its elements share memory; pass tensor.clone()"
        )


def _require_strided(tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided:
        raise UsageError(f"a {tensor.layout} tensor of shape {list(tensor.shape)} cannot travel; use tensor.to_dense()")
