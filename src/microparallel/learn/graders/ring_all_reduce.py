"""Round the ring: is it the sum, on every rank, the same bits, with as few bytes as possible?"""

from __future__ import annotations

from typing import Any

import torch

from microparallel.learn.exam import Exam
from microparallel.learn.verdict import Wrong
from microparallel.learn.words import Suspect, require_equal


def check(exam: Exam) -> None:
    """The sum; other sizes and dtypes; messages and bytes."""
    with exam.step("two ranks have the sum"):
        _require_sum(exam, 2, 4)
    with exam.step("so have three and four ranks"):
        _require_sum(exam, 3, 6)
        _require_sum(exam, 4, 8)
    with exam.step("also when the tensor does not divide evenly, and for integers"):
        _require_sum(exam, 3, 7)
        _require_sum(exam, 4, 2)
        _require_sum(exam, 3, 8, torch.int64)
    with exam.step("a world of one is left alone"):
        _require_sum(exam, 1, 5)
    with exam.step("no rank sends more than 2(p−1)/p of the tensor") as notes:
        _require_few_bytes(exam, 4, 64, notes)


def _reduce(learner: Any, comms: Any, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, int, int]:
    tensor = _contribution(comms.rank, size, dtype)
    learner.ring_all_reduce(tensor, comms)
    unfinished = [entry.line for entry in comms.log if not entry.waited]
    if unfinished:
        raise Wrong(
            f"rank {comms.rank} began a send or receive in line {unfinished[0]} and never waited for it: keep the "
            "request, and wait before the tensor is written to again"
        )
    sent = comms.sent()
    return tensor, len(sent), sum(entry.bytes for entry in sent)


def _contribution(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    numbers: torch.Tensor = torch.arange(1, size + 1) * 10**rank  # every subset of ranks adds up to another number
    return numbers.to(dtype)


def _require_sum(exam: Exam, ranks: int, size: int, dtype: torch.dtype = torch.float64) -> None:
    results = exam.run(_reduce, ranks, size, dtype)
    own = [_contribution(rank, size, dtype) for rank in range(ranks)]
    expected = torch.stack(own).sum(0)
    for rank, (found, _, _) in enumerate(results):
        suspects = [
            Suspect(own[rank], f"rank {rank} still holds its own numbers: nothing was added"),
            Suspect(
                expected / ranks, "this is the mean: an all-reduce adds up, and whoever wants a mean divides later"
            ),
        ]
        _require_each_slice(found, expected, own, rank, ranks)
        require_equal(found, expected, f"rank {rank}'s tensor, {ranks} ranks,", suspects)


def _require_each_slice(
    found: torch.Tensor, expected: torch.Tensor, own: list[torch.Tensor], rank: int, ranks: int
) -> None:
    """Say which slice is wrong, and whose contributions are in it."""
    if found.shape != expected.shape:
        return
    slices = [tensor.tensor_split(ranks) for tensor in (found, expected)]
    wrong = [number for number, (one, other) in enumerate(zip(*slices, strict=True)) if not torch.equal(one, other)]
    if not wrong or len(wrong) == ranks:
        return
    right = [number for number in range(ranks) if number not in wrong]
    raise Wrong(
        f"rank {rank} has the whole sum in slice {_list(right)} but not in slice {_list(wrong)}: does every slice go "
        f"all the way round? Slice {wrong[0]} {_who(slices[0][wrong[0]], own, wrong[0], ranks)}"
    )


def _who(found: torch.Tensor, own: list[torch.Tensor], number: int, ranks: int) -> str:
    """Which ranks' numbers add up to what was found."""
    parts = [tensor.tensor_split(ranks)[number] for tensor in own]
    for mask in range(1, 2**ranks):
        members = [rank for rank in range(ranks) if mask >> rank & 1]
        if torch.equal(found, torch.stack([parts[rank] for rank in members]).sum(0)):
            return f"has only what rank {_list(members)} put in"
    return f"begins with {found.flatten()[0].item():g}" if found.numel() else "is empty"


def _require_few_bytes(exam: Exam, ranks: int, size: int, notes: list[str]) -> None:
    results = exam.run(_reduce, ranks, size, torch.float64)
    most = 2 * (ranks - 1) * 8 * size // ranks
    for rank, (_, messages, sent) in enumerate(results):
        if sent > most:
            raise Wrong(
                f"the sum is right, but rank {rank} sent {sent} bytes in {messages} messages; {most} bytes in "
                f"{2 * (ranks - 1)} messages are enough: pass slices on, not whole tensors"
            )
    notes.append(f"{most} bytes in {2 * (ranks - 1)} messages a rank")


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
