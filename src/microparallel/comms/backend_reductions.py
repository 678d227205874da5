"""torch's reductions, as ours: an operation that ranks perform together, and what each does alone before and after."""

from __future__ import annotations

from typing import Any

import torch

from microparallel.errors import UsageError

_TOGETHER = {
    "SUM": "sum",
    "AVG": "sum",
    "PREMUL_SUM": "sum",
    "PRODUCT": "product",
    "MIN": "min",
    "MAX": "max",
    "BAND": "band",
    "BOR": "bor",
    "BXOR": "bxor",
}
_BITWISE = {"BAND", "BOR", "BXOR"}
_CANNOT_ADD = {torch.uint16, torch.uint32, torch.uint64}


class Reduction:
    """One of torch's reductions, for tensors of one dtype."""

    def __init__(self, op: Any, dtype: torch.dtype, ranks: int) -> None:
        self.name: str = getattr(op, "op", op).name  # a ReduceOp, or only its kind
        self._factor = op.__getstate__()[1] if self.name == "PREMUL_SUM" else None  # op.factor, from 2.13 on
        self._ranks = ranks
        _require_possible(self.name, dtype)
        self.together = _TOGETHER[self.name]

    def before(self, wire: torch.Tensor) -> None:
        """What a rank does to its own contribution."""
        if self._factor is not None:
            wire.mul_(self._factor)

    @property
    def changes_input(self) -> bool:
        """Whether `before` does anything."""
        return self._factor is not None

    def after(self, wire: torch.Tensor) -> None:
        """What a rank does to the result; all do the same, so that they stay bit-identical."""
        if self.name == "AVG":
            wire.div_(self._ranks, rounding_mode=None if wire.is_floating_point() or wire.is_complex() else "trunc")

    @property
    def changes_output(self) -> bool:
        """Whether `after` does anything."""
        return self.name == "AVG"


def _require_possible(name: str, dtype: torch.dtype) -> None:
    integral = not (dtype.is_floating_point or dtype.is_complex)
    if name not in _TOGETHER:
        raise UsageError(f"backend 'microparallel' knows no reduction {name}; choose one of {', '.join(_TOGETHER)}")
    if name in _BITWISE and not integral:
        raise UsageError(f"ReduceOp.{name} works on the bits of integers and bool, not on {dtype}")
    if dtype in _CANNOT_ADD or (dtype.itemsize == 1 and dtype.is_floating_point):
        raise UsageError(f"{dtype} cannot be reduced: torch computes nothing in it; convert the tensor first")
    if dtype == torch.bool and name in ("AVG", "PREMUL_SUM"):
        raise UsageError(f"ReduceOp.{name} of torch.bool is not a bool; convert the tensor first: tensor.float()")
