"""One batch through all stages and back: does every rank find what one process finds?"""

from __future__ import annotations

from microparallel.learn.exam import Exam
from microparallel.learn.graders._pipeline_steps import Truth, begun_with, take_steps
from microparallel.learn.requirements import Suspect

_SAMPLES = 5


def check(exam: Exam) -> None:
    """One step on three ranks; several steps; other numbers of ranks."""
    with exam.step("a batch goes through three ranks and back, and they find the gradients of one process"):
        _require_steps(exam, 3, 1)
    with exam.step("a second step adds its own gradients"):
        _require_steps(exam, 3, 2)
    with exam.step("also on two ranks, on four, and on one, which sends nothing"):
        _require_steps(exam, 2, 2)
        _require_steps(exam, 4, 1)
        _require_steps(exam, 1, 2)


def _require_steps(exam: Exam, ranks: int, steps: int) -> None:
    take_steps(exam, ranks, _SAMPLES, steps=steps, function="naive_step", suspects=_suspects)


def _suspects(truth: Truth, rank: int) -> list[Suspect]:
    if rank == truth.ranks - 1:
        return []
    return [
        Suspect(
            begun_with(truth, rank, "ones"),
            f"rank {rank} began its backward with ones: it has to begin with what rank {rank + 1} sends back",
        ),
        Suspect(
            begun_with(truth, rank, "activation"),
            f"rank {rank}'s backward began with the activation itself: what rank {rank + 1} has to send back is the "
            "gradient of what it received, received.grad",
        ),
    ]
