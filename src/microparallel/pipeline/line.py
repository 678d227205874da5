"""One order for the messages of all ranks, for transports that run a rank's messages one after another, as NCCL does.

There a message holds up those behind it, and it ends only when its receiver has come to it. If every rank keeps to one
and the same order of all messages, the first that has not ended is at the head of its sender's line and of its
receiver's, so it moves, and nobody waits for ever:

```
program   rank 0: F0.0 >A0.0@1 F0.1 >A0.1@1 <G0.0@1 B0.0        rank 1: <A0.0@0 F1.0 B1.0 >G0.0@0 <A0.1@0 F1.1
alone     rank 0: >A0.0 │ >A0.1 │ <G0.0                         rank 1: <A0.0 │ >G0.0 │ <A0.1        both send
in line   rank 0: >A0.0 │ >A0.1 │ <G0.0                         rank 1: <A0.0 │ <A0.1 │ >G0.0
```

A receive may so be posted before it is needed: here rank 1 takes A0.1 before it hands over G0.0.
"""

from __future__ import annotations

import heapq

from microparallel.program import Cursor, Op, Policy, Program, Recv, Send, Walk, halves


def line_up(program: Program) -> list[list[Send | Recv]]:
    """For each rank its sends and receives, in an order that all ranks keep: that in which they could be sent.

    What a rank sends before it waits for a message is in front of that message, so it never has to wait for itself.
    """
    lines: list[list[Send | Recv]] = [[] for _ in program.ranks]
    for cursor in Walk(program, _InTurns()):
        if isinstance(cursor.op, Send):
            lines[cursor.rank].append(cursor.op)
            lines[cursor.op.to].append(Recv(cursor.op.value, cursor.rank))
    return lines


class _InTurns(Policy):
    """Ranks take turns, from the first to the last and again; in each turn a rank computes once."""

    def turn_ends(self, op: Op) -> bool:
        """A computation ends a rank's turn."""
        return bool(halves(op))

    def queue(self) -> _Turns:
        """Whose turn it is."""
        return _Turns()


class _Turns:
    """Ranks that can go on: those further down in this turn, the others in the next."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, Cursor]] = []  # by turn and rank
        self._now = (0, -1)

    def append(self, cursor: Cursor) -> None:
        turn, rank = self._now
        heapq.heappush(self._waiting, (turn + (cursor.rank <= rank), cursor.rank, cursor))

    def popleft(self) -> Cursor:
        *now, cursor = heapq.heappop(self._waiting)
        self._now = (now[0], now[1])
        return cursor

    def __len__(self) -> int:
        return len(self._waiting)
