"""Round the ring: is it the sum, on every rank, the same bits, with as few bytes as possible?"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from microparallel.errors import ProgramError
from microparallel.learn.exam import Exam
from microparallel.learn.graders._collectives import (
    contribution,
    counted_in_words,
    program_of,
    require_a_ring,
    require_passed_on,
)
from microparallel.learn.graders._common import require_all_waited
from microparallel.learn.log import SENDS, calls
from microparallel.learn.requirements import Suspect, listed, require_equal, require_like
from microparallel.learn.verdict import Wrong
from microparallel.program import Collective, Program, Recv
from microparallel.verifier import Unmatched, Unreached, verify


def check(exam: Exam) -> None:
    """The sum; other sizes and dtypes; messages and bytes."""
    with exam.step("two ranks have the sum"):
        _require_sum(exam, 2, 4)
    with exam.step("three and four ranks have the sum"):
        _require_sum(exam, 3, 6)
        _require_sum(exam, 4, 8)
    with exam.step("also when the tensor does not divide evenly, and for integers"):
        _require_sum(exam, 3, 7)
        _require_sum(exam, 4, 2)
        _require_sum(exam, 3, 8, torch.int64)
    with exam.step("no rank sends more than 2(p−1)/p of the tensor, and all have the same bits") as notes:
        _require_few_bytes(exam, 4, 64, notes)
    with exam.step("in a world of one rank nothing changes"):
        _require_sum(exam, 1, 5)


def _reduce(learner: Any, comms: Any, size: int, dtype: torch.dtype, divisor: int = 1) -> torch.Tensor:
    tensor = _given(comms.rank, size, dtype, divisor)
    comms.log.watched = tensor
    learner.ring_all_reduce(tensor, comms)
    require_like(tensor, contribution(comms.rank, size, dtype), f"rank {comms.rank}'s tensor")
    require_all_waited(comms)
    return tensor


def _given(rank: int, size: int, dtype: torch.dtype, divisor: int = 1) -> torch.Tensor:
    tensor = contribution(rank, size, dtype)
    return tensor if divisor == 1 else tensor / divisor


def _require_sum(exam: Exam, ranks: int, size: int, dtype: torch.dtype = torch.float64) -> None:
    found = exam.run(_reduce, ranks, size, dtype)
    own = [contribution(rank, size, dtype) for rank in range(ranks)]
    total = torch.stack(own).sum(0)
    if any(not torch.equal(one, total) for one in found):
        program = program_of(Collective("all-reduce", ranks), own, exam.rows, found) if size % ranks == 0 else None
        if program is not None:
            _name_the_mistake(program)
    for rank, one in enumerate(found):
        suspects = [
            Suspect(
                total / ranks, "this is the mean: an all-reduce adds up, and the caller divides if it wants a mean"
            ),
            Suspect(torch.where(one == total, total, own[rank]), _own_numbers(rank, one, total)),
        ]
        require_equal(one, total, f"rank {rank}'s tensor, {ranks} ranks,", suspects)


def _own_numbers(rank: int, found: torch.Tensor, total: torch.Tensor) -> str:
    left = [place for place, right in enumerate((found == total).tolist()) if not right]
    where = "" if len(left) == len(found) else f" in place {listed(left)}"
    return (
        f"rank {rank} still holds its own numbers{where}: nothing was added to the tensor itself. The slices are views "
        "of it: write into them with add_ and copy_; `slices[i] = …` only puts another tensor into the list"
    )


# ── what went wrong ─────────────────────────────────────────────────────────────────────────────────────────────────


def _name_the_mistake(program: Program) -> None:
    try:
        verify(program, completed=False)
    except Unmatched as error:
        require_passed_on(program, "rank r with slice r", partial(_hop_in_words, program.world_size))
        first = error.recv is not None and error.recv.reduce
        half, deed, which = ("first", "added", "r−s−1") if first else ("second", "copied", "r−s")
        raise Wrong(
            f"the right slices are sent, but in the {half} half what arrives is {deed} to the wrong one: in hop s "
            f"rank r receives slice {which}"
        ) from None
    except Unreached as error:
        raise Wrong(_unreached(program, error)) from None
    except ProgramError as error:
        raise Wrong(str(error)) from None


def _hop_in_words(ranks: int, hop: int) -> str:
    return f"in hop {hop % (ranks - 1)} of the {'first' if hop < ranks - 1 else 'second'} half"


def _unreached(program: Program, error: Unreached) -> str:
    """Every slice went where it belongs; but something is missing, or counted twice."""
    ranks = program.world_size
    most, right = max(program.messages_sent()), 2 * (ranks - 1)
    added = [op.reduce for ops in program.ranks for op in ops if isinstance(op, Recv)]
    if all(added) and most == ranks - 1:
        return (
            "every rank has the whole sum of one slice and of no other: that was the first half; in the second one the "
            "sums go round once more, and are copied"
        )
    if most != right:
        return f"with {ranks} ranks each of them sends {right} slices, {ranks - 1} in each half; these send {most}"
    if all(added):
        return (
            "the second half adds: what arrives there is the whole sum already, and your own numbers are in it; copy "
            "it over your own slice (copy_)"
        )
    if not any(added):
        return "the first half replaces your own slice by what arrives, and your numbers are lost: add it (add_)"
    counts = [error.found.get((rank, error.index), 0) for rank in range(ranks)]
    return (
        f"rank {error.rank}'s slice {error.index} has what {counted_in_words(counts)} put in: in the first half what "
        "arrives is added to its slice (add_), in the second it replaces what was there (copy_)"
    )


# ── what it costs ───────────────────────────────────────────────────────────────────────────────────────────────────


def _require_few_bytes(exam: Exam, ranks: int, size: int, notes: list[str]) -> None:
    found = exam.run(_reduce, ranks, size, torch.float64, 3)
    most = 2 * (ranks - 1) * 8 * size // ranks
    for rank, row in enumerate(exam.rows):
        sent = calls(row, *SENDS)
        total = sum(message.bytes for message in sent)
        if total > most:
            whole = max(one.bytes for one in sent) > 8 * size // ranks
            advice = "pass slices on, not whole tensors" if whole else f"{ranks - 1} hops in each half"
            raise Wrong(
                f"the sum is right, but rank {rank} sent {total} bytes in {len(sent)} messages; {most} bytes in "
                f"{2 * (ranks - 1)} messages are enough: {advice}"
            )
        require_a_ring(rank, ranks, sent, 8 * size // ranks, halves=2)
        if not torch.equal(found[rank], found[0]):
            raise Wrong(f"rank {rank}'s sum differs from rank 0's in the last digits: copy the sums in the second half")
    given = [_given(rank, size, torch.float64, 3) for rank in range(ranks)]
    program = program_of(Collective("all-reduce", ranks), given, exam.rows, found)
    if program is not None:
        _name_the_mistake(program)
    notes.append(f"{most} bytes in {2 * (ranks - 1)} messages a rank")
