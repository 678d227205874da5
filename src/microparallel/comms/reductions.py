"""How ranks' tensors are combined: the operations, and the dtypes they are computed in."""

from __future__ import annotations

from typing import get_args

import torch

from microparallel.errors import UsageError
from microparallel.text import did_you_mean
from microparallel.transport.torch_distributed import Reduction

REDUCTIONS = (*get_args(Reduction), "mean")

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


def wire_reduction(op: str) -> Reduction:
    """What the ranks compute together; a mean is a sum that each then divides."""
    return "sum" if op == "mean" else op  # type: ignore[return-value]


def finish_reduction(wire: torch.Tensor, op: str, world_size: int) -> torch.Tensor:
    """What remains to be done by each rank alone. All ranks do the same, so they stay bit-identical."""
    return wire.div_(world_size) if op == "mean" else wire
