"""Programs of collectives as one rank performs them again and again: built once, and cut into rounds once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from microparallel.collectives import GroupKind, program_of, resolve
from microparallel.comms.interpreter import Memory, Pieces, Round, rounds, slices_of
from microparallel.comms.work_queue import Line, Turn
from microparallel.errors import ProgramError
from microparallel.program import AUTO, Add, Op, Recv, Slices, Value


class Plan:
    """One rank's part of a program."""

    def __init__(self, name: str, slices: int, ops: Sequence[Op], *, all_meet: bool = False) -> None:
        self.name = name
        self.slices = slices
        self.rounds: tuple[Round, ...] = tuple(rounds(ops))
        self.all_meet = all_meet  # whether every rank hears from every other
        written = [op.value if isinstance(op, Recv) else op.into for op in ops if isinstance(op, Recv | Add)]
        # The slices of this rank's tensor that are changed.
        self.written = frozenset(index for value in written if isinstance(value, Slices) for index in value.slices)


@functools.lru_cache(maxsize=1024)
def plan_of(collective: GroupKind, algorithm: str, ranks: int, rank: int, root: int | None = None) -> Plan:
    """One rank's part of a collective by one of its algorithms."""
    program = program_of(collective, algorithm, ranks, root)
    heard = [{op.source for op in ops if isinstance(op, Recv)} for ops in program.ranks]
    all_meet = all(sources == set(range(ranks)) - {own} for own, sources in enumerate(heard))
    return Plan(program.name, slices_of(program), program.ranks[rank], all_meet=all_meet)


# The tensors of a collective by the names that its program gives them; large ones block after block.
#
# What one rank has just copied to where the others see it, these then find in the cache, as long as it is not too
# much. A
# tensor that nobody has to copy gains nothing from that, and goes in one piece as soon as everybody knows.


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
        if not isinstance(value, Slices) or len(value) != 1:
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
        if not isinstance(value, Slices) or len(value) != 1:
            raise ProgramError(f"{value} is nothing that one rank hands to another")
        source, to = divmod(value.start, len(self._inputs))
        return self._inputs[to] if source == self._rank else self._outputs[source]


# A group whose every collective is a program of `collectives/`, whatever it runs over.


class ProgramGroup:
    """One rank's place in a group: the program of each collective, and the line in which collectives wait to run.

    Which program that is, `resolve` says for the group's transport. How it runs, a group of this kind says in `_run`.

    Args:
        rank: the number of this rank in the group.
        world_size: how many ranks the group has.
        transport_name: what "auto" is resolved for, such as "shm" or "gloo".
        block_bytes: how much of a tensor a program runs over at a time; None: over the whole of it.
    """

    def __init__(self, rank: int, world_size: int, transport_name: str, block_bytes: int | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.transport_name = transport_name
        self._block_bytes = block_bytes
        self._line = Line()

    def _run(self, plan: Plan, blocks: Blocks, op: str = "sum") -> Turn:
        """Put a program into the line: to be run by whoever waits for it, or by the line's thread."""
        raise NotImplementedError

    def _plan(self, collective: GroupKind, size: int = 0, algorithm: str = AUTO, root: int | None = None) -> Plan:
        """The part that this rank has in a collective to which each contributes `size` bytes."""
        chosen = resolve(collective, algorithm, self.world_size, size, self.transport_name)
        return plan_of(collective, chosen, self.world_size, self.rank, root)

    def all_reduce(self, tensor: torch.Tensor, op: str, algorithm: str = AUTO) -> Turn:
        """Combine everybody's tensor, in place, on every rank."""
        plan = self._plan("all-reduce", tensor.numel() * tensor.element_size(), algorithm)
        return self._run(plan, whole(tensor, self._block_bytes), op)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Turn:
        """Copy the source's tensor over everybody else's."""
        return self._run(self._plan("broadcast", root=source), whole(tensor, self._block_bytes))

    def reduce(self, tensor: torch.Tensor, to: int, op: str) -> Turn:
        """Combine everybody's tensor on one rank."""
        return self._run(self._plan("reduce", root=to), whole(tensor, self._block_bytes), op)

    def all_gather(self, tensor: torch.Tensor, outputs: list[torch.Tensor]) -> Turn:
        """Collect everybody's tensor on every rank."""
        outputs[self.rank].copy_(tensor)
        return self._run(self._plan("all-gather"), listed(outputs, self._block_bytes))

    def reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor], op: str) -> Turn:
        """Combine the ranks' inputs position by position; rank r gets position r."""
        plan = self._plan("reduce-scatter")
        output.copy_(inputs[self.rank])
        # The inputs stay as they are: sums that only pass through this rank, as in a ring, are made in copies.
        pieces = [piece.clone() if slice_ in plan.written else piece for slice_, piece in enumerate(inputs)]
        pieces[self.rank] = output
        return self._run(plan, listed(pieces, self._block_bytes), op)

    def scatter(self, output: torch.Tensor, inputs: list[torch.Tensor] | None, source: int) -> Turn:
        """Hand the source's inputs out, one to each rank."""
        if inputs is not None:
            output.copy_(inputs[self.rank])
        pieces = inputs or [output] * self.world_size
        return self._run(self._plan("scatter", root=source), listed(pieces, self._block_bytes))

    def gather(self, tensor: torch.Tensor, outputs: list[torch.Tensor] | None, to: int) -> Turn:
        """Collect everybody's tensor on one rank."""
        if outputs is not None:
            outputs[self.rank].copy_(tensor)
        pieces = outputs or [tensor] * self.world_size
        return self._run(self._plan("gather", root=to), listed(pieces, self._block_bytes))

    def all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Turn:
        """Hand input r to rank r, and get one from each; sizes may differ, as long as each pair of ranks agrees."""
        outputs[self.rank].copy_(inputs[self.rank])
        return self._run(self._plan("all-to-all"), personal(inputs, outputs, self.rank))

    def barrier(self) -> Turn:
        """Meet: nobody goes on before everybody has come."""
        return self.all_reduce(torch.zeros(1, dtype=torch.uint8), "sum")

    def run_in_background(self) -> None:
        """Let a thread run the collectives that have been called and not waited for."""
        self._line.run_in_background()
