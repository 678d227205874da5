"""A deferred model is filled: each rank keeps its part of a parameter as soon as that is made, and lets the rest go."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import nn

from microparallel.comms import Comms
from microparallel.data_parallel.units import ShardedParameters
from microparallel.errors import UsageError


class Filling:
    """Takes the contents of a deferred model, one tensor after the other: parameters in parts, buffers whole."""

    def __init__(
        self,
        module: nn.Module,
        places: Mapping[str, tuple[ShardedParameters, int]],
        device: torch.device,
        dtype: torch.dtype | None,
    ) -> None:
        self._module = module
        self._places = places
        self._device = device
        self._dtype = dtype
        self._buffers: dict[str, torch.Tensor] = {}

    def keep(self, name: str, contents: torch.Tensor) -> None:
        """Keep this rank's part of a parameter, or a buffer."""
        if name in self._places:
            part, index = self._places[name]
            part.keep(index, contents)
        else:
            dtype = self._dtype if contents.is_floating_point() else None
            self._buffers[name] = contents.to(self._device, dtype, copy=True)

    def place_buffers(self) -> None:
        """Give the modules their buffers; modules that share one still do."""
        names = {id(buffer): name for name, buffer in self._module.named_buffers()}
        for name, buffer in list(self._module.named_buffers(remove_duplicate=False)):
            owner, _, own_name = name.rpartition(".")
            setattr(self._module.get_submodule(owner), own_name, self._buffers[names[id(buffer)]])


def require_same_numbers(state: torch.Tensor, comms: Comms) -> None:
    """Raise `UsageError`, on every rank, if the ranks have filled a deferred model with different random numbers."""
    mine = torch.frombuffer(bytearray(hashlib.sha256(state.numpy().tobytes()).digest()), dtype=torch.uint8)
    if not all(torch.equal(mine, other) for other in comms.all_gather(mine)):
        raise UsageError(
            "FullyShardedDataParallel: the ranks have built this model from different random numbers, so their parts "
            "do not belong together; call torch.manual_seed with the same number on every rank before the "
            "mp.deferred_init() block"
        )
