"""Is it right? Messages match, no rank waits for ever, and the result is what the goal promises."""

from __future__ import annotations

from collections.abc import Sequence

from microparallel.errors import ProgramError, UsageError
from microparallel.program import Collective, Observed, Op, Program, Sends, TrainingStep, Wait, peak_activations
from microparallel.schedules import complete
from microparallel.verifier.collective import check_collective, check_sums_so_far
from microparallel.verifier.findings import (
    Deadlock,
    DifferentWeights,
    GatheredAgain,
    LacksGradients,
    Miscounted,
    Missing,
    NeverReduced,
    NotUpdated,
    Unmatched,
    Unreached,
)
from microparallel.verifier.order import check_matching, check_order
from microparallel.verifier.training import check_beginning, check_operations, check_training_step

__all__ = [
    "Deadlock",
    "DifferentWeights",
    "GatheredAgain",
    "LacksGradients",
    "Miscounted",
    "Missing",
    "NeverReduced",
    "NotUpdated",
    "Sends",
    "Unmatched",
    "Unreached",
    "Wait",
    "verify",
    "verify_beginning",
]


def verify(
    program: Program, sends: Sends = "rendezvous", max_activations: int | None = None, *, completed: bool = True
) -> None:
    """Raise `ProgramError` unless a program is right, with the place that is wrong (`findings.py` has its kinds).

    Every send must have its receive, in the same order on each channel; no rank may wait for ever; and at the end the
    program's goal must be reached, which is found by running it on symbols: after a collective every rank holds what
    was promised, after a training step every micro-batch had its forward and backward on every stage once, in order.

    Args:
        program: what to verify. A schedule may leave out its messages: they are added first, as for `mp.simulate`,
            `mp.draw` and `mp.Pipeline` (`mp.schedules.complete`).
        sends: what a Send means. Programs should be right under "buffered" and "rendezvous", which are both checked;
            "blocking" asks whether a program also survives sends that stop their rank (a ring and 1F1B do not).
        max_activations: the most activations that a rank may hold at once, if there is a limit.
        completed: False verifies the program as it stands, where messages that are missing are an error.

    Example:
        ```python
        mp.verify(mp.collectives.build("ring", 4))
        mp.verify(mp.schedules.build("1f1b", 4, 8), sends="blocking")  # ProgramError: deadlock …
        ```
    """
    if sends not in ("buffered", "rendezvous", "blocking"):
        raise UsageError(f"sends={sends!r}: choose buffered, rendezvous or blocking")
    _refuse_observed(program)
    if isinstance(program.goal, TrainingStep):
        check_operations(program, program.goal)
    if completed:
        program = complete(program)
    check_matching(program)
    check_order(program, "buffered")
    check_order(program, "rendezvous")
    if sends == "blocking":
        check_order(program, "blocking")
    if isinstance(program.goal, Collective):
        check_collective(program, program.goal)
    else:
        check_training_step(program, program.goal)
    if max_activations is not None:
        _check_memory(program, max_activations)


def verify_beginning(
    program: Program, rest: Sequence[Sequence[Op]] | None = None, max_activations: int | None = None
) -> None:
    """Raise `ProgramError` if a program that is not finished is wrong already; `verify` judges it when it is finished.

    The rules are those of `verify`: what an operation needs is there, nothing is made twice, messages match, no rank
    waits for ever. Only what must hold at the end is not asked for yet.

    Args:
        program: what the ranks have done up to here. A schedule may leave out its messages.
        rest: what each rank has yet to do, in any order; nothing, if it is not given.
        max_activations: the most activations that a rank may hold at once, if there is a limit.
    """
    _refuse_observed(program)
    if isinstance(program.goal, TrainingStep):
        check_operations(program, program.goal)
    program = complete(program)
    check_matching(program)
    check_order(program, "rendezvous")
    if isinstance(program.goal, Collective):
        check_sums_so_far(program, program.goal)
    else:
        check_beginning(program, program.goal, [()] * program.world_size if rest is None else rest)
    if max_activations is not None:
        _check_memory(program, max_activations)


def _refuse_observed(program: Program) -> None:
    for rank, ops in enumerate(program.ranks):
        for op in ops:
            if isinstance(op, Observed):
                raise ProgramError(
                    f"{program.name!r} cannot be verified: rank {rank} does {str(op)!r}, which was only observed, "
                    "so the values that it needs and makes are not known"
                )


def _check_memory(program: Program, most: int) -> None:
    for rank, ops in enumerate(program.ranks):
        peak = peak_activations(ops)
        if peak > most:
            allowed = f"{most} {'is' if most == 1 else 'are'} allowed"
            raise ProgramError(f"rank {rank} holds {peak} activations at once, and {allowed}")
