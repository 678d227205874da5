"""Is it right? Messages match, nobody waits for ever, and the result is what the goal promises."""

from __future__ import annotations

from microparallel.errors import ProgramError
from microparallel.program import Collective, Program
from microparallel.verifier.effect import check_effect
from microparallel.verifier.execution import Sends
from microparallel.verifier.matching import check_matching
from microparallel.verifier.order import check_order

__all__ = ["Sends", "verify"]


def verify(program: Program, sends: Sends = "rendezvous") -> None:
    """Raise `ProgramError` unless a program is right, with the place that is wrong.

    Every send must have its receive, in the same order on each channel; no rank may wait for ever; and every rank must
    end with what the program's goal promises, found by running it on symbols.

    Args:
        program: what to verify.
        sends: what a Send means. Programs should be right under "buffered" and "rendezvous", which are both checked;
            "blocking" asks whether a program also survives sends that stop their rank (a ring does not).

    Example:
        ```python
        mp.verify(mp.collectives.build("ring", 4))
        mp.verify(mp.collectives.build("ring", 4), sends="blocking")  # ProgramError: deadlock …
        ```
    """
    if not isinstance(program.goal, Collective):
        raise ProgramError(f"program {program.name!r}: only collectives can be verified so far, not a {program.goal}")
    check_matching(program)
    check_order(program, "buffered")
    check_order(program, "rendezvous")
    if sends == "blocking":
        check_order(program, "blocking")
    check_effect(program, program.goal)
