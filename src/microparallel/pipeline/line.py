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

from collections.abc import Iterator

from microparallel.program import Program, Recv, Send, halves

Message = tuple[Send, Recv]


def line_up(program: Program) -> list[list[Send | Recv]]:
    """For each rank its sends and receives, in an order that all ranks keep: that in which they could be sent.

    What a rank sends before it waits for a message is in front of that message, so it never has to wait for itself.
    """
    lines: list[list[Send | Recv]] = [[] for _ in program.ranks]
    for send, recv in _in_order(program):
        lines[recv.source].append(send)
        lines[send.to].append(recv)
    return lines


def _in_order(program: Program) -> Iterator[Message]:
    """All messages, as ranks send them that take turns; in each turn a rank computes once."""
    place = [0] * program.world_size
    sent: set[tuple[int, Recv]] = set()  # the receiver, and its receive
    moving = True
    while moving:
        moving = False
        for rank, ops in enumerate(program.ranks):
            for op in ops[place[rank] :]:
                if isinstance(op, Recv) and (rank, op) not in sent:
                    break
                place[rank] += 1
                moving = True
                if isinstance(op, Send):
                    message = op, Recv(op.value, rank)
                    sent.add((op.to, message[1]))
                    yield message
                elif halves(op):
                    break
