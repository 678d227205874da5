"""A ball between two ranks: does it come back, with one added on either side, however often?"""

from __future__ import annotations

from typing import Any

import torch

from microparallel.errors import Mismatch
from microparallel.learn.exam import Exam
from microparallel.learn.graders._common import require_all_waited
from microparallel.learn.log import SENDS, calls
from microparallel.learn.requirements import Suspect, require_equal, require_like
from microparallel.learn.verdict import Wrong

_STRANGE = 1000.0  # what rank 1's own ball is filled with, whose numbers do not count


def check(exam: Exam) -> None:
    """One round; several; other dtypes and shapes."""
    with exam.step("one round: there and back"):
        _require_rounds(exam, 1)
    with exam.step("three rounds") as notes:
        _require_rounds(exam, 3)
        notes.append("6 messages")
    with exam.step("also with whole numbers, with a matrix, and without a round"):
        _require_rounds(exam, 2, torch.int64)
        _require_rounds(exam, 2, torch.float64, (2, 3))
        _require_rounds(exam, 0)


def _ball(rank: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape) * 10.0
    return (numbers if rank == 0 else torch.full(shape, _STRANGE)).to(dtype)


def _play(learner: Any, comms: Any, rounds: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    ball = _ball(comms.rank, dtype, shape)
    before = ball.clone()
    try:
        found = learner.ping_pong(ball, rounds, comms)
    except Mismatch:
        line = calls(comms.row)[-1].line
        raise Wrong(
            f"rank {comms.rank}, line {line}: what was sent and what the receiver asks for are not alike; a ball has "
            "one shape and one dtype on its whole way (recv_tensor expects float32 unless it is told)"
        ) from None
    require_all_waited(comms)
    if not torch.equal(require_like(ball, before, f"rank {comms.rank}'s own ball"), before):
        raise Wrong(
            f"rank {comms.rank}'s caller finds its own tensor changed: add one to what was received, not to the tensor "
            "that you were given"
        )
    if found is None:
        raise Wrong(f"rank {comms.rank} returned nothing: return the ball as it was last")
    for call in calls(comms.row, *SENDS):
        if call.bytes != before.nbytes:
            raise Wrong(
                f"rank {comms.rank}, line {call.line}: a message of {call.bytes} bytes, and the ball has "
                f"{before.nbytes}: it is the ball that goes back and forth"
            )
    return require_like(found, before, f"what rank {comms.rank} returns").detach()


def _require_rounds(exam: Exam, rounds: int, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (3,)) -> None:
    results = exam.run(_play, 2, rounds, dtype, shape)
    start = _ball(0, dtype, shape)
    many = f"{rounds} round{'s' * (rounds != 1)}"
    for rank, row in enumerate(exam.rows):
        if (messages := len(calls(row, *SENDS))) != rounds:
            raise Wrong(
                f"rank {rank} sent {messages} messages in {many}: in every round one goes there and one comes back"
            )
    expected = [start + 2 * rounds, start + 2 * rounds - 1 if rounds else _ball(1, dtype, shape)]
    for rank in (1, 0):
        found = results[rank]
        suspects = _suspects(rank, rounds, start, expected[rank], found)
        require_equal(found, expected[rank], f"rank {rank}'s ball after {many}", suspects)


def _suspects(
    rank: int, rounds: int, start: torch.Tensor, expected: torch.Tensor, found: torch.Tensor
) -> list[Suspect]:
    played_with_its_own = found if bool((found >= _STRANGE).all()) else torch.empty(0)
    return [
        Suspect(
            _ball(1, start.dtype, tuple(start.shape)), f"rank {rank} still has its own ball: keep what it receives"
        ),
        Suspect(
            played_with_its_own,
            f"rank {rank} plays with rank 1's own ball, whose numbers do not count: rank 1 begins by receiving",
        ),
        # In a first round rank 1 was looked at before, so whatever is missing was not added by this rank.
        Suspect(expected - 1 if rounds == 1 else torch.empty(0), f"rank {rank} does not add one to what it receives"),
        Suspect(
            expected + 1 if rounds == 1 else torch.empty(0),
            f"rank {rank} adds one one time too many: once for each time it receives",
        ),
        Suspect(
            start + 2 - rank,
            "every round begins with the same ball again: what came back is what the next round sends",
        ),
    ]
