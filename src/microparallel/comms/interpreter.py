"""Run a collective program on real tensors: one interpreter for every transport.

Each rank's operations are cut into rounds, once (`RankProgram`). `perform` does the rounds, on tensors that the program
knows by name (`Pieces`). It is a generator that yields each transfer it must wait for: a rank in its own process waits;
ranks that share a process go on with another rank.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from microparallel.collectives import GroupKind, program_of
from microparallel.errors import ProgramError
from microparallel.program import Add, Collective, Join, Op, OpenSends, Part, Program, Recv, Send, Slices, Value, touch
from microparallel.transport.base import COMPLETE, Exchange, Loan, Transport, Work, together

# Messages of a program have a tag of their own, so that they never mix with the caller's.
PROGRAM_TAG = 4

Writing = TypeVar("Writing", Add, Recv)
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
_SUMMED_WIDE = frozenset({torch.float16, torch.bfloat16})

# ── one rank's program, cut into rounds ─────────────────────────────────────────────────────────────────────────────


class RankProgram:
    """What one rank does in a collective's program: built once, and performed again and again."""

    # Of a program that all ranks know by its name: what all of them do, and which of them this one is.
    whole: Program | None = None
    rank = 0

    def __init__(self, name: str, slices: int, ops: Sequence[Op], *, all_receive_from_all: bool = False) -> None:
        self.name = name
        self.slices = slices
        self.rounds: tuple[Round, ...] = tuple(rounds(ops))
        self.all_receive_from_all = all_receive_from_all  # whether every rank receives from every other
        # Whether it adds to what others may still read, and so would wait for them unless they read a copy.
        self.adds_to_sent = any(
            any(add.after for add in one.adds) or any(write.after for write in one.receives if write.op.reduce)
            for one in self.rounds
        )
        written = [op.value if isinstance(op, Recv) else op.into for op in ops if isinstance(op, Recv | Add)]
        # The slices of this rank's tensor that are changed.
        self.written = frozenset(index for value in written if isinstance(value, Slices) for index in value.slices)

    @classmethod
    def of(cls, program: Program, rank: int) -> RankProgram:
        """What one rank does in a program."""
        everyone = set(range(program.world_size))
        sources_of = [{op.source for op in ops if isinstance(op, Recv)} for ops in program.ranks]
        all_receive_from_all = all(sources == everyone - {own} for own, sources in enumerate(sources_of))
        return cls(program.name, slices_of(program), program.ranks[rank], all_receive_from_all=all_receive_from_all)


# How a collective runs: by the algorithm that is named, by what "auto" stands for, or by the caller's own program.
Algorithm = str | RankProgram


@functools.lru_cache(maxsize=1024)
def rank_program(collective: GroupKind, algorithm: str, ranks: int, rank: int, root: int | None = None) -> RankProgram:
    """What one rank does in a collective by one of its algorithms."""
    program = RankProgram.of(program_of(collective, algorithm, ranks, root), rank)
    program.whole, program.rank = program_of(collective, algorithm, ranks, root), rank
    return program


def slices_of(program: Program) -> int:
    """Into how many slices a collective's tensor is cut."""
    if not isinstance(program.goal, Collective):
        raise ProgramError(f"program {program.name!r} is a {program.goal}, not a collective")
    return program.goal.slices


class Write(NamedTuple, Generic[Writing]):
    """An operation that writes.

    Attributes:
        op: the operation.
        after: the sends that still read there: by their number among all sends of the rank.
        once: whether it is a receive, and nothing else is ever written there.
    """

    op: Writing
    after: tuple[int, ...]
    once: bool = False


class Round:
    """Operations that a rank can do together: additions, then sends, then receives.

    A transport may run a rank's messages one after another and end a send only when it is received. So sends are held
    back until their rank would wait anyway, and go together with the receives it waits for.

    Args:
        first: how many sends the rank has begun before.
    """

    def __init__(self, first: int = 0) -> None:
        self.adds: list[Write[Add]] = []
        self.sends: list[Send] = []
        self.receives: list[Write[Recv]] = []
        self.first = first

    def takes(self, op: Op, after: Collection[int]) -> bool:
        """Whether an operation can be done in this round, and need not wait until the round has ended."""
        reads_here = any(number >= self.first for number in after)  # a send of this round reads when the round begins
        if isinstance(op, Add):
            # It overtakes the sends that are held back, so it must not change what they carry.
            return not self.receives and not reads_here
        if isinstance(op, Send):
            return not self.receives  # it may carry what arrives
        if isinstance(op, Recv):
            if op.reduce and self.sends:
                return True  # it arrives beside its place, and is added there afterwards
            # Without sends in this round no other rank waits for it: so receives that add to one place come one after
            # another, in rounds of their own, rather than take more memory.
            elsewhere = not any(touch(op.value, other.op.value) for other in self.receives)
            return elsewhere and not reads_here
        raise ProgramError(f"{op} is no operation of a collective; it knows Send, Recv and Add")


def rounds(ops: Iterable[Op]) -> Iterator[Round]:
    """Cut one rank's operations into rounds, in order and as large as they can be.

    ```
    ring          >C0@1 <+C2@2 >C2@1 <+C1@2         →    >C0@1 <+C2@2 | >C2@1 <+C1@2
    gather-add    >C0@1 >C0@2 <P2@2 <P1@1 C0+=P1    →    >C0@1 >C0@2 <P2@2 <P1@1 | C0+=P1
    ```
    """
    ops = list(ops)
    received = Counter(op.value for op in ops if isinstance(op, Recv))
    added_to = {op.into for op in ops if isinstance(op, Add)} | {
        op.value for op in ops if isinstance(op, Recv) and op.reduce
    }
    current = Round()
    sent = 0
    reading: OpenSends[int] = OpenSends()  # the sends, by their number, that no write has waited for yet
    for op in ops:
        if isinstance(op, Join):
            continue  # one thing after another is done here anyway
        conflicts = reading.conflicts(op) if isinstance(op, Add | Recv) else {}
        if not current.takes(op, conflicts):
            yield current
            current = Round(sent)
        for number, value in conflicts.items():
            reading.close(value, number)
        if isinstance(op, Add):
            current.adds.append(Write(op, tuple(conflicts)))
        elif isinstance(op, Recv):
            once = isinstance(op.value, Part) and received[op.value] == 1 and op.value not in added_to
            current.receives.append(Write(op, tuple(conflicts), once))
        elif isinstance(op, Send):
            current.sends.append(op)
            reading.add(op.value, sent)
            sent += 1
    yield current


# ── its operations, done ────────────────────────────────────────────────────────────────────────────────────────────


def perform(
    steps: Iterable[Round], memory: Pieces, transport: Transport, combine: Combine, tag: int = PROGRAM_TAG
) -> Iterator[Work]:
    """Do one rank's operations, cut into rounds, in order; yields what must be waited for."""
    under_way: dict[int, Work] = {}  # sends that have started and have not been waited for, by their number
    sums = Sums(memory, combine)
    for current in steps:
        for add, after, _ in current.adds:
            yield from _sends_in_the_way(after, under_way)
            sums.add(add.into, sums.to_add(add.value))
        if current.sends or current.receives:
            yield from _exchange(current, sums, transport.exchange(tag), under_way)
    sums.finish()
    yield from together(list(under_way.values()))


def _sends_in_the_way(after: tuple[int, ...], under_way: dict[int, Work]) -> Iterator[Work]:
    """The sends to wait for before a write: what is being sent must leave first."""
    return together([under_way.pop(number) for number in after if number in under_way])


def _exchange(current: Round, sums: Sums, exchange: Exchange, under_way: dict[int, Work]) -> Iterator[Work]:
    """Send and receive what a round has to, together."""
    for number, send in enumerate(current.sends, current.first):
        work = exchange.isend(sums[send.value], send.to)
        if work is not COMPLETE:
            under_way[number] = work
    arriving: list[tuple[Work, Write[Recv], Loan | None]] = []
    for write in current.receives:
        receive, after, _ = write
        if receive.reduce or exchange.lends(receive.source):
            loan = exchange.borrow(sums.memory.like(receive.value), receive.source)
            arriving.append((loan.work, write, loan))
        else:
            yield from _sends_in_the_way(after, under_way)  # of earlier rounds: this round's are elsewhere
            arriving.append((exchange.irecv(sums[receive.value], receive.source), write, None))
    exchange.close()
    yield from _work_on(arriving, sums, under_way, at_once=exchange.at_once)


def _work_on(
    arriving: Sequence[tuple[Work, Write[Recv], Loan | None]], sums: Sums, under_way: dict[int, Work], *, at_once: bool
) -> Iterator[Work]:
    """Add or copy what arrives to its place."""
    if at_once:
        overwritten = [number for _, (receive, after, _), _ in arriving if not receive.reduce for number in after]
        in_the_way = _sends_in_the_way(tuple(overwritten), under_way)
        yield from together([*(work for work, _, _ in arriving), *in_the_way])
    for work, (receive, after, once), lent in arriving:
        if not at_once:
            yield work
        if lent is None:
            continue
        in_the_way = _sends_in_the_way(after, under_way)
        if receive.reduce:
            for before in in_the_way:
                lent.keep()  # two ranks that read each other's value and then write to it would wait for each other
                yield before
            sums.add(receive.value, lent.tensor)
        else:
            yield from in_the_way
            if once and lent.copied and sums.lend(receive.value, lent):
                continue
            sums[receive.value].copy_(lent.tensor)
        lent.give_back()


class Sums:
    """Combines tensors in place; sums of 16-bit numbers are made in float32, and rounded when they are next sent.

    ```
    direct    >C1@1 <+C0@1 <+C0@2 | >C0@1 …        C0 is rounded once: when it is sent
    ring      >C0@1 <+C2@2 | >C2@1 <+C1@2 | …      each partial sum is rounded, since each is sent
    ```

    A sum that is still in float32 is written back when its place is sent or received into, or when the program ends.
    Sends that read the place have been waited for before the first addition, so no peer sees the rounding.

    Args:
        memory: the tensors, by the names that the program gives them.
        combine: what is done with two of them.
    """

    def __init__(self, memory: Pieces, combine: Combine) -> None:
        self.memory = memory
        self._combine = combine
        self._wide: dict[Value, torch.Tensor] = {}  # sums that have not been rounded
        self._loans: list[Loan] = []

    def __getitem__(self, value: Value) -> torch.Tensor:
        """The memory that a value names, with all that was added to it."""
        for place in [place for place in self._wide if touch(place, value)]:
            self.memory[place].copy_(self._wide.pop(place))
        return self.memory[value]

    def to_add(self, value: Value) -> torch.Tensor:
        """A value that is only added to another: it need not be rounded for that."""
        wide = self._wide.get(value)
        return self[value] if wide is None else wide

    def add(self, into: Value, tensor: torch.Tensor) -> None:
        """Combine a tensor with the value of this name."""
        mine = self.memory[into]
        if mine.dtype not in _SUMMED_WIDE or self._combine is not COMBINE["sum"]:
            self._combine(mine, tensor)
        elif into in self._wide:
            self._wide[into].add_(tensor)
        else:
            self._wide[into] = self[into].float().add_(tensor)

    def settle(self, value: Value) -> None:
        """See to it that the memory that a value names holds all that was added to it."""
        if self._wide:
            self[value]

    def lend(self, value: Value, loan: Loan) -> bool:
        """Read what was borrowed where it lies, instead of in memory of this rank; whether that can be done."""
        if not self.memory.lend(value, loan.tensor):
            return False
        self._loans.append(loan)
        return True

    def finish(self) -> None:
        """Write back the sums that are still in float32, and give back what was lent."""
        for place, wide in self._wide.items():
            self.memory[place].copy_(wide)
        self._wide.clear()
        for loan in self._loans:
            loan.give_back()


# ── the tensors of a collective, by the names that its program gives them ───────────────────────────────────────────


class Pieces(Protocol):
    """One rank's tensors by the names a program gives them."""

    def __getitem__(self, value: Value) -> torch.Tensor:
        """The memory that a value names."""

    def like(self, value: Value) -> torch.Tensor:
        """A tensor of the size and dtype of what a value names."""
        return self[value]

    def lend(self, value: Value, tensor: torch.Tensor) -> bool:  # noqa: ARG002
        """Let a value name this tensor, which is gone when the program ends; whether that can be done."""
        return False


class Memory(Pieces):
    """Pieces of one tensor: its slices, and other ranks' contributions to it."""

    def __init__(self, tensor: torch.Tensor, slices: int) -> None:
        self.tensor = tensor.view(-1)
        self._sizes = _sizes(tensor.numel(), slices)
        self._cut: tuple[torch.Tensor, ...] | None = None  # into slices, when one is asked for
        self._parts: dict[Part, torch.Tensor] = {}

    def __getitem__(self, value: Value) -> torch.Tensor:
        """The memory that a value names."""
        if isinstance(value, Slices):
            start, stop = value.start, value.stop
            if stop - start == len(self._sizes):
                return self.tensor
            if stop - start == 1:
                self._cut = self._cut or self.tensor.split_with_sizes(self._sizes)
                return self._cut[start]
            return self.tensor[sum(self._sizes[:start]) : sum(self._sizes[:stop])]
        if isinstance(value, Part):
            if value not in self._parts:
                self._parts[value] = torch.empty_like(self.tensor)
            return self._parts[value]
        raise ProgramError(f"{value} has no place in a collective; a collective has slices (C0) and parts (P0)")

    def like(self, value: Value) -> torch.Tensor:
        """A tensor of the size and dtype of what a value names."""
        return self.tensor if isinstance(value, Part) else self[value]

    def lend(self, value: Value, tensor: torch.Tensor) -> bool:
        """Let a part name a tensor that lies elsewhere."""
        if not isinstance(value, Part):
            return False
        self._parts[value] = tensor
        return True


@functools.lru_cache(maxsize=4096)
def _sizes(elements: int, slices: int) -> list[int]:
    """Equal slices as far as possible: some are longer by one, and some empty when there are few elements."""
    bounds = [index * elements // slices for index in range(slices + 1)]
    return [stop - start for start, stop in pairwise(bounds)]


class _Listed(Pieces):
    """A list of tensors, one for each slice."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, value: Value) -> torch.Tensor:
        if not isinstance(value, Slices) or len(value) != 1:
            raise ProgramError(f"{value} is not one tensor of a list")
        return self._tensors[value.start]


class Personal(Pieces):
    """One rank's tensors in an all-to-all: those it has for the others, and those it gets from them."""

    def __init__(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor], rank: int) -> None:
        self._inputs = inputs
        self._outputs = outputs
        self._rank = rank

    def __getitem__(self, value: Value) -> torch.Tensor:
        """The tensor for, or from, another rank."""
        if not isinstance(value, Slices) or len(value) != 1:
            raise ProgramError(f"{value} is nothing that one rank hands to another")
        source, to = divmod(value.start, len(self._inputs))
        return self._inputs[to] if source == self._rank else self._outputs[source]


# ── large tensors, block after block ────────────────────────────────────────────────────────────────────────────────
#
# A rank copies its tensor to where the others can read it. They find the copy in the processor's cache, as long as it
# is not too much: so a large tensor goes in blocks, and the program runs once for each. A tensor that is not copied,
# since it lies in shared memory, gains nothing from blocks. It goes in one piece as soon as all ranks know that none
# of them copies.

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


def listed(tensors: list[torch.Tensor], block_bytes: int | None = BLOCK_BYTES, *, together: bool = False) -> Blocks:
    """A tensor for each slice, all of one size; large ones block after block.

    If they lie side by side on every rank (`together`), a rank copies all of them or none. Then one block is enough to
    know whether any rank copies, as with one tensor. Of tensors that lie apart, each rank sees only some.
    """
    flat = [tensor.view(-1) for tensor in tensors]
    size = flat[0].numel()
    step = _elements(None if block_bytes is None else block_bytes // len(tensors), flat[0])

    def blocks(slices: int, in_blocks: Callable[[], bool]) -> Iterator[Pieces]:
        if slices != len(tensors):
            raise ProgramError(f"a program of {slices} slices cannot run on a list of {len(tensors)} tensors")
        yield _Listed([tensor[:step] for tensor in flat])
        if size <= step:
            return
        rest = step if in_blocks() or not together else size
        for start in range(step, size, rest):
            yield _Listed([tensor[start : start + rest] for tensor in flat])

    return blocks


def personal(inputs: list[torch.Tensor], outputs: list[torch.Tensor], rank: int) -> Blocks:
    """What a rank hands to each of the others, and what it gets from each; all at once."""
    return lambda *_: iter([Personal(inputs, outputs, rank)])


def _elements(block_bytes: int | None, tensor: torch.Tensor) -> int:
    """How many elements of a tensor make a block; None: all of them do, as on a GPU, where nothing large is copied."""
    if block_bytes is None or tensor.is_cuda:
        return max(1, tensor.numel())
    return max(1, block_bytes // tensor.element_size())
