"""What the exercises on fewer bytes share: which mistake explains what was found, equal bits, a step as a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TypeVar

import torch

from microparallel.errors import ProgramError
from microparallel.learn.verdict import Wrong
from microparallel.program import Program, TrainingStep
from microparallel.program import ops as o
from microparallel.verifier import verify

Done = TypeVar("Done")  # what came of all steps on one rank


def numbers(shape: Sequence[int]) -> int:
    """How many numbers a tensor of this shape has."""
    return prod(shape)


def explanation(
    found: Sequence[Done],
    guesses: Mapping[str, Sequence[Done]],
    same: Callable[[Done, Done, int], bool],
    steps: int,
    step: int,
    otherwise: str,
) -> str:
    """The words of the mistake that would leave all of this; or of the first that would do so up to this step.

    Args:
        found: what each rank did.
        guesses: what each rank would do with a certain mistake, by the words for it.
        same: whether two ranks did the same in a step.
        steps: how many there are.
        step: the first one that is wrong.
        otherwise: what to say where no mistake explains it.
    """
    for until in (steps, step + 1):
        for words, guess in guesses.items():
            pairs = list(zip(found, guess, strict=True))
            if all(same(mine, theirs, earlier) for mine, theirs in pairs for earlier in range(until)):
                return words
    return otherwise


def require_same_bits(found: Sequence[Sequence[torch.Tensor]], advice: str) -> None:
    """Refuse ranks that differ in their last digits; each rank has a tensor for each step."""
    for rank, mine in enumerate(found):
        for step, (here, there) in enumerate(zip(mine, found[0], strict=True)):
            if not torch.equal(here, there):
                raise Wrong(
                    f"step {step + 1}: rank {rank}'s averages differ from rank 0's in their last digits: {advice}"
                )


def require_step(
    ops: Sequence[Sequence[o.Op]], stages: int, buckets: tuple[tuple[int, int], ...] = (), what: str = "your step"
) -> None:
    """Verify what the ranks did after their backwards as a training step in which every parameter is a stage.

    Args:
        ops: of each rank, the operations by which they share gradients, and the update.
        stages: how many parameters there are.
        buckets: which of them travel together; every parameter for itself, unless this is given.
        what: the words an error begins with.
    """
    goal = TrainingStep(stages, len(ops), buckets or tuple((stage, stage + 1) for stage in range(stages)))
    ranks = [
        (o.ForwardStages(0, stages, rank), *(o.Backward(stage, rank) for stage in reversed(range(stages))), *mine)
        for rank, mine in enumerate(ops)
    ]
    try:
        verify(Program("your step", goal, tuple(ranks)), completed=False)
    except ProgramError as error:
        raise Wrong(f"{what}: {error}") from None
