"""The two halves of a ring: does rank r end with the sum of slice r, and then every rank with all slices?"""

from __future__ import annotations

from typing import Any, Literal

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
from microparallel.learn.requirements import Suspect, require_equal, require_like
from microparallel.learn.verdict import Wrong
from microparallel.program import Collective, Program, Recv, Send
from microparallel.verifier import Unmatched, Unreached, verify

Half = Literal["reduce-scatter", "all-gather"]
_HALVES: tuple[Half, ...] = ("reduce-scatter", "all-gather")
_UNEVEN = ((3, 7), (4, 2), (5, 13))


def check(exam: Exam) -> None:
    """Each half alone; sizes that do not divide; both together, with their bytes and bits."""
    with exam.step("reduce-scatter: rank r ends with the sum of slice r"):
        for ranks in (2, 3, 4):
            _require_half(exam, "reduce-scatter", ranks, 2 * ranks)
    with exam.step("all-gather: every rank ends with the slices of all"):
        for ranks in (2, 3, 4):
            _require_half(exam, "all-gather", ranks, 2 * ranks)
    with exam.step("also when the tensor does not divide evenly, and for integers"):
        for half in _HALVES:
            for ranks, size in _UNEVEN:
                _require_half(exam, half, ranks, size)
            _require_half(exam, half, 3, 8, torch.int64)
    with exam.step("each half sends (p−1)/p of the tensor; together they leave the same bits on all ranks") as notes:
        notes.append(_require_cost(exam, 4, 64))
    with exam.step("in a world of one rank nothing changes"):
        for half in _HALVES:
            _require_half(exam, half, 1, 5)


def _do(learner: Any, comms: Any, half: Half, size: int, dtype: torch.dtype) -> torch.Tensor:
    tensor = _given(half, comms.rank, comms.world_size, size, dtype)
    expected = tensor.clone()
    comms.log.watched = tensor
    (learner.reduce_scatter if half == "reduce-scatter" else learner.all_gather)(tensor, comms)
    require_like(tensor, expected, f"rank {comms.rank}'s tensor")
    require_all_waited(comms)
    return tensor


def _given(half: Half, rank: int, ranks: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """A rank's tensor; for an all-gather its own slice of the right numbers, and old ones (below zero) elsewhere."""
    own = contribution(rank, size, dtype)
    if half == "reduce-scatter":
        return own
    tensor = -own
    tensor.tensor_split(ranks)[rank].copy_(_gathered(ranks, size, dtype).tensor_split(ranks)[rank])
    return tensor


def _gathered(ranks: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    own = [contribution(rank, size, dtype).tensor_split(ranks)[rank] for rank in range(ranks)]
    return torch.cat(own)


# ── is it right? ────────────────────────────────────────────────────────────────────────────────────────────────────


def _require_half(exam: Exam, half: Half, ranks: int, size: int, dtype: torch.dtype = torch.float64) -> None:
    found = exam.run(_do, ranks, half, size, dtype)
    given = [_given(half, rank, ranks, size, dtype) for rank in range(ranks)]
    total = torch.stack(given).sum(0) if half == "reduce-scatter" else _gathered(ranks, size, dtype)
    cut = [one.tensor_split(ranks) for one in (*found, total)]
    right = [
        torch.equal(cut[rank][rank], cut[-1][rank]) if half == "reduce-scatter" else torch.equal(found[rank], total)
        for rank in range(ranks)
    ]
    if all(right):
        return
    if all(torch.equal(one, before) for one, before in zip(found, given, strict=True)):
        raise Wrong(
            f"{half}: after it every tensor is as it was. The slices are views of it: write into them with add_ and "
            "copy_; `slices[i] = …` only puts another tensor into the list"
        )
    if half == "reduce-scatter":
        _require_own_slice(found, total, ranks)
    program = program_of(Collective(half, ranks), given, exam.rows, found) if size % ranks == 0 else None
    if program is not None:
        _name_the_mistake(half, program)
    rank = right.index(False)
    of, wanted = (cut[rank][rank], cut[-1][rank]) if half == "reduce-scatter" else (found[rank], total)
    what = f"rank {rank}'s slice" if half == "reduce-scatter" else f"rank {rank}'s tensor"
    require_equal(of, wanted, f"{half}, {ranks} ranks, {size} numbers: {what}", _suspects(wanted, ranks))


def _suspects(wanted: torch.Tensor, ranks: int) -> list[Suspect]:
    return [Suspect(wanted / ranks, "this is the mean: it adds up, and the caller divides if it wants a mean")]


def _require_own_slice(found: list[torch.Tensor], total: torch.Tensor, ranks: int) -> None:
    """Refuse sums that are whole, and on another rank than the one that the slice belongs to."""
    wanted = total.tensor_split(ranks)
    whole = [
        [index for index, one in enumerate(mine.tensor_split(ranks)) if torch.equal(one, wanted[index])]
        for mine in found
    ]
    shifts = {(mine[0] - rank) % ranks for rank, mine in enumerate(whole) if len(mine) == 1}
    if all(len(mine) == 1 for mine in whole) and len(shifts) == 1 and (shift := shifts.pop()):
        raise Wrong(
            f"{ranks} ranks: rank 0 ends with the whole sum of slice {shift}, and should have that of slice 0. (In the "
            "ring all-reduce rank r has slice r+1 after the first half; here it is slice r.) In hop s rank r sends "
            "slice r−s−1 and adds to slice r−s−2"
        )


def _name_the_mistake(half: Half, program: Program) -> None:
    added = {op.reduce for ops in program.ranks for op in ops if isinstance(op, Recv)}
    if half == "all-gather" and True in added:
        raise Wrong(
            "all-gather: what arrives is added to the old numbers; it is whole already: copy it over them (copy_)"
        )
    if half == "reduce-scatter" and added == {False}:
        raise Wrong("reduce-scatter: what arrives replaces your own slice, and your numbers are lost: add it (add_)")
    try:
        verify(program, completed=False)
    except Unmatched:
        begins = "rank r with slice r−1" if half == "reduce-scatter" else "rank r with its own, slice r"
        require_passed_on(program, begins, lambda hop: f"in hop {hop} of the {half}")
        does, which = ("added", "r−s−2") if half == "reduce-scatter" else ("copied", "r−s−1")
        raise Wrong(
            f"the right slices are sent, but what arrives is {does} to the wrong one: in hop s of the {half} rank r "
            f"receives slice {which}"
        ) from None
    except Unreached as error:
        raise Wrong(_unreached(half, program, error)) from None
    except ProgramError as error:
        raise Wrong(str(error)) from None


def _unreached(half: Half, program: Program, error: Unreached) -> str:
    """Every slice went where it belongs; but something is missing, or counted twice."""
    ranks, rank, index = program.world_size, error.rank, error.index
    most = max(program.messages_sent())
    if most != ranks - 1:
        advice = "; with twice as many it is a whole all-reduce" if most == 2 * (ranks - 1) else ""
        return f"{half}, {ranks} ranks: each sends {ranks - 1} slices, one a hop; these send {most}{advice}"
    first = next(op for op in program.ranks[0] if isinstance(op, Send))
    if half == "all-gather" and str(first.value) != "C0":
        return (
            f"all-gather, {ranks} ranks: rank 0 begins with slice {str(first.value)[1:]}, which is old on it; at first "
            "the only slice that is right is its own"
        )
    counts = [error.found.get((other, index), 0) for other in range(ranks)]
    return f"{half}, {ranks} ranks: rank {rank}'s slice {index} has what {counted_in_words(counts)} put in"


# ── what it costs ───────────────────────────────────────────────────────────────────────────────────────────────────


def _both(learner: Any, comms: Any, size: int) -> tuple[torch.Tensor, int]:
    """An all-reduce of numbers that round; how many moments the first half took."""
    tensor = contribution(comms.rank, size) / 3
    learner.reduce_scatter(tensor, comms)
    between = len(comms.row)
    learner.all_gather(tensor, comms)
    return tensor, between


def _require_cost(exam: Exam, ranks: int, size: int) -> str:
    results = exam.run(_both, ranks, size)
    one_slice = 8 * size // ranks
    most = (ranks - 1) * one_slice
    for rank, ((tensor, between), row) in enumerate(zip(results, exam.rows, strict=True)):
        halves: dict[Half, Any] = {"reduce-scatter": row[:between], "all-gather": row[between:]}
        for half, moments in halves.items():
            sent = calls(moments, *SENDS)
            total = sum(message.bytes for message in sent)
            if total > most:
                whole = max(one.bytes for one in sent) > one_slice
                advice = "pass slices on, not whole tensors" if whole else f"{ranks - 1} hops, a slice in each"
                raise Wrong(
                    f"the result is right, but in the {half} rank {rank} sent {total} bytes in {len(sent)} messages; "
                    f"{most} bytes in {ranks - 1} messages are enough: {advice}"
                )
            require_a_ring(rank, ranks, sent, one_slice, halves=1)
        if not torch.equal(tensor, results[0][0]):
            raise Wrong(
                f"rank {rank}'s sum differs from rank 0's in the last digits: each slice is summed by one rank, once, "
                "and the others copy it"
            )
    return f"{most} bytes in {ranks - 1} messages a rank and half"
