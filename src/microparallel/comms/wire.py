"""What travels between ranks: any tensor as plain bytes, the description of a tensor, and small JSON values.

A tensor goes out in three steps: `to_wire` makes it contiguous, on a device that the transport carries; `as_bytes`
makes it a row of bytes; `from_wire` copies what has arrived back into the caller's tensor. Where that is the same
memory, nothing is copied. What a reduction does to the tensors on their way stands below.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

import torch

from microparallel.errors import UsageError
from microparallel.text import did_you_mean
from microparallel.transport.torch_distributed import ReduceOpName

if TYPE_CHECKING:
    from microparallel.comms.comms import Comms


def to_wire(tensor: torch.Tensor, carries: frozenset[str]) -> torch.Tensor:
    """A contiguous tensor with the same values on a device the transport carries; the same memory where possible."""
    wire = tensor.detach()
    _require_strided(tensor)
    if wire.device.type not in carries:  # what moves host memory only: a GPU's tensor is staged through it
        return on_host(wire).copy_(wire)
    return wire.contiguous()


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Room for a tensor in the host's memory: pinned for one of a GPU, which copies to and from it many times faster.

    torch keeps pinned memory that was freed, and hands it out again when the GPU is done with it.
    """
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)


def as_bytes(wire: torch.Tensor) -> torch.Tensor:
    """The same memory as a row of bytes: so a backend moves dtypes that it does not know."""
    # A dimension of size 1 may have any stride in a contiguous tensor, which `view` would stumble over.
    return wire.as_strided((wire.numel(),), (1,)).view(torch.uint8)


def from_wire(wire: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Copy what arrived into the caller's tensor, unless it arrived there in the first place."""
    if wire.device != tensor.device or wire.data_ptr() != tensor.data_ptr() or wire.dtype != tensor.dtype:
        tensor.detach().copy_(wire)  # the host waits: which stream reads the tensor next is not known here
    return tensor


def empty_on_wire(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, carries: frozenset[str]
) -> torch.Tensor:
    """A fresh tensor to receive into: on its final device where the transport carries that, else on the host."""
    return torch.empty(tuple(shape), dtype=dtype, device=device if device.type in carries else "cpu")


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


# ── headers: dtype and shape of a tensor that its receiver cannot know ──────────────────────────────────────────────

_DTYPES = sorted((dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)), key=str)
_DTYPES = list(dict.fromkeys(_DTYPES))  # torch has several names for some of them
_MOST_DIMENSIONS = 64  # torch's own limit


def write_headers(tensors: list[torch.Tensor], count: int) -> torch.Tensor:
    """One row for each tensor: dtype, number of dimensions, sizes. All zero where there are no tensors yet."""
    headers = torch.zeros(count, 2 + _MOST_DIMENSIONS, dtype=torch.int64, device="cpu")
    for row, tensor in zip(headers, tensors, strict=False):
        values = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
        row[: len(values)] = torch.tensor(values, device="cpu")
    return headers


def read_headers(headers: torch.Tensor) -> list[tuple[torch.dtype, torch.Size]]:
    """The dtype and shape that each row describes."""
    rows: list[list[int]] = headers.tolist()
    return [(_DTYPES[row[0]], torch.Size(row[2 : 2 + row[1]])) for row in rows]


# ── reductions: which there are, and in which dtype the backends compute them ───────────────────────────────────────

REDUCTIONS = (*get_args(ReduceOpName), "mean")

# Some dtypes the backends cannot add: these stand in. Narrower integers wrap around when they are cast back, exactly
# as if they had been added in their own dtype, and any non-zero count is True.
_STAND_INS = {
    torch.bool: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}
_NATIVE = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.complex64,
    torch.complex128,
}


def check_reduction(op: str, dtype: torch.dtype, call: str) -> None:
    """Refuse what cannot be computed, with the reason."""
    if op not in REDUCTIONS:
        raise UsageError(f"{call}: there is no reduction {op!r}; {did_you_mean(str(op), REDUCTIONS)}")
    if dtype not in _NATIVE and dtype not in _STAND_INS:
        raise UsageError(f"{call}: {dtype} cannot be reduced; convert the tensor first, for example tensor.float()")
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise UsageError(f"{call}: the mean of {dtype} is not an integer; convert the tensor first: tensor.float()")
    if dtype.is_complex and op not in ("sum", "mean"):
        raise UsageError(f"{call}: complex numbers have no {op} across ranks; only sum and mean")


def stand_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the backends can reduce tensors of this one."""
    return _STAND_INS.get(dtype, dtype)


def wire_reduction(op: str) -> ReduceOpName:
    """What the ranks compute together; a mean is a sum that each rank then divides."""
    return "sum" if op == "mean" else op  # type: ignore[return-value]


def finish_reduction(wire: torch.Tensor, op: str, world_size: int) -> torch.Tensor:
    """What each rank does alone afterwards. All ranks do the same, so their results stay bit-identical."""
    return wire.div_(world_size) if op == "mean" else wire


# ── small values ────────────────────────────────────────────────────────────────────────────────────────────────────


def gather_json(value: Any, comms: Comms) -> list[Any]:
    """Every rank's value on every rank, as JSON: nothing that comes from a peer is ever unpickled."""
    text = json.dumps(value).encode()
    longest = int(comms.all_reduce(torch.tensor(len(text), device="cpu"), op="max").item())
    padded = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8)
    return [json.loads(part.numpy().tobytes()) for part in comms.all_gather(padded)]
