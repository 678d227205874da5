"""Run a collective program on real tensors: one interpreter for every transport.

It is a generator that yields whatever it must wait for. A rank in its own process waits; ranks that share a process
take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from microparallel.errors import ProgramError
from microparallel.program import Add, Chunk, Collective, Op, Part, Program, Recv, Send, Value, touch
from microparallel.transport.base import Transport, Work

# Messages of a program have a tag of their own, so that they never mix with the caller's.
PROGRAM_TAG = 4

Combine = Callable[[torch.Tensor, torch.Tensor], object]
COMBINE: dict[str, Combine] = {
    "sum": lambda mine, theirs: mine.add_(theirs),
    "product": lambda mine, theirs: mine.mul_(theirs),
    "min": lambda mine, theirs: torch.minimum(mine, theirs, out=mine),
    "max": lambda mine, theirs: torch.maximum(mine, theirs, out=mine),
}


def slices_of(program: Program) -> int:
    """Into how many slices a collective's tensor is cut."""
    if not isinstance(program.goal, Collective):
        raise ProgramError(f"program {program.name!r} is a {program.goal}, not a collective")
    return program.goal.slices


class Memory:
    """One rank's tensors by the names a program gives them: slices of its own tensor, and others' contributions."""

    def __init__(self, tensor: torch.Tensor, slices: int) -> None:
        self._tensor = tensor.view(-1)
        # Equal slices as far as possible: some are longer by one, and some empty when there are few elements.
        self._bounds = [index * tensor.numel() // slices for index in range(slices + 1)]
        self._parts: dict[Part, torch.Tensor] = {}

    def __getitem__(self, value: Value) -> torch.Tensor:
        """The memory that a value names."""
        if isinstance(value, Chunk):
            return self._tensor[self._bounds[value.start] : self._bounds[value.stop]]
        if isinstance(value, Part):
            return self._parts.setdefault(value, torch.empty_like(self._tensor))
        raise ProgramError(f"{value} has no place in a collective; it knows chunks and parts")


def perform(ops: tuple[Op, ...], memory: Memory, transport: Transport, combine: Combine) -> Iterator[Work]:
    """Do one rank's operations in order; yields what must be waited for."""
    under_way: list[tuple[Value, Work]] = []

    def sends_of(value: Value) -> Iterator[Work]:
        """What is being sent must leave before it is overwritten."""
        for sent, work in under_way:
            if touch(sent, value):
                yield work

    for op in ops:
        if isinstance(op, Send):
            under_way.append((op.value, transport.isend(memory[op.value], op.to, PROGRAM_TAG)))
        elif isinstance(op, Recv) and op.reduce:
            theirs = torch.empty_like(memory[op.value])
            yield transport.irecv(theirs, op.source, PROGRAM_TAG)
            yield from sends_of(op.value)
            combine(memory[op.value], theirs)
        elif isinstance(op, Recv):
            yield from sends_of(op.value)
            yield transport.irecv(memory[op.value], op.source, PROGRAM_TAG)
        elif isinstance(op, Add):
            yield from sends_of(op.into)
            combine(memory[op.into], memory[op.value])
        else:
            raise ProgramError(f"{op} is no operation of a collective; it knows Send, Recv and Add")
    for _, work in under_way:
        yield work
