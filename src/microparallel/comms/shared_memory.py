"""Every collective of a group whose ranks share a machine: the `direct` programs, over shared memory."""

from __future__ import annotations

import atexit
import functools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from microparallel.comms.interpreter import COMBINE, perform
from microparallel.comms.program_group import BLOCK_BYTES, Blocks, Plan, ProgramGroup, whole
from microparallel.comms.work_queue import Turn
from microparallel.errors import UsageError
from microparallel.observe.flight import Flight
from microparallel.program import AUTO
from microparallel.topology import available_cores
from microparallel.torch_private import at_end_of_backward, number_of_backward
from microparallel.transport.base import SeparateMessages, Work
from microparallel.transport.shared_memory.transport import SharedMemoryTransport
from microparallel.transport.shared_memory.works import CallState, SharedMemoryExchange
from microparallel.transport.torch_distributed import make_group

# Seconds for which a backward may compute on after its last call before a thread runs what it has called.
_PATIENCE = 0.2

# Python stops its threads as it ends, in whatever they are doing, and C++ ends the process for that. So groups that
# were not closed are closed before.
_OPEN: weakref.WeakSet[SharedMemoryGroup] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for group in list(_OPEN):
        group.shut_down()


class SharedMemoryGroup(ProgramGroup):
    """One rank's place in a group that talks through shared memory."""

    def __init__(self, transport: SharedMemoryTransport, flight: Flight | None = None) -> None:
        super().__init__(transport.rank, transport.world_size, "shm", BLOCK_BYTES)
        self.transport = transport
        self.flight = Flight(None) if flight is None else flight
        self.log = self.flight.group(transport.world_ranks)
        self.world_ranks = transport.world_ranks
        self.carries = transport.carries
        self._call = threading.local()
        self._process_group: dist.ProcessGroup | None = None
        self._backward: int | None = None  # the last backward at whose end this will catch up
        _OPEN.add(self)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The same group, as torch sees it."""
        if self._process_group is None:
            raise UsageError("process_group: torch knows nothing of this group")
        return self._process_group

    @process_group.setter
    def process_group(self, group: dist.ProcessGroup) -> None:
        self._process_group = group

    def announce(self, call: str, timeout: float | None = None) -> None:
        """Say what the next call of this thread is: in a collective, all ranks must say the same."""
        self._call.text = call
        self._call.timeout = timeout

    # ── messages ────────────────────────────────────────────────────────────────────────────────────────────────

    def isend(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:
        """Start sending a contiguous tensor."""
        return self.transport.isend(tensor, to, tag)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Work:
        """Start receiving into a contiguous tensor."""
        return self.transport.irecv(tensor, source, tag)

    def irecv_from_any(self, tensor: torch.Tensor, tag: int = 0) -> Work:
        """Start receiving from whoever sends first."""
        return self.transport.irecv_from_any(tensor, tag)

    def exchange(self, tag: int = 0) -> SeparateMessages:
        """Open an exchange; each of its messages starts at once, by itself."""
        return SeparateMessages(self, tag)

    # ── collectives ─────────────────────────────────────────────────────────────────────────────────────────────

    def all_reduce(self, tensor: torch.Tensor, op: str, algorithm: str = AUTO) -> Turn:
        """Combine everybody's tensor, in place, on every rank."""
        plan = self._plan("all-reduce", tensor.numel() * tensor.element_size(), algorithm)
        return self._run(plan, whole(tensor, self._block_bytes), op, movable=tensor)

    def afterwards(self, action: Callable[[], object]) -> Turn:
        """Do something of this rank's own after the collectives that have been called."""

        def run(_: float | None) -> None:
            action()

        return self._line.append(run)

    @property
    def has_free_cores(self) -> bool:
        """Whether a core is left for communication while all ranks compute."""
        return self.world_size * torch.get_num_threads() < available_cores()

    def run_after_backward(self) -> None:
        """Let the calling thread, autograd's, compute all gradients before it runs what it has called meanwhile.

        A thread of ours would only interrupt it, and wait for the other ranks' threads to interrupt theirs. So where
        ranks leave it no core, it holds back: until backward has ended, or waits for something. What somebody has not
        called by the end of backward is left to it in any case, so that nobody waits who would not have.
        """
        if self.world_size < available_cores():
            self._line.run_in_background()
            return
        self._line.run_in_background(_PATIENCE)
        backward = number_of_backward()
        if self._backward != backward:
            self._backward = backward
            at_end_of_backward(self._catch_up)

    def hurry(self) -> None:
        """Run what was called without waiting for the end of backward: its caller asks for it."""
        self._line.hurry()

    def _catch_up(self) -> None:
        self._line.run_what_is_ready()
        self._line.run_in_background()

    def _run(self, plan: Plan, blocks: Blocks, op: str = "sum", movable: torch.Tensor | None = None) -> Turn:
        call = getattr(self._call, "text", plan.name)
        state = CallState(call)
        exchanges = _Exchanges(self.transport, state)
        combine = COMBINE[op]

        # Who meets everybody in the first block knows after it whether anybody copies. If not, blocks gain nothing.
        def in_blocks() -> bool:
            return state.copied or not plan.all_meet

        def run(deadline: float | None) -> None:
            self.transport.peers.begin(call, state.signature)
            self.transport.exchange_notices()
            if movable is not None:  # now, when nobody else may use it
                self.transport.move_what_comes_again(movable)
            for pieces in blocks(plan.slices, in_blocks):
                for work in perform(plan.rounds, pieces, exchanges, combine):
                    work.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

        number = self.transport.peers.call()
        peers = self.transport.peers
        return self._line.append(
            run,
            getattr(self._call, "timeout", None),
            ready=functools.partial(peers.have_called, number),
            missing=functools.partial(peers.missing, number),
        )

    # ── memory, smaller groups, the end ─────────────────────────────────────────────────────────────────────────

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in this rank's shared memory: peers read it where it is."""
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
        """Leave the group, and let torch forget it; its `shut_down` is called on the way."""
        if self._process_group is not None:
            dist.destroy_process_group(self._process_group)

    def shut_down(self) -> None:
        """Let go of everything."""
        _OPEN.discard(self)
        self._process_group = None
        self.transport.close()
        self._line.close()


class _Exchanges:
    """Where the interpreter gets its exchanges from: all of one collective, which they name."""

    def __init__(self, transport: SharedMemoryTransport, state: CallState) -> None:
        self.rank = transport.rank
        self.world_size = transport.world_size
        self._transport = transport
        self._state = state

    def exchange(self, tag: int = 0) -> SharedMemoryExchange:  # noqa: ARG002
        return SharedMemoryExchange(self._transport, self._state)

    def isend(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:
        return self._transport.isend(tensor, to, tag)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Work:
        return self._transport.irecv(tensor, source, tag)
