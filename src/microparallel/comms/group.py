"""A group of ranks: what Comms asks of one (`Group`), and one whose every collective is a program (`ProgramGroup`).

There are three kinds: `SharedMemoryGroup` and `MessageGroup` run the programs of `collectives/`; `TorchGroup` calls
torch's own collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from microparallel.collectives import GroupKind, resolve
from microparallel.comms.interpreter import Algorithm, Blocks, RankProgram, listed, personal, rank_program, whole
from microparallel.comms.rounds import WireRounds
from microparallel.comms.work_queue import QueuedWork, WorkQueue
from microparallel.observe.flight import Flight
from microparallel.observe.flight_recorder import GroupLog, NoLog
from microparallel.program import AUTO
from microparallel.transport.base import Exchange, Work


class Group(Protocol):
    """One rank's place in a group: messages, collectives, and what is known of the others.

    Tensors are contiguous, and on a device that the group carries.
    """

    rank: int
    world_size: int
    world_ranks: tuple[int, ...]
    carries: frozenset[str]
    transport_name: str  # what "auto" is resolved for
    flight: Flight
    log: GroupLog | NoLog  # the flight recorder's, of this group's calls

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The torch process group that this is."""

    def announce(self, call: str) -> None:
        """Say what this thread calls next, where ranks compare that."""

    def isend(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:
        """Start sending."""

    def irecv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Work:
        """Start receiving."""

    def exchange(self, tag: int = 0) -> Exchange:
        """Open an exchange, to which messages are added."""

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        """Start copying the source's tensor over that of every other rank."""

    def scatter(self, output: torch.Tensor, inputs: list[torch.Tensor] | None, source: int) -> Work:
        """Start handing the source's inputs out, one to each rank, all of one size."""

    def gather(self, tensor: torch.Tensor, outputs: list[torch.Tensor] | None, to: int) -> Work:
        """Start collecting every rank's tensor on one rank."""

    def all_gather(self, tensor: torch.Tensor, outputs: list[torch.Tensor], *, together: bool = False) -> Work:
        """Start collecting every rank's tensor on every rank; `together`: on all ranks, outputs lie side by side."""

    def reduce(self, tensor: torch.Tensor, to: int, op: str) -> Work:
        """Start combining the ranks' tensors on one rank; what the others' tensors hold afterwards is undefined."""

    def reduce_scatter(
        self, output: torch.Tensor, inputs: list[torch.Tensor], op: str, *, together: bool = False
    ) -> Work:
        """Start combining the ranks' inputs position by position; rank r gets position r.

        The output may be this rank's own position. With `together`, on all ranks, the inputs lie side by side.
        """

    def all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Work:
        """Start handing input r to rank r, and getting one from each; sizes may differ from pair to pair."""

    def all_reduce(self, tensor: torch.Tensor, op: str, algorithm: Algorithm = AUTO) -> Work:
        """Start combining the ranks' tensors, in place, on every rank."""

    def exchange_rounds(self, rounds: WireRounds) -> Work:
        """Start sums and gathers that need each other's results, as one call."""

    @property
    def has_free_cores(self) -> bool:
        """Whether communication can go on beside computation, without taking a core from it."""

    def run_in_background(self) -> None:
        """See to it that what has been started makes progress while this thread does something else."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A CPU tensor in the memory from which this group's transfers are fastest."""

    def subgroup(self, ranks: list[int]) -> Group | None:
        """Make a group of some of these ranks; only they need to call this. None on a rank that is not among them."""

    def close(self) -> None:
        """Leave the group."""


class ProgramGroup:
    """A group whose every collective is a program of `collectives/`, and waits in the group's work queue to run.

    Which program that is, `resolve` says for the group's transport. How it runs, a subclass says in `_run`.

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
        self._queue = WorkQueue(self._thread_begins)

    def _thread_begins(self) -> None:
        """What each of the queue's threads does first."""

    def _run(
        self, program: RankProgram, blocks: Blocks, op: str = "sum", first: Callable[[], object] | None = None
    ) -> QueuedWork:
        """Put a program into the queue: the thread that waits for it runs it, or the queue's own thread does.

        What a rank copies from one of its own tensors to another, it copies `first`: when the program runs, not when it
        is put into the queue. A collective before it may change that tensor, and then all ranks must see the change.
        """
        raise NotImplementedError

    def exchange_rounds(self, rounds: WireRounds) -> QueuedWork:
        """Put sums and gathers that need each other's results into the queue, as one work."""
        raise NotImplementedError

    def _program(
        self, collective: GroupKind, size: int = 0, algorithm: Algorithm = AUTO, root: int | None = None
    ) -> RankProgram:
        """What this rank does in a collective to which each rank contributes `size` bytes."""
        if isinstance(algorithm, RankProgram):
            return algorithm
        chosen = resolve(collective, algorithm, self.world_size, size, self.transport_name)
        return rank_program(collective, chosen, self.world_size, self.rank, root)

    def all_reduce(self, tensor: torch.Tensor, op: str, algorithm: Algorithm = AUTO) -> QueuedWork:
        """Combine the ranks' tensors, in place, on every rank."""
        program = self._program("all-reduce", tensor.numel() * tensor.element_size(), algorithm)
        return self._run(program, whole(tensor, self._block_bytes), op)

    def broadcast(self, tensor: torch.Tensor, source: int) -> QueuedWork:
        """Copy the source's tensor over that of every other rank."""
        return self._run(self._program("broadcast", root=source), whole(tensor, self._block_bytes))

    def reduce(self, tensor: torch.Tensor, to: int, op: str) -> QueuedWork:
        """Combine the ranks' tensors on one rank."""
        return self._run(self._program("reduce", root=to), whole(tensor, self._block_bytes), op)

    def all_gather(self, tensor: torch.Tensor, outputs: list[torch.Tensor], *, together: bool = False) -> QueuedWork:
        """Collect every rank's tensor on every rank."""
        first = _copying(tensor, outputs[self.rank])
        blocks = listed(outputs, self._block_bytes, together=together)
        return self._run(self._program("all-gather"), blocks, first=first)

    def reduce_scatter(
        self, output: torch.Tensor, inputs: list[torch.Tensor], op: str, *, together: bool = False
    ) -> QueuedWork:
        """Combine the ranks' inputs position by position; rank r gets position r."""
        program = self._program("reduce-scatter")
        # The inputs stay as they are: sums that only pass through this rank, as in a ring, are made in copies.
        pieces = [torch.empty_like(one) if slice_ in program.written else one for slice_, one in enumerate(inputs)]
        pieces[self.rank] = output

        def first() -> None:
            for piece, tensor in zip(pieces, inputs, strict=True):
                if piece is not tensor:
                    piece.copy_(tensor)

        return self._run(program, listed(pieces, self._block_bytes, together=together), op, first)

    def scatter(self, output: torch.Tensor, inputs: list[torch.Tensor] | None, source: int) -> QueuedWork:
        """Hand the source's inputs out, one to each rank."""
        first = None if inputs is None else _copying(inputs[self.rank], output)
        pieces = inputs or [output] * self.world_size
        return self._run(self._program("scatter", root=source), listed(pieces, self._block_bytes), first=first)

    def gather(self, tensor: torch.Tensor, outputs: list[torch.Tensor] | None, to: int) -> QueuedWork:
        """Collect every rank's tensor on one rank."""
        first = None if outputs is None else _copying(tensor, outputs[self.rank])
        pieces = outputs or [tensor] * self.world_size
        return self._run(self._program("gather", root=to), listed(pieces, self._block_bytes), first=first)

    def all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> QueuedWork:
        """Hand input r to rank r, and get one from each; sizes may differ, as long as each pair of ranks agrees."""
        first = _copying(inputs[self.rank], outputs[self.rank])
        return self._run(self._program("all-to-all"), personal(inputs, outputs, self.rank), first=first)

    def barrier(self) -> QueuedWork:
        """Meet: complete when every rank has called this."""
        return self.all_reduce(torch.zeros(1, dtype=torch.uint8, device="cpu"), "sum")

    def run_in_background(self) -> None:
        """Let the queue's thread run the collectives that have been called and not waited for."""
        self._queue.run_in_background()


def _copying(tensor: torch.Tensor, into: torch.Tensor) -> Callable[[], object] | None:
    """How a rank copies its own tensor to its place; None if it lies there already."""
    return None if tensor.data_ptr() == into.data_ptr() else partial(into.copy_, tensor)
