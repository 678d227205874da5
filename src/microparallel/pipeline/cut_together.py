"""All ranks cut the model in the same places, or all of them are told why they cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from microparallel.comms import Comms
from microparallel.comms.notes import gather_json
from microparallel.data_parallel.agreement import require_same_model
from microparallel.errors import PartitionError, UsageError
from microparallel.pipeline.cut import cut
from microparallel.pipeline.layers import NamedLayer, layers_of


def cut_together(
    model: nn.Module | Sequence[nn.Module], stages: int, balance: str | Sequence[int], example: Any, comms: Comms
) -> list[list[NamedLayer]]:
    """Cut a model into stages; where layers are measured, rank 0's measurement counts."""
    layers = layers_of(model)
    if comms.world_size > 1:
        require_same_model(nn.ModuleList(layer.module for layer in layers), comms)
    if balance != "time" or comms.world_size == 1:
        return cut(model, stages, balance, example)
    found: list[int] | str = []
    if comms.rank == 0:
        try:
            found = [len(part) for part in cut(model, stages, balance, example)]
        except UsageError as error:
            found = str(error)
    measured: list[int] | str = gather_json(found, comms)[0]
    if isinstance(measured, str):
        raise PartitionError(measured)
    return cut(model, stages, measured)
