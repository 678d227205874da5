"""Sparse tensors in the torch backend: what travels of them, and how they are added up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from microparallel.comms.backend_reductions import Reduction
from microparallel.errors import UsageError


def require_sum(tensor: torch.Tensor, op: Any) -> None:
    """Refuse what has no meaning for elements that are not there, and lists that are sparse in part."""
    if tensor.layout is not torch.sparse_coo:
        raise UsageError("all_reduce: some tensors of the list are sparse and some are not; make two calls")
    name = Reduction(op, tensor.dtype, 1).name
    if name != "SUM":
        raise UsageError(f"all_reduce: of sparse tensors there is only the SUM, not {name}; call .to_dense() first")


class Contribution:
    """One rank's sparse tensor, on its way to all ranks, and into which their sum goes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        coalesced = tensor.detach().coalesce()
        self._indices, self._values = coalesced.indices().contiguous(), coalesced.values().contiguous()
        self.count = torch.tensor([len(self._values)])
        self.wires = (self._indices.view(-1), self._values.view(-1))

    def room(self, counts: Sequence[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Where everybody's indices and values are to arrive, flat, given how many each rank has."""
        dimensions, width = self._indices.shape[0], math.prod(self._values.shape[1:])
        indices = [self._indices.new_empty(dimensions * count) for count in counts]
        return indices, [self._values.new_empty(width * count) for count in counts]

    def add_up(self, counts: Sequence[int], indices: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Put the sum into the caller's tensor, coalesced; all ranks add in the same order."""
        dimensions, dense = self._indices.shape[0], self._values.shape[1:]
        rows = [one.view(dimensions, count) for one, count in zip(indices, counts, strict=True)]
        blocks = [one.view(count, *dense) for one, count in zip(values, counts, strict=True)]
        everything = torch.sparse_coo_tensor(
            torch.cat(rows, dim=1),
            torch.cat(blocks),
            self._tensor.shape,
            check_invariants=True,  # what comes from a peer must not reach beyond this rank's memory
        )
        with torch.no_grad():
            self._tensor.copy_(everything.coalesce())
