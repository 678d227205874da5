"""The program of a collective that a learner wrote: which slice each rank sent, and what it did with what came.

The log copies a rank's tensor whenever the rank communicates. What the rank sends is the slice that has the same
numbers. What has changed in the tensor since the rank received something says where the message went, and whether it
was added or replaced what was there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from microparallel.learn.log import RECEIVES, SENDS, Called, Row
from microparallel.learn.verdict import Wrong
from microparallel.program import Collective, Op, Program, Recv, Send, Slices


def program_of(
    goal: Collective, given: Sequence[torch.Tensor], rows: Sequence[Row], found: Sequence[torch.Tensor]
) -> Program | None:
    """What the ranks did from what they were given to what was found; None if no program can say it."""
    ranks = [_operations(*one, goal.slices) for one in zip(given, rows, found, strict=True)]
    whole = [tuple(ops) for ops in ranks if ops is not None]
    return Program(f"your {goal.kind}", goal, tuple(whole)) if len(whole) == len(ranks) else None


def _operations(given: torch.Tensor, row: Row, found: torch.Tensor, slices: int) -> list[Op] | None:
    arrived: list[Called] = []  # receives whose numbers have not been found in the tensor yet
    seen = [*(moment.tensor for moment in row if moment.tensor is not None), found]
    ops = _changes(given, seen[0], arrived, slices)
    for moment, before, after in zip(row, seen[:-1], seen[1:], strict=True):
        call = moment.op
        if isinstance(call, Called) and call.content is not None:
            if moment.phase == "begins" and call.call in SENDS:
                value = _which(call.content, before, slices)
                ops.append(None if value is None else Send(value, call.peer))
            elif moment.phase == "ends" and call.call in RECEIVES:
                arrived.append(call)
        ops += _changes(before, after, arrived, slices)
    for call in arrived:  # they changed nothing, perhaps since the same numbers had been there
        place = None if call.content is None else _which(call.content, found, slices)
        ops.append(None if place is None else Recv(place, call.peer))
    return None if None in ops else [op for op in ops if op is not None]


def _which(content: torch.Tensor, tensor: torch.Tensor, slices: int) -> Slices | None:
    """The slices of a tensor that have these numbers."""
    parts = _split(tensor, slices)
    for start, stop in itertools.combinations(range(slices + 1), 2):
        if torch.equal(torch.cat(parts[start:stop]), content.flatten()):
            return Slices(start, stop)
    return None


def _changes(before: torch.Tensor, after: torch.Tensor, arrived: list[Called], slices: int) -> list[Op | None]:
    """The receives that explain what has changed in a tensor; None where nothing that arrived explains it."""
    ops: list[Op | None] = []
    used: list[Called] = []
    for index, (old, new) in enumerate(zip(_split(before, slices), _split(after, slices), strict=True)):
        if torch.equal(old, new):
            continue
        ops.append(None)
        for call in reversed(arrived):
            assert call.content is not None
            content = call.content.flatten()
            came = content if content.shape == old.shape else _split(content, slices)[index]
            added = came.shape == old.shape and torch.equal(new, old + came)
            if added or torch.equal(new, came):
                ops[-1] = Recv(Slices(index, index + 1), call.peer, reduce=added)
                used.append(call)
                break
    arrived[:] = [call for call in arrived if call not in used]
    return ops


def _split(tensor: torch.Tensor, slices: int) -> list[torch.Tensor]:
    return list(tensor.flatten().tensor_split(slices))


# ── is it a ring? ───────────────────────────────────────────────────────────────────────────────────────────────────


def require_passed_on(program: Program, begins_with: str, in_hop: Callable[[int], str]) -> None:
    """Refuse what breaks the rule of the ring: what a rank sends is the slice that came to it the hop before.

    Args:
        program: what the ranks did.
        begins_with: with which slice a rank should begin, in words.
        in_hop: a hop in words.
    """
    ranks = program.world_size
    sent = [[op for op in ops if isinstance(op, Send)] for ops in program.ranks]
    begins = [mine[0].value for mine in sent if mine]
    for rank, begin in enumerate(begins):
        if begin in begins[:rank]:
            raise Wrong(
                f"wrong slice: in hop 0 ranks {begins.index(begin)} and {rank} both send {_slice(begin)}; each rank "
                f"begins with another one, {begins_with}"
            )
    for hop in range(1, min(map(len, sent))):
        for rank in range(ranks):
            before = [other for other in range(ranks) if sent[other][hop - 1].to == rank]
            sends = sent[rank][hop].value
            if before and sends != (came := sent[before[0]][hop - 1].value):
                raise Wrong(
                    f"wrong slice, {ranks} ranks: {in_hop(hop)} rank {rank} sends {_slice(sends)}, but in the hop "
                    f"before it received {_slice(came)} from rank {before[0]}: that is the one to pass on"
                )


def _slice(value: object) -> str:
    return f"slice {str(value).removeprefix('C')}"


def require_a_ring(rank: int, ranks: int, sent: Sequence[Called], size: int, halves: int) -> None:
    """Refuse another way to the same result: as cheap as a ring, perhaps, but not what the exercise is about."""
    strangers = [message.peer for message in sent if message.peer != (rank + 1) % ranks]
    if strangers:
        raise Wrong(
            f"the sum is right, but this is not the ring: rank {rank} sends to rank {strangers[0]}, which is not the "
            f"rank after it, {(rank + 1) % ranks}"
        )
    if len(sent) != halves * (ranks - 1):
        raise Wrong(
            f"the sum is right, but rank {rank} sent {len(sent)} messages, and in a ring of {ranks} it sends "
            f"{halves * (ranks - 1)}: {ranks - 1} in each half"
        )
    odd = [message.bytes for message in sent if message.bytes != size]
    if odd:
        raise Wrong(f"the sum is right, but rank {rank} sent a message of {odd[0]} bytes, and a slice has {size}")


# ── sums of which one can tell which ranks are in them ──────────────────────────────────────────────────────────────


def contribution(rank: int, shape: int | tuple[int, ...], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """What a rank puts into a sum: 1, 2, 3, … times 10 to the rank, so that every sum tells who is in it, how often."""
    numbers: torch.Tensor = torch.arange(1, torch.zeros(shape).numel() + 1) * 10**rank
    return numbers.to(dtype).reshape(shape)


def counts_in(found: torch.Tensor, ranks: int) -> list[int] | None:
    """How often each rank's contribution is in a sum; None if not every number says the same."""
    each = found.double().flatten() / torch.arange(1, found.numel() + 1)
    if not torch.equal(each, each[:1].round().expand_as(each)):
        return None
    return [int(each[0].item()) // 10**rank % 10 for rank in range(ranks)]


def counted_in_words(counts: Sequence[int]) -> str:
    """Which ranks are in a sum: "ranks 0 and 2", "rank 1 twice"."""
    times = {2: " twice", 3: " three times"}
    once = [str(rank) for rank, count in enumerate(counts) if count == 1]
    parts = [f"rank{'s' * (len(once) > 1)} {_and(once)}"] if once else []
    parts += [
        f"rank {rank}{times.get(count, f' {count} times')}" for rank, count in enumerate(counts) if count not in (0, 1)
    ]
    return _and(parts) or "no rank"


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
