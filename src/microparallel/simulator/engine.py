"""What would happen: walk through a program with a clock for every lane.

- A lane does its operations in order; a computation begins when its lane is free and what it needs is there.
- A Send never stops its lane. Its transfer begins when the value is there, the matching Recv has been posted, and the
  sender's port is free; it holds the port for latency + bytes × seconds per byte.
- A Recv stops its lane until the message is there (and added, with `reduce`). A rank has one receive posted at a time,
  so nobody competes for a receiver's port.
- What is being sent is not overwritten: whoever writes to it waits for the transfer's end.
- An AllReduce or a Broadcast begins when all ranks that take part have come to it. It takes as long as the program of
  its algorithm takes on the links between them.

Transfers are taken from a heap in the order in which they can begin, so each port serves first what came first. Every
operation is looked at a bounded number of times: the time grows with the number of operations.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque

from microparallel.errors import ProgramError
from microparallel.program import (
    Add,
    Chunk,
    GroupOp,
    Join,
    Lane,
    Op,
    Part,
    Program,
    Recv,
    Send,
    Value,
)
from microparallel.simulator.costs import Costs
from microparallel.simulator.groups import Groups
from microparallel.simulator.state import Message, Rank, places_of, prepare
from microparallel.trace import Event


class Simulation:
    """One walk through a program."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self._program = program
        self._costs = costs
        self._events: list[Event] = []
        self._ranks = [prepare(number, ops, program) for number, ops in enumerate(program.ranks)]
        self._eligible: list[tuple[float, int, Message]] = []  # transfers that can begin, by time
        self._count = 0
        self._to_advance: deque[Rank] = deque()
        self._messages: dict[tuple[int, int], list[Message]] = defaultdict(list)
        self._sent: dict[tuple[int, int], int] = defaultdict(int)
        self._received: dict[tuple[int, int], int] = defaultdict(int)
        self._groups = program.groups()
        self._shares = Groups(costs, program.goal, lambda *inside: Simulation(*inside).run())
        self._arrived: dict[tuple[GroupOp, tuple[int, ...], int], dict[int, float]] = defaultdict(dict)

    def run(self) -> list[Event]:
        """Walk to the end."""
        self._to_advance.extend(self._ranks)
        while self._to_advance or self._eligible:
            while self._to_advance:  # first everything that can happen without another transfer
                self._advance(self._to_advance.popleft())
            if self._eligible:
                time, _, message = heapq.heappop(self._eligible)
                self._transfer(message, time)
                self._to_advance.append(self._ranks[message.receiver])
                if self._ranks[message.sender].held_up:
                    self._ranks[message.sender].held_up = False
                    self._to_advance.append(self._ranks[message.sender])
        self._require_end()
        return self._events

    def _advance(self, rank: Rank) -> None:
        """Let both lanes do what they can; one may make what the other waits for."""
        moved = True
        while moved:
            moved = self._advance_compute(rank)
            moved = self._advance_comm(rank) or moved

    def _advance_compute(self, rank: Rank) -> bool:
        began_at, ops, ready = rank.compute_at, rank.compute, rank.ready
        while rank.compute_at < len(ops):
            op = ops[rank.compute_at]
            if isinstance(op, Join):
                if not self._join(rank):
                    break
                continue
            start = self._when_ready(rank, op, rank.compute_free)
            if start is None:
                break
            end = start + self._costs.of(op, rank.number)
            self._events.append(Event(rank.number, Lane.COMPUTE, op, start, end))
            for value in rank.rules.makes(op):
                ready[value] = end
                for message in rank.unmade.pop(value, ()):
                    self._offer(message, max(end, message.issued))
            rank.compute_free = end
            rank.compute_at += 1
        return rank.compute_at > began_at

    def _when_ready(self, rank: Rank, op: Op, start: float) -> float | None:
        """When an operation can begin, at the earliest at `start`; None while something it needs has not been made."""
        if rank.missing is not None and rank.missing not in rank.ready:
            return None  # what was missing the last time still is
        rank.missing = None
        for value in rank.rules.needs(op):
            made = rank.ready.get(value)
            if made is None:
                rank.missing = value
                return None
            start = max(start, made)
        return start

    def _advance_comm(self, rank: Rank) -> bool:
        began_at, ops = rank.comm_at, rank.comm
        while rank.comm_at < len(ops):
            op = ops[rank.comm_at]
            if isinstance(op, Send):
                self._send(rank, op)
            elif isinstance(op, Recv):
                if not self._receive(rank, op):
                    break
            elif isinstance(op, Add):
                if not self._add(rank, op):
                    break
            elif isinstance(op, GroupOp):
                if not self._meet(rank, op):
                    break
            elif not self._join(rank):
                break
            else:
                continue
            rank.comm_at += 1
        return rank.comm_at > began_at

    def _send(self, rank: Rank, op: Send) -> None:
        channel = (rank.number, op.to)
        message = self._message(channel, self._sent[channel])
        self._sent[channel] += 1
        message.send, message.number = op, self._count
        self._count += 1
        if isinstance(op.value, Chunk | Part):  # only this lane makes them, so they are there
            for place in places_of(op.value):
                rank.sending.setdefault(place, []).append(message)
            self._offer(message, rank.comm_free)
        elif op.value in rank.ready:
            self._offer(message, max(rank.comm_free, rank.ready[op.value]))
        else:
            message.issued = rank.comm_free
            rank.unmade.setdefault(op.value, []).append(message)

    def _offer(self, message: Message, time: float) -> None:
        message.offered = time
        if message.posted is not None:
            self._push(message)

    def _push(self, message: Message) -> None:
        assert message.offered is not None and message.posted is not None
        # Of transfers that can begin at the same time, a port serves first what was sent first.
        heapq.heappush(self._eligible, (max(message.offered, message.posted), message.number, message))

    def _receive(self, rank: Rank, op: Recv) -> bool:
        """Post a receive, or end one whose message has arrived; False while it is to be waited for."""
        message = rank.receiving
        if message is None:
            # What is only added may arrive beside the value; what replaces it may not while that is being sent.
            posted = rank.comm_free if op.reduce else self._busy_until(rank, op.value, rank.comm_free)
            if posted is not None:
                self._post(rank, op, posted)
            return False
        if message.end is None:
            return False
        start, end = message.start, message.end
        if op.reduce:
            free = self._busy_until(rank, op.value, end)
            if free is None:
                return False
            if free > end:  # it has arrived, and waits to be added: waiting is not communication
                self._events.append(_arrival(message, op, start, end))
                start = free
            end = free + self._costs.size(op.value, self._program.goal) * self._costs.add_seconds_per_byte
        self._events.append(_arrival(message, op, start, end))
        rank.ready[op.value] = rank.comm_free = end
        rank.receiving = None
        return True

    def _post(self, rank: Rank, op: Recv, time: float) -> None:
        channel = (op.source, rank.number)
        message = rank.receiving = self._message(channel, self._received[channel])
        self._received[channel] += 1
        message.posted = time
        if message.offered is not None:
            self._push(message)

    def _add(self, rank: Rank, op: Add) -> bool:
        start = self._busy_until(rank, op.into, rank.comm_free)
        if start is None:
            return False
        end = start + self._costs.size(op.value, self._program.goal) * self._costs.add_seconds_per_byte
        self._events.append(Event(rank.number, Lane.COMM, op, start, end))
        rank.comm_free = end
        return True

    def _busy_until(self, rank: Rank, value: Value, time: float) -> float | None:
        """When a value may be overwritten, at the earliest at `time`; None while that is not known."""
        for place in places_of(value) if rank.sending else ():
            messages = rank.sending.get(place)
            if not messages:
                continue
            rank.sending[place] = messages = [m for m in messages if m.end is None or m.end > time]
            for message in messages:
                if message.end is None:
                    rank.held_up = True
                    return None
                time = max(time, message.end)
        return time

    def _transfer(self, message: Message, time: float) -> None:
        sender = self._ranks[message.sender]
        assert message.send is not None
        size = self._costs.size(message.send.value, self._program.goal)
        message.start = max(time, sender.port_free)
        seconds = self._costs.transfer(message.send)
        if seconds is None:
            seconds = self._costs.link(message.sender, message.receiver).seconds(size)
        end = message.start + seconds
        message.end = sender.port_free = end
        peer, number = message.receiver, message.index
        self._events.append(
            Event(message.sender, Lane.COMM, message.send, message.start, end, 1, size, size, peer=peer, number=number)
        )

    def _meet(self, rank: Rank, op: GroupOp) -> bool:
        """Take part in what a group does; False while somebody has not come, or this rank is not ready."""
        group = self._groups[rank.number, op]
        arrived = self._arrived[op, group, rank.met[op]]
        if rank.number not in arrived:
            needed = rank.rules.needs(op)
            if not all(value in rank.ready for value in needed):
                return False
            arrived[rank.number] = max([rank.comm_free, *(rank.ready[value] for value in needed)])
            if len(arrived) == len(group):
                self._to_advance.extend(self._ranks[other] for other in group if other != rank.number)
        if len(arrived) < len(group):
            return False
        start, share = max(arrived.values()), self._shares.shares(op, group)[group.index(rank.number)]
        end = start + share.seconds
        size = self._costs.size(op.value, self._program.goal)
        event = Event(rank.number, Lane.COMM, op, start, end, share.messages, share.bytes, size)
        asked = arrived[rank.number]
        self._events.append(event._replace(issued=asked, group=group, number=rank.met[op]))
        rank.ready[op.value] = rank.comm_free = end
        rank.met[op] += 1
        return True

    def _join(self, rank: Rank) -> bool:
        """Both lanes stand before the same Join: let them go on together."""
        lanes = (rank.compute, rank.compute_at), (rank.comm, rank.comm_at)
        if not all(at < len(ops) and isinstance(ops[at], Join) for ops, at in lanes):
            return False
        rank.compute_free = rank.comm_free = max(rank.compute_free, rank.comm_free)
        rank.compute_at += 1
        rank.comm_at += 1
        return True

    def _message(self, channel: tuple[int, int], index: int) -> Message:
        messages = self._messages[channel]
        if index == len(messages):
            messages.append(Message(*channel, index=index))
        return messages[index]

    def _require_end(self) -> None:
        for messages in self._messages.values():
            for message in messages:
                if message.send is not None and message.posted is None:
                    raise ProgramError(
                        f"program {self._program.name!r} loses a message: rank {message.sender} does {message.send}, "
                        "and nobody receives it; mp.verify says more"
                    )
        hint = ", and mp.schedules.lower adds the messages that are missing" if self._program.sends_nothing else ""
        for rank in self._ranks:
            for ops, at in ((rank.compute, rank.compute_at), (rank.comm, rank.comm_at)):
                if at < len(ops):
                    raise ProgramError(
                        f"program {self._program.name!r} does not come to its end: rank {rank.number} stands at "
                        f"{ops[at]} for ever; mp.verify says why{hint}"
                    )


def _arrival(message: Message, op: Recv, start: float, end: float) -> Event:
    return Event(message.receiver, Lane.COMM, op, start, end, peer=message.sender, number=message.index)
