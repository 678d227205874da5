"""The whole model's state, of which each rank of a pipeline has a part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from microparallel.comms import Comms
from microparallel.comms.notes import gather_json
from microparallel.errors import UsageError
from microparallel.pipeline.layers import NamedLayer
from microparallel.program import NORM, AllReduce


def own_state(layers: Iterable[NamedLayer]) -> dict[str, torch.Tensor]:
    """The parameters and buffers of some layers, by their names in the whole model."""
    return {layer.whole_name(name): tensor for layer in layers for name, tensor in layer.module.state_dict().items()}


def gather_state(mine: Mapping[str, torch.Tensor], row: Comms) -> dict[str, torch.Tensor] | None:
    """Collect everybody's part on the first rank of a pipeline; None on the others. All of its ranks call this."""
    contents = [[name, str(tensor.dtype).removeprefix("torch."), tensor.shape] for name, tensor in mine.items()]
    everybody = gather_json(contents, row)
    if row.rank != 0:
        for tensor in mine.values():
            row.send_tensor(tensor, 0)
        return None
    whole = dict(mine)
    for rank, theirs in enumerate(everybody[1:], start=1):
        for name, dtype, shape in theirs:
            whole[name] = row.recv_tensor(shape, rank, getattr(torch, dtype))
    return whole


def load_own_part(layers: Iterable[NamedLayer], state: Mapping[str, torch.Tensor]) -> None:
    """Take what some layers need out of the state of the whole model."""
    for layer in layers:
        own = {}
        for name in layer.module.state_dict():
            whole_name = layer.whole_name(name)
            if whole_name not in state:
                raise UsageError(
                    f"load_state_dict: {whole_name} is missing; it needs the state of the whole model, or of the same "
                    "stages"
                )
            own[name] = state[whole_name]
        layer.module.load_state_dict(own)


def clip_gradients(
    parameters: Iterable[nn.Parameter], counted: Iterable[nn.Parameter], most: float, row: Comms
) -> torch.Tensor:
    """Scale gradients so that the norm of all ranks' gradients together is at most `most`; returns what it was.

    Args:
        parameters: of this rank: their gradients are scaled.
        counted: those that count here; what two ranks share counts on one.
        most: the largest norm.
        row: the ranks of the pipeline.
    """
    gradients = [parameter.grad for parameter in counted if parameter.grad is not None]
    square = sum((gradient.double().square().sum() for gradient in gradients), torch.zeros((), dtype=torch.float64))
    norm = row.all_reduce(square.cpu().reshape(1), operation=AllReduce(NORM, "pp")).sqrt().reshape(())
    factor = most / (float(norm) + 1e-6)  # as torch does
    if factor < 1:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
    return norm
