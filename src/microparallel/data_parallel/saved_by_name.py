"""What autograd saves of parameters whose memory comes and goes: their names, not their memory.

```
forward    layer(x) saves x and W.t()      →  x, and "elements 0:12 of unit 3, with strides (1, 4)"
           unit 3 is let go
backward   unit 3 is gathered again, elsewhere in memory
           layer's backward wants W.t()    →  a view of what was gathered now
```
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from microparallel.data_parallel.unit_reducer import UnitReducer
from microparallel.data_parallel.units import ShardedParameters, Unit
from microparallel.torch_private import enclosing_saved_tensors_hooks, leave_uncompiled, version_of


class SavedByName(saved_tensors_hooks):
    """Within this block autograd saves parameters by name, not by memory: backward finds them where they are then.

    A saved tensor that lies in a gathered unit becomes its place there. When backward asks for it, the unit is gathered
    if it is not whole. Everything else is saved as without this, or as enclosing hooks do it (activation checkpointing,
    for example).
    """

    def __init__(self, reducer: UnitReducer, units: Sequence[Unit]) -> None:
        outer = enclosing_saved_tensors_hooks()
        unit_of = {part: unit for unit in units for part in unit.parts}

        @leave_uncompiled
        def pack(tensor: torch.Tensor) -> Any:
            for part in unit_of:
                gathered = part.gathered
                if gathered is not None and part.has(tensor) and _is_plain(tensor, part):
                    offset = tensor.storage_offset() - gathered.storage_offset()
                    return Saved(part, tensor.size(), tensor.stride(), offset, reducer.now)
            reducer.note_saved(tensor)
            if outer is not None:
                return outer[0](tensor)
            kept = tensor.detach()
            return kept, version_of(tensor)

        @leave_uncompiled
        def unpack(saved: Any) -> torch.Tensor:
            if isinstance(saved, Saved):
                reducer.use_again(unit_of[saved.part], saved.during)
                gathered = saved.part.gathered
                assert gathered is not None
                return gathered.as_strided(saved.size, saved.stride, gathered.storage_offset() + saved.offset)
            if outer is not None:
                unpacked: torch.Tensor = outer[1](saved)
                return unpacked
            kept, version = saved
            if version_of(kept) != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{kept.dtype} {list(kept.shape)} is at version {version_of(kept)}; expected version {version}"
                )
            found: torch.Tensor = kept
            return found

        super().__init__(pack, unpack)


class Saved(NamedTuple):
    """What autograd saves of a parameter: which elements of which gathered tensor, and when."""

    part: ShardedParameters
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    during: Unit | None


def _is_plain(tensor: torch.Tensor, part: ShardedParameters) -> bool:
    """Whether a tensor's size, strides and offset say all about it."""
    return tensor.dtype == part.compute and not tensor.is_conj() and not tensor.is_neg()
