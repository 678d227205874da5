"""All-reduce through rank 0: is it the sum, on every rank, in place, with one message in and one out for each?"""

from __future__ import annotations

from typing import Any

import torch

from microparallel.errors import ProgramError
from microparallel.learn.exam import Exam
from microparallel.learn.graders._collectives import contribution, counted_in_words, program_of
from microparallel.learn.log import SENDS, Row, calls
from microparallel.learn.requirements import Suspect, require_equal, require_like
from microparallel.learn.verdict import Wrong
from microparallel.program import Collective
from microparallel.verifier import Unreached, verify

_ALLOWED = ("send_tensor", "recv_tensor")
_GOAL = Collective("all-reduce", 1)


def check(exam: Exam) -> None:
    """The sum; other shapes and dtypes; twice; messages and bytes."""
    with exam.step("two ranks have the sum"):
        _require_sum(exam, 2, (4,), torch.float32)
    with exam.step("four ranks have the sum of a matrix, in float64") as notes:
        _require_few_messages(_require_sum(exam, 4, (2, 3), torch.float64), 6 * 8, notes)
    with exam.step("integers are summed, too; and in a world of one rank nothing changes"):
        _require_sum(exam, 3, (5,), torch.int64)
        _require_sum(exam, 1, (5,), torch.int64)


def _reduce(learner: Any, comms: Any, shape: tuple[int, ...], dtype: torch.dtype) -> list[tuple[torch.Tensor, Row]]:
    """All-reduce twice: a sum, and after it another one."""
    found = []
    for _ in range(2):
        tensor, before = contribution(comms.rank, shape, dtype), len(comms.row)
        comms.log.watched = tensor
        learner.naive_all_reduce(tensor, comms)
        require_like(tensor, contribution(comms.rank, shape, dtype), f"rank {comms.rank}'s tensor")
        found.append((tensor, comms.row[before:]))
    return found


def _require_sum(exam: Exam, ranks: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Row]:
    """Refuse what is not the sum; returns what the ranks did."""
    results = exam.run(_reduce, ranks, shape, dtype, allowed=_ALLOWED)
    own = [contribution(rank, shape, dtype) for rank in range(ranks)]
    total = torch.stack(own).sum(0)
    for number, which in enumerate(("", "the second all-reduce: ")):
        found, rows = [mine[number][0] for mine in results], [mine[number][1] for mine in results]
        right = [torch.equal(one, total) for one in found]
        program = program_of(_GOAL, own, rows, found)
        try:
            if program is not None:
                verify(program, completed=False)
        except Unreached as error:
            if not all(right):
                raise Wrong(
                    which + _in_words(error.rank, [error.found.get((rank, 0), 0) for rank in range(ranks)])
                ) from None
            _require_few_messages(rows, total.nbytes, [])
        except ProgramError as error:
            raise Wrong(f"{which}{error}") from None
        for rank in [*range(1, ranks), 0]:  # rank 0's mistakes show on the others first, and clearer
            suspects = [
                Suspect(
                    total / ranks, "this is the mean: an all-reduce adds up, and the caller divides if it wants a mean"
                ),
                Suspect(own[rank], _in_words(rank, [int(other == rank) for other in range(ranks)], right[0])),
            ]
            require_equal(found[rank], total, f"{which}rank {rank}'s tensor, {ranks} ranks,", suspects)
    return [mine[0][1] for mine in results]


def _in_words(rank: int, counts: list[int], complete: bool = True) -> str:
    """Name the mistake that leaves a rank with this sum; `counts` says how often each rank is in it."""
    if counts == [int(other == rank) for other in range(len(counts))]:
        if rank == 0:
            return (
                "rank 0 still holds its own numbers: nothing was added in place (tensor.add_); `tensor = tensor + …` "
                "only gives a new tensor that name"
            )
        back = ", though rank 0 has the sum: every rank needs it" if complete else ": nothing was added"
        return f"rank {rank} still holds its own numbers{back}"
    if rank == 0 and sum(counts) == counts[-1] == 1:
        return (
            f"rank 0 has what came last, rank {len(counts) - 1}'s numbers, and nothing else: add what comes "
            "(tensor.add_), and do not replace what is there"
        )
    if rank and sum(counts) == counts[0] == 1:
        return f"rank {rank} has rank 0's own numbers: it was sent them before anything had been added"
    if counts == [1 + (other == rank) for other in range(len(counts))]:
        return f"rank {rank} added the sum to its own numbers, which are in it already: replace them (tensor.copy_)"
    if max(counts) > 1:
        return f"in rank {rank}'s sum there is what {counted_in_words(counts)} put in: every rank counts once"
    why = (
        ", though rank 0 has the whole sum: send it only when the last tensor has come"
        if rank
        else ": did rank 0 receive from all others before it sent the sum?"
    )
    return f"in rank {rank}'s sum there is only what {counted_in_words(counts)} put in{why}"


def _require_few_messages(rows: list[Row], size: int, notes: list[str]) -> None:
    ranks, sent = len(rows), [calls(row, *SENDS) for row in rows]
    messages, most = sum(map(len, sent)), 2 * (ranks - 1)
    total = [sum(one.bytes for one in mine) for mine in sent]
    if messages > most:
        raise Wrong(
            f"the sum is right, but {messages} messages were sent, {sum(total)} bytes; through rank 0, "
            f"{most} messages and {most * size} bytes are enough: one from each other rank to rank 0, and one back"
        )
    if messages < most:
        raise Wrong(
            f"the sum is right, but {messages} messages were sent, and {most} are needed: one from each other rank to "
            "rank 0, and one back"
        )
    for rank in reversed(range(ranks)):  # who sends past rank 0 is not rank 0
        peers = sorted(one.peer for one in sent[rank])
        if rank and any(peers):
            raise Wrong(
                f"the sum is right, but rank {rank} sends to rank {max(peers)}: here everything goes through rank 0, "
                "which adds up"
            )
        if peers != ([0] if rank else list(range(1, ranks))) or any(one.bytes != size for one in sent[rank]):
            messages_sent = ", ".join(f"{one.bytes} bytes to rank {one.peer}" for one in sent[rank])
            raise Wrong(
                f"the sum is right, but rank {rank} sends {messages_sent}: one whole tensor, {size} bytes, goes to "
                "rank 0 from each other rank, and one back"
            )
    notes.append(f"rank 0 sends {total[0]} bytes, each of the others {total[1]}")
