"""A group whose ranks share a machine, or some of them: every collective runs as a program over shared memory.

Between the hosts of a group that has several, the same programs send their messages through gloo.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist

from microparallel.comms.group import ProgramGroup
from microparallel.comms.interpreter import BLOCK_BYTES, COMBINE, Algorithm, Blocks, RankProgram, perform, whole
from microparallel.comms.rounds import WireRounds, perform_rounds
from microparallel.comms.work_queue import QueuedWork
from microparallel.errors import UsageError
from microparallel.observe.flight import Flight
from microparallel.program import AUTO
from microparallel.topology import available_cores
from microparallel.torch_private import at_end_of_backward, number_of_backward, uncompiled
from microparallel.transport.base import SeparateMessages, Work
from microparallel.transport.shared_memory.call_log import numbered, signature_of
from microparallel.transport.shared_memory.transport import SharedMemoryTransport
from microparallel.transport.shared_memory.works import CallState, SharedMemoryExchange
from microparallel.transport.torch_distributed import make_group

# Seconds for which backward may compute on after its last call before the queue's thread runs what it has called.
_LONGEST_DELAY = 0.2

# When Python ends it stops its threads wherever they are, and a thread inside of torch's C++ then aborts the process.
# So groups that were not closed are closed before.
_OPEN: weakref.WeakSet[SharedMemoryGroup] = weakref.WeakSet()
# In a process that was forked from a rank: gloo would wait for its threads, which are not there, if it were let go.
_OF_PARENTS: list[SharedMemoryTransport] = []


@atexit.register
def _close_all() -> None:
    for group in list(_OPEN):
        group.shut_down()


def _leave_all_to_parent() -> None:
    for group in list(_OPEN):
        group.leave_to_parent()
    _OPEN.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all_to_parent)


class _OfParent:
    """Stands for what belongs to the process that this one was forked from: whatever is asked of it is refused.

    The child shares the memory through which the parent's rank talks, so a call of the child would be taken for one of
    the parent.
    """

    def __init__(self, rank: int) -> None:
        self._refusal = (
            f"this process was forked from rank {rank} and is no rank itself, so it cannot communicate; "
            f"let rank {rank} make the call, or start this process as a rank of its own (mp.launch, torchrun)"
        )

    def __getattr__(self, name: str) -> NoReturn:
        raise UsageError(self._refusal)


@uncompiled  # autograd calls `_catch_up`
class SharedMemoryGroup(ProgramGroup):
    """One rank's place in a group that talks through shared memory."""

    def __init__(self, transport: SharedMemoryTransport, flight: Flight | None = None) -> None:
        self._one_host = len(transport.here) == transport.world_size
        # Blocks would cross a network one after another, and only a rank's own host tells it whether a rank copies.
        block_bytes = BLOCK_BYTES if self._one_host else None
        super().__init__(transport.rank, transport.world_size, transport.name, block_bytes)
        self.transport = transport
        self.flight = Flight(None) if flight is None else flight
        self.log = self.flight.group(transport.world_ranks)
        self.world_ranks = transport.world_ranks
        self.carries = transport.carries
        self._call = threading.local()
        self._process_group: dist.ProcessGroup | None = None
        self._backward: int | None = None  # the number of the last backward at whose end `_catch_up` runs
        _OPEN.add(self)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The same group, as torch sees it."""
        if self._process_group is None:
            raise UsageError("process_group: this group has none; start ranks with mp.launch or mp.connect")
        return self._process_group

    @process_group.setter
    def process_group(self, group: dist.ProcessGroup) -> None:
        self._process_group = group

    def announce(self, call: str, timeout: float | None = None, agreement: str | None = None) -> None:
        """Say what this thread calls next: in a collective, all ranks must say the same, or have the same agreement."""
        self._call.text = call
        self._call.timeout = timeout
        self._call.agreement = call if agreement is None else agreement

    # ── messages ────────────────────────────────────────────────────────────────────────────────────────────────

    def isend(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:
        """Start sending a contiguous tensor."""
        return self.transport.isend(tensor, to, tag)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int = 0, *, allow_less: bool = False) -> Work:
        """Start receiving into a contiguous tensor, which may be larger than the message if `allow_less`."""
        return self.transport.irecv(tensor, source, tag, allow_less=allow_less)

    def irecv_from_any(self, tensor: torch.Tensor, tag: int = 0) -> Work:
        """Start receiving the first message that comes, from any rank."""
        return self.transport.irecv_from_any(tensor, tag)

    def exchange(self, tag: int = 0) -> SeparateMessages:
        """Open an exchange; each of its messages starts at once, by itself."""
        return SeparateMessages(self, tag)

    # ── collectives ─────────────────────────────────────────────────────────────────────────────────────────────

    def all_reduce(self, tensor: torch.Tensor, op: str, algorithm: Algorithm = AUTO) -> QueuedWork:
        """Combine the ranks' tensors, in place, on every rank."""
        program = self._program("all-reduce", tensor.numel() * tensor.element_size(), algorithm)
        return self._run(program, whole(tensor, self._block_bytes), op, movable=tensor)

    def in_turn(self, action: Callable[[], object]) -> QueuedWork:
        """Do something on this rank alone, after the collectives that it has called and before those that it will."""

        def run(_: float | None) -> None:
            action()

        return self._append(run)

    @property
    def has_free_cores(self) -> bool:
        """Whether a core is left for communication while all ranks compute; waiting for a network needs none."""
        return not self._one_host or self.world_size * torch.get_num_threads() < available_cores()

    def run_after_backward(self) -> None:
        """Let the calling thread, autograd's, compute all gradients before it runs the collectives it has called.

        Where the ranks compute on all cores, the queue's thread would only interrupt autograd's, and then wait until
        the queue threads of the other ranks interrupt theirs. So it is delayed until backward has ended, or waits for
        something. At the end of backward autograd's thread runs the collectives that every rank has called, and leaves
        the others to the queue's thread: so no rank waits longer than it would without this call.
        """
        if not self._one_host or self.world_size < available_cores():
            self._queue.run_in_background()
            return
        self._queue.run_in_background(_LONGEST_DELAY)
        backward = number_of_backward()
        if self._backward != backward:
            self._backward = backward
            at_end_of_backward(self._catch_up)

    def end_delay(self) -> None:
        """Let the queue's thread run without waiting for the end of backward: the caller polls for a result."""
        self._queue.end_delay()

    def _catch_up(self) -> None:
        self._queue.run_ready()
        self._queue.run_in_background()

    def _run(
        self,
        program: RankProgram,
        blocks: Blocks,
        op: str = "sum",
        first: Callable[[], object] | None = None,
        movable: torch.Tensor | None = None,
    ) -> QueuedWork:
        state = self._next_call(program.name, adds_to_sent=program.adds_to_sent, at_once=program.whole is not None)
        exchanges = _Exchanges(self.transport, state)
        combine = COMBINE[op]

        # A rank that hears from all others in the first block knows then whether any of them copies. If none does,
        # blocks gain nothing.
        def in_blocks() -> bool:
            return state.copied or not program.all_receive_from_all

        def run(deadline: float | None) -> None:
            self.transport.exchange_notices()
            if first is not None:
                first()
            if movable is not None:  # now: while the collective runs, no other thread may use the tensor
                self.transport.move_what_comes_again(movable)
            for pieces in blocks(program.slices, in_blocks):
                self._wait_for(perform(program.rounds, pieces, exchanges, combine), deadline)

        return self._queued(run, state)

    def exchange_rounds(self, rounds: WireRounds) -> QueuedWork:
        """Put sums and gathers that need each other's results into the queue, as one work and one call."""
        state = self._next_call("rounds")
        exchanges = _Exchanges(self.transport, state)

        def run(deadline: float | None) -> None:
            self.transport.exchange_notices()
            ranks, rank, name = self.world_size, self.rank, self.transport_name
            in_order = perform_rounds(rounds, ranks, rank, exchanges, name, self._block_bytes, lambda: state.copied)
            self._wait_for(in_order, deadline)

        return self._queued(run, state)

    def _wait_for(self, works: Iterator[Work], deadline: float | None) -> None:
        """Wait for what a program must wait for; what its device must wait for, is handed over."""
        marks = self.transport.order.marks()
        for work in works:
            work.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            marks.hand_over()
        marks.hand_over()

    def _next_call(self, name: str, *, adds_to_sent: bool = False, at_once: bool = True) -> CallState:
        """Give the call that this thread has announced its number among the group's calls."""
        text = getattr(self._call, "text", name)
        signature = signature_of(getattr(self._call, "agreement", text))
        number = self.transport.peers.call(signature, text)
        return CallState(text, number, numbered(signature, number), adds_to_sent=adds_to_sent, at_once=at_once)

    def _queued(self, run: Callable[[float | None], None], state: CallState) -> QueuedWork:
        peers = self.transport.peers
        return self._append(
            run,
            getattr(self._call, "timeout", None),
            ready=functools.partial(peers.have_called, state.number),
            missing=functools.partial(peers.missing, state.number),
        )

    def _append(self, run: Callable[[float | None], None], timeout: float | None = None, **about: Any) -> QueuedWork:
        return self._queue.append(run, timeout, **about)

    # ── memory, smaller groups, the end ─────────────────────────────────────────────────────────────────────────

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in this rank's shared memory: other ranks read it there, without a copy."""
        return self.transport.empty(shape, dtype)

    def subgroup(self, ranks: list[int]) -> SharedMemoryGroup | None:
        """Make a group of some of these ranks; only they need to call this. None on a rank that is not among them."""
        if self.rank not in ranks:
            return None
        world_ranks = [self.world_ranks[rank] for rank in ranks]
        group: Any = make_group(self.process_group, world_ranks, "microparallel")
        shared: SharedMemoryGroup = group.shared_memory
        return shared

    def close(self) -> None:
        """Leave the group; torch destroys its process group, which calls `shut_down`."""
        if self._process_group is not None:
            dist.destroy_process_group(self._process_group)

    def leave_to_parent(self) -> None:
        """Refuse all calls from now on: this process was forked, and the rank is its parent."""
        _OF_PARENTS.append(self.transport)
        self.transport = self._queue = cast(Any, _OfParent(self.world_ranks[self.rank]))
        self.flight = Flight(None)
        self.log = self.flight.group(self.world_ranks)

    def shut_down(self) -> None:
        """Free the shared memory and end the queue's threads."""
        self._process_group = None
        if isinstance(self.transport, _OfParent):
            return
        _OPEN.discard(self)
        self.transport.close()
        self._queue.close()


class _Exchanges:
    """The interpreter's transport during one collective: every exchange carries the signature of that call."""

    def __init__(self, transport: SharedMemoryTransport, state: CallState) -> None:
        self.rank = transport.rank
        self.world_size = transport.world_size
        self._transport = transport
        self._state = state

    def exchange(self, tag: int = 0) -> SharedMemoryExchange:  # noqa: ARG002
        return self._transport.open_exchange(self._state)

    def isend(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:
        return self._transport.isend(tensor, to, tag)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Work:
        return self._transport.irecv(tensor, source, tag)
