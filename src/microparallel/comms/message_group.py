"""A group whose every collective runs as messages, over any transport: slow links, or one that counts.

`count_messages` at the end is an example; `slow_links.py` is another.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from microparallel.comms.comms import Comms
from microparallel.comms.group import Group, ProgramGroup
from microparallel.comms.interpreter import COMBINE, Blocks, RankProgram, perform
from microparallel.comms.rounds import WireRounds, perform_rounds
from microparallel.comms.work_queue import QueuedWork
from microparallel.errors import UsageError
from microparallel.transport.base import Exchange, Receiving, Transport, Work
from microparallel.transport.counting import CountingTransport, Counts


class MessageGroup(ProgramGroup):
    """The ranks of another group, whose messages, and the messages of its collectives, go over another transport.

    A collective runs in one piece, by the interpreter that all transports share: what is sent is what the program
    says, message by message. Tensors are sent from CPU memory; a GPU's tensors are copied there first.

    Args:
        group: the group that these ranks have.
        messages: the transport of the messages; it uses the group's.
        transport_name: what "auto" is resolved for.
    """

    carries = frozenset({"cpu"})

    def __init__(self, group: Group, messages: Transport, transport_name: str) -> None:
        if not self.carries <= group.carries:
            raise UsageError(
                f"these ranks carry tensors on {', '.join(sorted(group.carries))} only, and slowing or counting "
                'messages needs the CPU\'s too; connect with transport="nccl", which has gloo beside it, or "gloo"'
            )
        super().__init__(group.rank, group.world_size, transport_name)
        self.world_ranks = group.world_ranks
        self.flight = group.flight
        self.log = group.log
        self._group = group
        self._messages = messages
        self._subgroups: list[MessageGroup] = []

    def _like(self, group: Group) -> MessageGroup:
        """A smaller group over the same kind of messages."""
        raise NotImplementedError

    @property
    def process_group(self) -> dist.ProcessGroup:
        """torch's group of the same ranks, which knows nothing of this one's messages."""
        return self._group.process_group

    def announce(self, call: str) -> None:
        """Nothing to do: messages are not compared. Checked mode compares calls."""

    # ── messages ────────────────────────────────────────────────────────────────────────────────────────────────

    def isend(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:
        """Start sending a contiguous tensor."""
        return self._messages.isend(tensor, to, tag)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Work:
        """Start receiving into a contiguous tensor."""
        return self._messages.irecv(tensor, source, tag)

    def exchange(self, tag: int = 0) -> Exchange:
        """Open an exchange."""
        return self._messages.exchange(tag)

    # ── collectives ─────────────────────────────────────────────────────────────────────────────────────────────

    def _run(
        self, program: RankProgram, blocks: Blocks, op: str = "sum", first: Callable[[], object] | None = None
    ) -> QueuedWork:
        transport, combine = LazyReceives(self._messages), COMBINE[op]

        def run(deadline: float | None) -> None:
            if first is not None:
                first()
            for pieces in blocks(program.slices, lambda: False):
                for work in perform(program.rounds, pieces, transport, combine):
                    work.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

        return self._queue.append(run)

    def exchange_rounds(self, rounds: WireRounds) -> QueuedWork:
        """Put sums and gathers that need each other's results into the queue, as one work."""
        transport = LazyReceives(self._messages)

        def run(deadline: float | None) -> None:
            for work in perform_rounds(rounds, self.world_size, self.rank, transport, self.transport_name):
                work.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

        return self._queue.append(run)

    @property
    def has_free_cores(self) -> bool:
        """True: a message that waits for its link uses no core."""
        return True

    # ── memory, smaller groups, the end ─────────────────────────────────────────────────────────────────────────

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A CPU tensor in the memory from which the group beneath sends fastest."""
        return self._group.empty(shape, dtype)

    def subgroup(self, ranks: list[int]) -> MessageGroup | None:
        """Make a group of some of these ranks; only they need to call this. None on a rank that is not among them."""
        smaller = self._group.subgroup(ranks)
        if smaller is None:
            return None
        self._subgroups.append(self._like(smaller))
        return self._subgroups[-1]

    def stop(self) -> None:
        """Let all threads end, those of smaller groups too; the group beneath stays."""
        for group in self._subgroups:
            group.stop()
        self._subgroups.clear()
        self._queue.close()

    def close(self) -> None:
        """Leave the group."""
        self.stop()
        self._group.close()


class LazyReceives:
    """A transport that posts each receive when it is waited for.

    So a rank has one receive of a program posted at a time, as in the simulator.
    """

    def __init__(self, transport: Transport) -> None:
        self.rank = transport.rank
        self.world_size = transport.world_size
        self._transport = transport

    def isend(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:
        """Start sending."""
        return self._transport.isend(tensor, to, tag)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Work:
        """Receive when it is waited for."""
        return _LazyReceive(lambda: self._transport.irecv(tensor, source, tag))

    def exchange(self, tag: int = 0) -> Exchange:
        """Open an exchange."""
        return _LazyExchange(self._transport.exchange(tag))


class _LazyExchange(Receiving):
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def isend(self, tensor: torch.Tensor, to: int) -> Work:
        return self._exchange.isend(tensor, to)

    def irecv(self, tensor: torch.Tensor, source: int) -> Work:
        return _LazyReceive(lambda: self._exchange.irecv(tensor, source))

    def close(self) -> None:
        self._exchange.close()


class _LazyReceive:
    def __init__(self, start: Callable[[], Work]) -> None:
        self._start = start

    def wait(self, timeout: float | None = None) -> None:
        self._start().wait(timeout)


# ── counting ────────────────────────────────────────────────────────────────────────────────────────────────────────


class CountedGroup(MessageGroup):
    """A group whose messages are counted, and whose collectives run as on a network: by rings and trees."""

    def __init__(self, group: Group, counts: Counts) -> None:
        super().__init__(group, CountingTransport(group, counts), "gloo")
        self._counts = counts

    def _like(self, group: Group) -> CountedGroup:
        return CountedGroup(group, self._counts)


def count_messages(comms: Comms) -> tuple[Comms, Counts]:
    """The same ranks, and a count of the messages and the bytes that this rank sends from now on.

    Transports have collectives of their own, whose messages differ or cannot be counted. Here all collectives run as
    messages, by the algorithms of a network: so what different ways of training send can be compared on any transport.
    """
    counts = Counts()
    return over(comms, CountedGroup(comms._group, counts)), counts


def over(comms: Comms, group: MessageGroup) -> Comms:
    """A Comms for the same ranks, over another group; its threads end when either of the two is closed."""
    comms.before_closing.append(group.stop)
    return Comms(
        group,
        device=comms.device,
        local_rank=comms.local_rank,
        check=comms._checker is not None,
        on_close=group.stop,
    )
