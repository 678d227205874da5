"""Run a collective program on real tensors: one interpreter for every transport.

It is a generator that yields whatever it must wait for. A rank in its own process waits; ranks that share a process
take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import torch

from microparallel.errors import ProgramError
from microparallel.program import Add, Chunk, Collective, Join, Op, OpenSends, Part, Program, Recv, Send, Value, touch
from microparallel.transport.base import COMPLETE, Loan, Transport, Work

# Messages of a program have a tag of their own, so that they never mix with the caller's.
PROGRAM_TAG = 4

Combine = Callable[[torch.Tensor, torch.Tensor], object]
COMBINE: dict[str, Combine] = {
    "sum": lambda mine, theirs: mine.add_(theirs),
    "product": lambda mine, theirs: mine.mul_(theirs),
    "min": lambda mine, theirs: torch.minimum(mine, theirs, out=mine),
    "max": lambda mine, theirs: torch.maximum(mine, theirs, out=mine),
    "band": lambda mine, theirs: mine.bitwise_and_(theirs),
    "bor": lambda mine, theirs: mine.bitwise_or_(theirs),
    "bxor": lambda mine, theirs: mine.bitwise_xor_(theirs),
}


def slices_of(program: Program) -> int:
    """Into how many slices a collective's tensor is cut."""
    if not isinstance(program.goal, Collective):
        raise ProgramError(f"program {program.name!r} is a {program.goal}, not a collective")
    return program.goal.slices


class Pieces(Protocol):
    """One rank's tensors by the names a program gives them."""

    def __getitem__(self, value: Value) -> torch.Tensor:
        """The memory that a value names."""


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
            if value not in self._parts:
                self._parts[value] = torch.empty_like(self._tensor)
            return self._parts[value]
        raise ProgramError(f"{value} has no place in a collective; it knows chunks and parts")


class Round:
    """Operations that a rank can do together: additions, then sends, then receives.

    A transport may run a rank's messages one after another and end a send only when it is received. So sends are held
    back until their rank would wait anyway, and go together with the receives it waits for.
    """

    def __init__(self) -> None:
        self.adds: list[Add] = []
        self.sends: list[Send] = []
        self.receives: list[Recv] = []
        self._held_back: OpenSends[Send] = OpenSends()  # they read when the round begins

    def takes(self, op: Op) -> bool:
        """Whether an operation can be done in this round, and need not wait until the round has ended."""
        if isinstance(op, Add):
            # It overtakes the sends that are held back, so it must not change what they carry.
            return not self.receives and not self._held_back.conflicts(op)
        if isinstance(op, Send):
            return not self.receives  # it may carry what arrives
        if isinstance(op, Recv):
            if op.reduce and self.sends:
                return True  # it arrives beside its place, and is added there afterwards
            # Receives without sends hold nobody up: those that add to one place take turns rather than more memory.
            elsewhere = not any(touch(op.value, other.value) for other in self.receives)
            return elsewhere and not self._held_back.conflicts(op)
        raise ProgramError(f"{op} is no operation of a collective; it knows Send, Recv and Add")

    def append(self, op: Op) -> None:
        """Do one more operation in this round."""
        if isinstance(op, Add):
            self.adds.append(op)
        elif isinstance(op, Send):
            self.sends.append(op)
            self._held_back.add(op.value, op)
        elif isinstance(op, Recv):
            self.receives.append(op)


def rounds(ops: Iterable[Op]) -> Iterator[Round]:
    """Cut one rank's operations into rounds, in order and as large as they can be.

    ```
    ring          >C0@1 <+C2@2 >C2@1 <+C1@2         →    >C0@1 <+C2@2 | >C2@1 <+C1@2
    gather-add    >C0@1 >C0@2 <P2@2 <P1@1 C0+=P1    →    >C0@1 >C0@2 <P2@2 <P1@1 | C0+=P1
    ```
    """
    current = Round()
    for op in ops:
        if isinstance(op, Join):
            continue  # one thing after another is done here anyway
        if not current.takes(op):
            yield current
            current = Round()
        current.append(op)
    yield current


def perform(steps: Iterable[Round], memory: Pieces, transport: Transport, combine: Combine) -> Iterator[Work]:
    """Do one rank's operations, cut into rounds, in order; yields what must be waited for."""
    under_way: OpenSends[Work] = OpenSends()  # sends that have started and have not been waited for
    for current in steps:
        for add in current.adds:
            yield from _before_writing(add, under_way)
            combine(memory[add.into], memory[add.value])
        if current.sends or current.receives:
            yield from _exchange(current, memory, transport, combine, under_way)
    yield from under_way


def _before_writing(op: Add | Recv, under_way: OpenSends[Work]) -> Mapping[Work, Value]:
    """The sends to wait for before an operation writes: what is being sent must leave first."""
    conflicts = under_way.conflicts(op)
    if conflicts:
        for work, value in conflicts.items():
            under_way.close(value, work)
    return conflicts


def _exchange(
    current: Round, memory: Pieces, transport: Transport, combine: Combine, under_way: OpenSends[Work]
) -> Iterator[Work]:
    """Send and receive what a round has to, together."""
    exchange = transport.exchange(PROGRAM_TAG)
    started = [(send.value, exchange.isend(memory[send.value], send.to)) for send in current.sends]
    arriving: list[tuple[Work, Recv, Loan | None]] = []
    for receive in current.receives:
        if receive.reduce:
            loan = exchange.borrow(memory[receive.value], receive.source)
            arriving.append((loan.work, receive, loan))
        else:
            yield from _before_writing(receive, under_way)  # sends of earlier rounds: this round's are elsewhere
            arriving.append((exchange.irecv(memory[receive.value], receive.source), receive, None))
    exchange.close()
    for value, work in started:
        if work is not COMPLETE:
            under_way.add(value, work)
    for work, receive, lent in arriving:
        yield work
        if lent is not None:
            must_leave = _before_writing(receive, under_way)
            if must_leave:
                lent.keep()  # two ranks that read each other's value and then write to it would wait for each other
                yield from must_leave
            combine(memory[receive.value], lent.tensor)
            lent.give_back()
