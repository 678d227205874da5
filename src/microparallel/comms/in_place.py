"""A faster interpreter for ranks that read each other's tensors on a GPU: the hosts meet once a call.

`perform` (`interpreter.py`) lets the hosts meet for each message: its sender says where the tensor lies. But of most
programs every message is a slice of the one tensor that the call is about, and all ranks know the program. So here each
rank says once where its tensor lies. All else the GPU does by itself, in the order of the program: a stream that wants
to read waits until the peer's has written how far it has come.

```
direct, rank 0 of 2     >C1@1 <+C0@1 | >C0@1 <C1@1
host                    say where ─ wait for rank 1 to say ─▶ all of this is asked for at once:
stream                  write ready+1 │ wait for 1's ready+1 │ C0 += 1's C0 │ write read+1, ready+2
                        │ wait for 1's ready+2, read+1 │ C1 := 1's C1 │ write read+2 │ wait for 1's read+2
```

Programs that send what lies elsewhere (parts), or that add to what they have just sent, are performed as ever.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch

from microparallel.comms.interpreter import Memory, RankProgram, Sums
from microparallel.program import Op, Program, Recv, Send, Slices
from microparallel.transport.cuda import CudaTransport
from microparallel.transport.shared_memory.channel import STEPS
from microparallel.transport.shared_memory.order import Marks
from microparallel.transport.shared_memory.works import Borrowed, CallState, Lent, Sent

_MOST_VIEWS = 4096


class Message(NamedTuple):
    """A slice that goes from one rank to another: which of the messages between the two it is, counted from 1."""

    peer: int
    number: int
    value: Slices


class Reading(NamedTuple):
    """A message that is received: where it goes, and whether it is added there."""

    message: Message
    into: Slices
    reduce: bool


class Step(NamedTuple):
    """One round: what the others may read from now on, what they must have read before, and what is read."""

    ready: tuple[Message, ...]
    left: tuple[Message, ...]
    readings: tuple[Reading, ...]


class Plan(NamedTuple):
    """What one rank asks of its GPU in a program.

    Attributes:
        slices: into how many the tensor is cut.
        steps: in order.
        to: how many messages go to each rank.
        sources: the ranks that this one reads.
    """

    slices: int
    steps: tuple[Step, ...]
    to: dict[int, int]
    sources: tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def plan_of(program: RankProgram) -> Plan | None:
    """How a rank performs its program in place; None, on all ranks, if it cannot."""
    plans = plans_of(program.whole) if program.whole is not None else ()
    return plans[program.rank] if plans else None


def plans_of(program: Program) -> tuple[Plan, ...]:
    """How all ranks perform a program in place; empty if they cannot."""
    ranks = [RankProgram.of(program, rank) for rank in range(program.world_size)]
    messages = [list(_sent(ops)) for ops in program.ranks]
    in_slices = all(
        isinstance(op.value, Slices) for ops in program.ranks for op in ops if isinstance(op, Send | Recv)
    ) and not any(one.adds for of_rank in ranks for one in of_rank.rounds)
    if not in_slices or any(one.adds_to_sent for one in ranks):
        return ()
    if any(message.number >= STEPS for sent in messages for message in sent):
        return ()
    return tuple(_plan(of_rank, rank, messages) for rank, of_rank in enumerate(ranks))


def _sent(ops: tuple[Op, ...]) -> Iterator[Message]:
    counts: Counter[int] = Counter()
    for op in ops:
        if isinstance(op, Send):
            counts[op.to] += 1
            assert isinstance(op.value, Slices)
            yield Message(op.to, counts[op.to], op.value)


def _plan(program: RankProgram, rank: int, messages: list[list[Message]]) -> Plan:
    arriving = {
        source: iter([message for message in sent if message.peer == rank]) for source, sent in enumerate(messages)
    }
    mine, steps = messages[rank], []
    for current in program.rounds:
        readings = []
        for write in current.receives:
            source = write.op.source
            message = next(arriving[source])
            assert isinstance(write.op.value, Slices)
            readings.append(
                Reading(Message(source, message.number, message.value), write.op.value, bool(write.op.reduce))
            )
        ready = tuple(mine[current.first : current.first + len(current.sends)])
        left = tuple(mine[number] for write in current.receives for number in write.after)
        steps.append(Step(ready, left, tuple(readings)))
    sources = sorted({reading.message.peer for step in steps for reading in step.readings})
    first = [(source - rank) % len(messages) for source in sources]  # those next to this rank, so that all begin apart
    return Plan(
        program.slices,
        tuple(steps),
        dict(Counter(message.peer for message in mine)),
        tuple(source for _, source in sorted(zip(first, sources, strict=True))),
    )


class Views:
    """The peers' tensors that were read before, cut into slices: to make them anew takes longer than to find them."""

    def __init__(self) -> None:
        self._memories: dict[tuple[object, ...], Memory] = {}

    def of(self, source: int, borrowed: Borrowed, like: torch.Tensor, slices: int) -> Memory:
        """What was borrowed, as tensors like one of this rank."""
        place = source, *borrowed.place, borrowed.size, like.dtype, slices
        memory = self._memories.get(place)
        if memory is None:
            if len(self._memories) == _MOST_VIEWS:
                self._memories.clear()
            memory = self._memories[place] = Memory(borrowed.bytes().view(like.dtype), slices)
        return memory


def perform_in_place(
    plan: Plan,
    memory: Memory,
    sums: Sums,
    transport: CudaTransport,
    views: Views,
    call: CallState,
    timeout: float | None,
) -> None:
    """Do one rank's part: meet the others once, and ask all of the GPU.

    Args:
        plan: what to do.
        memory: the call's tensor.
        sums: combines what is read with it.
        transport: reads the peers' tensors.
        views: of the peers' tensors.
        call: carries the signature that ranks compare.
        timeout: seconds for each rank to come.
    """
    tensor, marks = memory.tensor, transport.order.marks()
    sent = transport.offer_to(tensor, list(plan.to), call.signature)
    marks.hand_over()
    lent, theirs = {}, {}
    for source in plan.sources:
        lent[source] = borrowed = Lent(transport, tensor, source, call).come(timeout)
        theirs[source] = views.of(source, borrowed, tensor, plan.slices)
    for step in plan.steps:
        _do(step, sums, marks, sent, lent, theirs)
    sums.finish()
    for to, count in plan.to.items():
        sent[to].after_reading(marks, count)
    marks.hand_over()


def _do(
    step: Step, sums: Sums, marks: Marks, sent: dict[int, Sent], lent: dict[int, Borrowed], theirs: dict[int, Memory]
) -> None:
    for message in step.ready:
        sums.settle(message.value)
        sent[message.peer].is_ready(marks, message.number)
    for message in step.left:
        sent[message.peer].after_reading(marks, message.number)
    for (source, number, _), _, _ in step.readings:
        lent[source].after_ready(marks, number)
    marks.hand_over()
    for (source, number, value), into, reduce in step.readings:
        if reduce:
            sums.add(into, theirs[source][value])
        else:
            sums[into].copy_(theirs[source][value])
        lent[source].is_read(marks, number)
