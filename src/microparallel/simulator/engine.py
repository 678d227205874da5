"""What would happen: a walk through a program (`program/walk.py`) with a clock for every lane.

- A lane does its operations in order; a computation begins when its lane is free and what it needs is there.
- A Send never stops its lane. Its transfer begins when the value is there, the matching Recv has been posted, and the
  sender's port is free; it holds the port for latency + bytes × seconds per byte.
- On a cluster whose nodes have one network port each (`Costs.cluster`), a message between nodes also holds the sending
  side of one node's port and the receiving side of the other's, as long. Of all messages, the one that can begin first
  is next; of those that can begin at the same time, the one that came first.
- A Recv stops its lane until the message is there (and added, with `reduce`). A rank has one receive posted at a time,
  so messages never compete for a receiver's port.
- What is being sent is not overwritten: an operation that writes to it waits for the transfer's end.
- What a group does together (an AllReduce, an AllGather) begins when all its ranks have come to it. It takes as long as
  the program of its algorithm takes on the links between them.

Transfers are taken from a heap in the order in which they can begin, so each port serves first what came first. Every
operation is looked at a bounded number of times: the time grows with the number of operations. (A message that finds a
shared port busy goes back into the heap, once for each message that is served before it.)
"""

from __future__ import annotations

import functools
import gc
import heapq
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from microparallel.errors import ProgramError
from microparallel.program import Add, Cursor, Join, Lane, Message, Observed, Policy, Program, Recv, Send, Value, Walk
from microparallel.program.walk import Meeting
from microparallel.schedules import complete
from microparallel.simulator.costs import Costs
from microparallel.simulator.groups import GroupCosts, Share
from microparallel.topology import Port
from microparallel.trace import Event, Trace


def simulate(program: Program, costs: Costs | None = None) -> Trace:
    """Find out what a program would cost, without running it.

    Args:
        program: what to simulate; one that `mp.verify` accepts, so messages may be left out. One that does not come to
            its end is refused.
        costs: how long operations and messages take; without it a forward and each half of a backward take 1.

    Example:
        ```python
        trace = mp.simulate(mp.schedules.build("1f1b", 4, 8), mp.Costs(forward=1, backward_input=1, backward_weight=1))
        print(trace.makespan, trace.bubble_fraction, trace.peak_activations)  # 33 0.2727… [4, 3, 2, 1]
        ```
    """
    costs = costs or Costs()
    program = complete(program)
    costs.check(program)
    with _no_garbage_collection():
        return Trace(Simulation(program, costs).run(), program, simulated=True, sizes=costs.sizes)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Switch the collector off: a simulation keeps its events, often millions, and the collector would search them."""
    wanted = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if wanted:
            gc.enable()


class Simulation(Policy):
    """One walk through a program, in which time passes."""

    lanes = True

    def __init__(self, program: Program, costs: Costs) -> None:
        super().__init__("rendezvous")
        self._program = program
        self._costs = costs
        self._groups = GroupCosts(costs, program, lambda *inside: Simulation(*inside).run())
        self._link = functools.cache(costs.link)
        self._events: list[Event] = []
        # Transfers: when each can begin as far as is known, when it came, its number.
        self._eligible: list[tuple[float, float, int, Message]] = []
        self._port_free: list[float] = [0] * program.world_size
        self._shares_ports = costs.shares_ports
        self._ports = functools.cache(costs.ports)
        self._shared_port_free: defaultdict[Port, float] = defaultdict(float)
        self._count = 0  # of Sends

    def run(self) -> list[Event]:
        """Walk to the end."""
        walk = Walk(self._program, self)
        for cursor in walk:
            op = cursor.op
            if cursor.lane is Lane.COMPUTE:
                if type(op) is not Join:
                    end = cursor.ready + self._costs.of(op, cursor.rank)
                    self._events.append(Event(cursor.rank, Lane.COMPUTE, op, cursor.ready, end))
                    cursor.time = end
            elif isinstance(op, Send):
                assert cursor.message is not None
                cursor.message.number = self._count
                self._count += 1
            elif isinstance(op, Recv):
                self._receive(cursor, op)
            elif isinstance(op, Add):
                end = cursor.ready + self._seconds_to_add(op.value)
                self._events.append(Event(cursor.rank, Lane.COMM, op, cursor.ready, end))
                cursor.time = end
            elif cursor.meeting is not None:
                self._meet(cursor, cursor.meeting)
        self._require_end(walk)
        return self._events

    # ── messages ────────────────────────────────────────────────────────────────────────────────────────────────

    def carry(self, message: Message) -> bool:
        """A transfer can begin: it does when it is the first of all that can."""
        assert message.offered is not None
        # Of transfers that can begin at the same time, a port serves first what was sent first.
        came = max(message.offered, message.posted)
        heapq.heappush(self._eligible, (came, came, message.number, message))
        return False

    def idle(self) -> Message | None:
        """Nothing more can happen without a transfer: the one that can begin first."""
        message = self._first_that_can_begin()
        if message is None:
            return None
        assert message.send is not None
        size = self._costs.bytes(message.send, self._program.goal, message.sender)
        seconds = self._costs.transfer(message.send, message.sender)
        if seconds is None:
            seconds = self._link(message.sender, message.receiver).seconds(size)
        end = message.start + seconds
        message.end = self._port_free[message.sender] = end
        if self._shares_ports:
            for port in self._ports(message.sender, message.receiver):
                self._shared_port_free[port] = end
        sent = (1, size, size, 0, None, None, (), message.index, message.receiver)  # names would be slow
        self._events.append(Event(message.sender, Lane.COMM, message.send, message.start, end, *sent))
        return message

    def _first_that_can_begin(self) -> Message | None:
        """Take the next message from the heap, with its start: when its sender's port and all shared ones are free."""
        while self._eligible:
            known, came, number, message = heapq.heappop(self._eligible)
            message.start = max(came, self._port_free[message.sender])
            if not self._shares_ports:
                return message
            for port in self._ports(message.sender, message.receiver):
                message.start = max(message.start, self._shared_port_free[port])
            if message.start <= known:
                return message
            heapq.heappush(self._eligible, (message.start, came, number, message))
        return None

    def _receive(self, cursor: Cursor, op: Recv) -> None:
        message = cursor.message
        assert message is not None
        start, end = message.start, message.end
        if op.reduce:
            if cursor.ready > end:  # it has arrived, and waits to be added: waiting is not communication
                self._events.append(_arrival(message, op, start, end))
                start = cursor.ready
            end = cursor.ready + self._seconds_to_add(op.value)
        self._events.append(_arrival(message, op, start, end))
        cursor.time = end

    def _seconds_to_add(self, value: Value) -> float:
        return self._costs.size(value, self._program.goal) * self._costs.add_seconds_per_byte

    # ── what a group does together ──────────────────────────────────────────────────────────────────────────────

    def _meet(self, cursor: Cursor, meeting: Meeting) -> None:
        op = meeting.op
        if meeting.content is None:
            shares = self._groups.shares(op, meeting.ranks)
            meeting.content = max(meeting.arrived.values()), dict(zip(meeting.ranks, shares, strict=True))
        start, of_rank = meeting.content
        share: Share = of_rank[cursor.rank]
        cursor.time = end = start + share.seconds
        size = self._groups.bytes(op, cursor.rank)
        # An observed collective has no value that distinguishes meetings, so it brings a number of its own.
        number = op.number if isinstance(op, Observed) else meeting.number
        traffic = (share.messages, share.bytes, size, 0)
        met = (cursor.came, None, meeting.ranks, number)
        self._events.append(Event(cursor.rank, Lane.COMM, op, start, end, *traffic, *met))

    def _require_end(self, walk: Walk) -> None:
        lost = walk.lost()
        if lost is not None:
            raise ProgramError(
                f"program {self._program.name!r} loses a message: rank {lost.sender} does {lost.send}, "
                "and no rank receives it; mp.verify says more"
            )
        for cursor in walk.stuck():
            raise ProgramError(
                f"program {self._program.name!r} does not come to its end: rank {cursor.rank} stands at "
                f"{cursor.op} for ever; mp.verify says why"
            )


def _arrival(message: Message, op: Recv, start: float, end: float) -> Event:
    received = (0, 0, 0, 0, None, None, (), message.index, message.sender)
    return Event(message.receiver, Lane.COMM, op, start, end, *received)
