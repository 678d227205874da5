"""The tensors of a collective by the names that its program gives them; large ones block after block.

What one rank has just copied to where the others see it, these then find in the cache, as long as it is not too much. A
tensor that nobody has to copy gains nothing from that, and goes in one piece as soon as everybody knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from microparallel.comms.interpreter import Memory, Pieces
from microparallel.errors import ProgramError
from microparallel.program import Chunk, Value

BLOCK_BYTES = 4 * 2**20  # of what is copied, to be found in the cache

# Given the number of slices, and whether to go on in blocks: the tensors of each block.
Blocks = Callable[[int, Callable[[], bool]], Iterator[Pieces]]


def whole(tensor: torch.Tensor, block_bytes: int | None = BLOCK_BYTES) -> Blocks:
    """One tensor, cut by the program; a large one block after block, or one block and then the rest."""
    flat = tensor.view(-1)
    step = _elements(block_bytes, flat)

    def blocks(slices: int, in_blocks: Callable[[], bool]) -> Iterator[Pieces]:
        if flat.numel() <= step:
            yield Memory(flat, slices)
            return
        yield Memory(flat[:step], slices)
        if not in_blocks():
            yield Memory(flat[step:], slices)
            return
        for start in range(step, flat.numel(), step):
            yield Memory(flat[start : start + step], slices)

    return blocks


def listed(tensors: list[torch.Tensor], block_bytes: int | None = BLOCK_BYTES) -> Blocks:
    """A tensor for each slice, all of one size; large ones block after block."""
    flat = [tensor.view(-1) for tensor in tensors]
    size = flat[0].numel()
    step = _elements(None if block_bytes is None else block_bytes // len(tensors), flat[0])

    def blocks(slices: int, _: Callable[[], bool]) -> Iterator[Pieces]:
        if slices != len(tensors):
            raise ProgramError(f"a program of {slices} slices cannot run on a list of {len(tensors)} tensors")
        for start in range(0, max(1, size), step):
            yield _Listed([tensor[start : start + step] for tensor in flat])

    return blocks


def _elements(block_bytes: int | None, tensor: torch.Tensor) -> int:
    """How many elements of a tensor make a block; None: all of them do."""
    return max(1, tensor.numel() if block_bytes is None else block_bytes // tensor.element_size())


class _Listed:
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, value: Value) -> torch.Tensor:
        if not isinstance(value, Chunk) or len(value) != 1:
            raise ProgramError(f"{value} is not one tensor of a list")
        return self._tensors[value.start]


def personal(inputs: list[torch.Tensor], outputs: list[torch.Tensor], rank: int) -> Blocks:
    """What a rank hands to each of the others, and what it gets from each; all at once."""
    return lambda *_: iter([Personal(inputs, outputs, rank)])


class Personal:
    """One rank's tensors in an all-to-all: those it has for the others, and those it gets from them."""

    def __init__(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor], rank: int) -> None:
        self._inputs = inputs
        self._outputs = outputs
        self._rank = rank

    def __getitem__(self, value: Value) -> torch.Tensor:
        """The tensor for, or from, another rank."""
        if not isinstance(value, Chunk) or len(value) != 1:
            raise ProgramError(f"{value} is nothing that one rank hands to another")
        source, to = divmod(value.start, len(self._inputs))
        return self._inputs[to] if source == self._rank else self._outputs[source]
