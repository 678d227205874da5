"""Walk through a program without tensors or time: which operation can happen next, and who waits for whom?

Every rank does its operations in order. What a Send means decides when it holds its rank up:

- *buffered*: it completes at once;
- *rendezvous*: its rank goes on, but may not overwrite the value before the matching Recv has been posted. A Recv is
  posted when its rank comes to it; if it overwrites its place, not before what is there has left;
- *blocking*: its rank stops until the matching Recv has been posted.

An AllReduce or a Broadcast waits until all ranks that take part stand at it. Lanes play no role here: what comes to its
end one operation after another does so all the more when some of them overlap.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from microparallel.program import Add, GroupOp, Op, Program, Recv, Send, Value, touch

Sends = Literal["buffered", "rendezvous", "blocking"]
Visit = Callable[[int, int, Op], None]  # rank, place in its list, operation


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank that cannot go on, what it is about to do, and the rank it waits for."""

    rank: int
    place: int
    deed: str
    on: int

    def __str__(self) -> str:
        return f"rank {self.rank} {self.deed}"


class Execution:
    """One walk through a program, under one meaning of Send."""

    def __init__(self, program: Program, sends: Sends) -> None:
        self._program = program
        self._sends = sends
        self._done = [0] * program.world_size  # operations each rank has done
        self._sent: Counter[tuple[int, int]] = Counter()
        self._received: Counter[tuple[int, int]] = Counter()
        self._under_way: list[list[tuple[Value, int, int]]] = [[] for _ in program.ranks]  # value, receiver, number
        self._at_receive: set[int] = set()  # ranks that have posted the receive they stand at
        self._groups = program.groups()
        self._met: Counter[tuple[int, GroupOp]] = Counter()  # how often each rank has done what a group does

    def run(self, visit: Visit) -> list[Wait]:
        """Do what can be done, telling `visit` of each operation; returns the waits that are left at the end."""
        waits: dict[int, Wait] = {}
        waiters: dict[int, set[int]] = defaultdict(set)
        to_try = deque(range(self._program.world_size))
        stood_at = [(-1, False)] * self._program.world_size
        while to_try:
            rank = to_try.popleft()
            wait = self._advance(rank, visit)
            waits.pop(rank, None)
            if wait is not None:
                waits[rank] = wait
                waiters[wait.on].add(rank)
            stands_at = (self._done[rank], rank in self._at_receive)
            if stands_at != stood_at[rank]:
                # It has done something, or posted a receive: whoever waited for it may go on.
                stood_at[rank] = stands_at
                to_try.extend(sorted(waiters.pop(rank, ())))
        return [waits[rank] for rank in sorted(waits)]

    def _advance(self, rank: int, visit: Visit) -> Wait | None:
        ops = self._program.ranks[rank]
        while self._done[rank] < len(ops):
            op = ops[self._done[rank]]
            wait = self._obstacle(rank, op)
            if wait is not None:
                return wait
            visit(rank, self._done[rank], op)
            self._do(rank, op)
        return None

    def _do(self, rank: int, op: Op) -> None:
        self._done[rank] += 1
        if isinstance(op, Send):
            self._sent[rank, op.to] += 1
            self._under_way[rank].append((op.value, op.to, self._sent[rank, op.to]))
        elif isinstance(op, Recv):
            self._received[op.source, rank] += 1
            self._at_receive.discard(rank)
        elif isinstance(op, GroupOp):
            self._met[rank, op] += 1

    def _obstacle(self, rank: int, op: Op) -> Wait | None:
        if isinstance(op, Send):
            next_number = self._sent[rank, op.to] + 1
            if self._sends == "blocking" and self._posted(rank, op.to) < next_number:
                return self._wait(rank, f"sends {op.value} to rank {op.to}", op.to)
            return None
        if isinstance(op, Recv):
            return self._obstacle_to_receiving(rank, op)
        if isinstance(op, Add):
            return self._hazard(rank, op.into)
        if isinstance(op, GroupOp):
            return self._absent(rank, op)
        return None

    def _obstacle_to_receiving(self, rank: int, op: Recv) -> Wait | None:
        if rank not in self._at_receive:
            # What is only added may arrive beside its place.
            wait = None if op.reduce else self._hazard(rank, op.value)
            if wait is not None:
                return wait
            self._at_receive.add(rank)
        if self._sent[op.source, rank] <= self._received[op.source, rank] and not self._offered(op.source, rank):
            return self._wait(rank, f"waits for {op.value} from rank {op.source}", op.source)
        return self._hazard(rank, op.value)

    def _absent(self, rank: int, op: GroupOp) -> Wait | None:
        """A rank that takes part in this operation and has not come to it."""
        times = self._met[rank, op]
        if any(self._met[other, op] > times for other in self._groups[rank, op]):
            return None  # all were here when the first went on
        for other in self._groups[rank, op]:
            if self._next(other) != op or self._met[other, op] < times:
                return self._wait(rank, f"waits for rank {other} at {op}", other)
        return None

    def _hazard(self, rank: int, written: Value) -> Wait | None:
        """A value that is still being sent must not be overwritten."""
        if self._sends == "buffered":
            return None
        open_sends = [send for send in self._under_way[rank] if self._posted(rank, send[1]) < send[2]]
        self._under_way[rank] = open_sends
        for value, receiver, _ in open_sends:
            if touch(value, written):
                return self._wait(
                    rank, f"must not overwrite {written} while it sends {value} to rank {receiver}", receiver
                )
        return None

    def _posted(self, sender: int, receiver: int) -> int:
        """How many receives of this channel have been posted: those done, and the one its rank may stand at."""
        op = self._next(receiver) if receiver in self._at_receive else None
        return self._received[sender, receiver] + int(isinstance(op, Recv) and op.source == sender)

    def _offered(self, sender: int, receiver: int) -> bool:
        """Whether a blocking send stands ready for this receive."""
        op = self._next(sender)
        return self._sends == "blocking" and isinstance(op, Send) and op.to == receiver

    def _next(self, rank: int) -> Op | None:
        ops = self._program.ranks[rank]
        return ops[self._done[rank]] if self._done[rank] < len(ops) else None

    def _wait(self, rank: int, deed: str, on: int) -> Wait:
        return Wait(rank, self._done[rank], deed, on)
