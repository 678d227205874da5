"""Descriptions of tensors that a receiver cannot know: dtype and shape as a row of integers."""

from __future__ import annotations

import torch

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
