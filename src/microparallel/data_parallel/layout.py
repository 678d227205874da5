"""How the parameters of a bucket lie side by side in one flat tensor, and which part of it each rank keeps.

```
a of 20 elements, b of 6, in float64, on 2 ranks: each parameter begins on a cache line of its own, here 8 elements
flat tensor   aaaaaaaaaaaaaaaa│aaaa····bbbbbb··
pieces        rank 0: a[0:16] │ rank 1: a[16:20] b[0:6]

by parameter: whole parameters are given to ranks, balanced by size; parts have different lengths
flat tensor   aaaaaaaaaaaaaaaaaaaa····│bbbbbb··
```

Gradients, parameters and the optimizer's state of a bucket have the same layout, so a rank's part of one belongs to its
part of the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

ALIGNMENT = 64  # bytes: each parameter begins on a cache line of its own

By = Literal["element", "parameter"]


@dataclass(frozen=True)
class Part:
    """Some elements of a tensor: what one rank holds of it.

    ```
    a tensor of shape (2, 3), flattened    0 1 2 3 4 5
    Part(tensor, start=2, shape=(2, 3))        ^^^        where tensor has 3 elements
    ```

    Attributes:
        tensor: the elements, in one dimension.
        start: where they begin in the flattened tensor.
        shape: of the whole tensor.
    """

    tensor: torch.Tensor
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """Where they end in the flattened tensor."""
        return self.start + self.tensor.numel()


@dataclass(frozen=True, slots=True)
class Piece:
    """What lies of one parameter in a rank's part of a bucket.

    Attributes:
        index: the parameter's number in its bucket.
        start: the first element of the flattened parameter that belongs to the piece.
        stop: the first one after it that does not.
        at: where the piece begins in the flat tensor.
    """

    index: int
    start: int
    stop: int
    at: int

    def of(self, flat: torch.Tensor, begin: int = 0) -> torch.Tensor:
        """The piece in a flat tensor, or in a part of one that begins at element `begin`."""
        return flat[self.at - begin : self.at - begin + self.stop - self.start]


class Layout:
    """The places of some parameters in a flat tensor, and the bounds of each rank's part.

    Args:
        parameters: of one dtype; if whole ones are given to ranks, those of a rank stand together, in rank order.
        ranks: how many parts there are.
        owners: the rank of each parameter, if whole parameters are given to ranks.

    Attributes:
        offsets: where each parameter begins.
        bounds: where each rank's part begins, and where the last one ends, which is the length of the flat tensor.
        by_parameter: whether every piece is a whole parameter.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], ranks: int, owners: Sequence[int] | None = None) -> None:
        self.sizes = [parameter.numel() for parameter in parameters]
        self.by_parameter = owners is not None
        self.offsets, stop = offsets(parameters)
        if owners is None:
            step = alignment(parameters[0].dtype)
            length = -(-stop // (ranks * step)) * step
            self.bounds = [rank * length for rank in range(ranks + 1)]
        else:
            ends = [*self.offsets[1:], stop]
            self.bounds = [0]
            for rank in range(ranks):
                mine = [end for end, owner in zip(ends, owners, strict=True) if owner == rank]
                self.bounds.append(mine[-1] if mine else self.bounds[-1])

    @property
    def length(self) -> int:
        """How many elements the flat tensor has."""
        return self.bounds[-1]

    @property
    def is_even(self) -> bool:
        """Whether all parts have the same length."""
        return len({stop - start for start, stop in itertools.pairwise(self.bounds)}) == 1

    def part(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's part of a flat tensor."""
        return flat[self.bounds[rank] : self.bounds[rank + 1]]

    def parts(self, flat: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
        """A flat tensor as collectives take it: whole if its parts are equal, otherwise as a list of them."""
        return flat if self.is_even else [self.part(flat, rank) for rank in range(len(self.bounds) - 1)]

    def pieces(self, rank: int) -> list[Piece]:
        """What lies in a rank's part."""
        first, last = self.bounds[rank], self.bounds[rank + 1]
        found = []
        for index, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            start, stop = max(first - offset, 0), min(last - offset, size)
            if start < stop:
                found.append(Piece(index, start, stop, offset + start))
        return found

    def whole(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """One parameter's elements in a flat tensor, in one dimension."""
        return flat[self.offsets[index] : self.offsets[index] + self.sizes[index]]


def alignment(dtype: torch.dtype) -> int:
    """How many elements fill a cache line."""
    return max(1, ALIGNMENT // dtype.itemsize)


def offsets(parameters: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Where each parameter begins in a flat tensor, and where the last one ends."""
    step = alignment(parameters[0].dtype)
    found, position = [], 0
    for parameter in parameters:
        found.append(position)
        position += -(-parameter.numel() // step) * step
    return found, position


def owners(parameters: Iterable[nn.Parameter], ranks: int) -> dict[nn.Parameter, int]:
    """Give whole parameters to ranks: the largest first, each to the rank that has the least."""
    given: dict[nn.Parameter, int] = {}
    loads = [0] * ranks
    for parameter in sorted(parameters, key=lambda one: -one.nbytes):  # stable, so every rank does the same
        rank = loads.index(min(loads))
        given[parameter] = rank
        loads[rank] += parameter.nbytes
    return given
