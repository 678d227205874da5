"""All-reduce through rank 0: is it the sum, on every rank, in place, with one message in and one out for each?"""

from __future__ import annotations

from typing import Any

import torch

from microparallel.learn.exam import Exam
from microparallel.learn.graders._common_dp import contribution, counted, counted_in_words
from microparallel.learn.verdict import Wrong
from microparallel.learn.words import Suspect, require_equal, require_like

_ALLOWED = ("send_tensor", "recv_tensor")
Message = tuple[int, int]  # to whom, and how many bytes


def check(exam: Exam) -> None:
    """The sum; other shapes and dtypes; twice; messages and bytes."""
    with exam.step("two ranks have the sum"):
        _require_sum(exam, 2, (4,), torch.float32)
    with exam.step("so have four ranks, of a matrix, in float64") as notes:
        sent = _require_sum(exam, 4, (2, 3), torch.float64)
        _require_few_messages(sent, 6 * 8, notes)
    with exam.step("of integers, and in a world of one"):
        _require_sum(exam, 3, (5,), torch.int64)
        _require_sum(exam, 1, (5,), torch.int64)


def _reduce(
    learner: Any, comms: Any, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, list[Message]]:
    """All-reduce twice: a sum, and after it another one."""
    first, second = contribution(comms.rank, shape, dtype), contribution(comms.rank, shape, dtype)
    learner.naive_all_reduce(first, comms)
    sent = [(entry.peer, entry.bytes) for entry in comms.sent()]
    learner.naive_all_reduce(second, comms)
    for one in (first, second):
        require_like(one, contribution(comms.rank, shape, dtype), f"rank {comms.rank}'s tensor")
    return first, second, sent


def _require_sum(exam: Exam, ranks: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[list[Message]]:
    """Refuse what is not the sum; returns the messages that each rank has sent."""
    results = exam.run(_reduce, ranks, shape, dtype, allowed=_ALLOWED)
    own = [contribution(rank, shape, dtype) for rank in range(ranks)]
    expected = torch.stack(own).sum(0)
    _require_added(results[0][0], own)
    for rank in [*range(1, ranks), 0]:  # rank 0's mistakes show on the others first, and clearer
        first, second, _ = results[rank]
        what = f"rank {rank}'s tensor, {ranks} ranks,"
        require_equal(first, expected, what, _suspects(first, own, rank, results[0][0]))
        require_equal(second, expected, f"the second all-reduce: {what}", _suspects(second, own, rank, results[0][1]))
    return [sent for _, _, sent in results]


def _require_added(middle: torch.Tensor, own: list[torch.Tensor]) -> None:
    """Refuse a rank 0 that has kept only what came last."""
    if len(own) > 1 and torch.equal(middle, own[-1]):
        raise Wrong(
            f"rank 0 has what came last, rank {len(own) - 1}'s numbers, and nothing else: add what comes "
            "(tensor.add_), and do not replace what is there"
        )


def _suspects(found: torch.Tensor, own: list[torch.Tensor], rank: int, middle: torch.Tensor) -> list[Suspect]:
    """The mistakes that leave this on a rank, when `middle` is what rank 0 has."""
    ranks, total = len(own), torch.stack(own).sum(0)
    complete = torch.equal(middle, total)
    suspects = [
        Suspect(total / ranks, "this is the mean: an all-reduce adds up, and whoever wants a mean divides later"),
        Suspect(own[rank], _own_numbers(rank, complete)),
    ]
    if rank:
        suspects += [
            Suspect(own[0], f"rank {rank} has rank 0's own numbers: it was sent them before anything had been added"),
            Suspect(
                total + own[rank],
                f"rank {rank} added the sum to its own numbers, which are in it already: replace them (tensor.copy_)",
            ),
        ]
    counts = counted(found, own)
    if counts:
        suspects.append(Suspect(found, _partial(rank, counts, complete)))
    return suspects


def _own_numbers(rank: int, complete: bool) -> str:
    if rank == 0:
        return (
            "rank 0 still holds its own numbers: nothing was added in place (tensor.add_); `tensor = tensor + …` only "
            "gives a new tensor that name"
        )
    if complete:
        return f"rank {rank} still holds its own numbers, though rank 0 has the sum: it must come back to everybody"
    return f"rank {rank} still holds its own numbers: nothing was added"


def _partial(rank: int, counts: list[int], complete: bool) -> str:
    who = f"in rank {rank}'s sum there is only what {counted_in_words(counts)} put in"
    if max(counts) > 1:
        return f"in rank {rank}'s sum there is what {counted_in_words(counts)} put in: everybody counts once"
    if complete:
        return f"{who}, though rank 0 has the whole sum: send it only when the last tensor has come"
    return f"{who}: did rank 0 receive from everybody before it sent the sum?"


def _require_few_messages(sent: list[list[Message]], size: int, notes: list[str]) -> None:
    ranks = len(sent)
    messages, most = sum(map(len, sent)), 2 * (ranks - 1)
    total = [sum(size for _, size in mine) for mine in sent]
    if messages > most:
        raise Wrong(
            f"the sum is right, but {messages} messages were sent, {sum(total)} bytes; through rank 0, "
            f"{most} messages and {most * size} bytes are enough: one from everybody to rank 0, and one back"
        )
    if messages < most:
        raise Wrong(
            f"the sum is right, but {messages} messages were sent, and {most} are needed: one from everybody to rank "
            "0, and one back"
        )
    for rank in reversed(range(ranks)):  # who sends past rank 0 is not rank 0
        mine = sent[rank]
        peers = sorted(peer for peer, _ in mine)
        if rank and any(peers):
            raise Wrong(
                f"the sum is right, but rank {rank} sends to rank {max(peers)}: here everything goes through rank 0, "
                "which adds up"
            )
        if peers != ([0] if rank else list(range(1, ranks))) or any(bytes_ != size for _, bytes_ in mine):
            raise Wrong(
                f"the sum is right, but rank {rank} sends {', '.join(map(_in_words, mine))}: one whole tensor, "
                f"{size} bytes, goes to rank 0 from everybody, and one back"
            )
    notes.append(f"rank 0 sends {total[0]} bytes, each of the others {total[1]}")


def _in_words(message: Message) -> str:
    return f"{message[1]} bytes to rank {message[0]}"
