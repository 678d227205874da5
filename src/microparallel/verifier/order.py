"""Can every rank come to its end? If not, who waits for whom?"""

from __future__ import annotations

from microparallel.errors import ProgramError
from microparallel.program import Program
from microparallel.verifier.execution import Execution, Sends, Wait


def check_order(program: Program, sends: Sends) -> None:
    """Raise `ProgramError` when ranks wait for each other for ever, naming the circle."""
    waits = Execution(program, sends).run(lambda _rank, _op: None)
    if waits:
        raise ProgramError(f"deadlock under {sends} sends: {explain(waits)}")


def explain(waits: list[Wait]) -> str:
    """The circle of ranks in which each waits for the next, or the chain that ends at a rank which has finished."""
    waiting = {wait.rank: wait for wait in waits}
    chain: list[Wait] = []
    rank = waits[0].rank
    while rank in waiting:
        wait = waiting[rank]
        if wait in chain:
            return ", ".join(map(str, chain[chain.index(wait) :]))
        chain.append(wait)
        rank = wait.on
    return f"{chain[-1]}, and rank {rank} has finished"
