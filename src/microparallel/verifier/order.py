"""Can every rank come to its end? If not, who waits for whom?"""

from __future__ import annotations

from collections import deque

from microparallel.program import Policy, Program, Sends, Wait, Walk
from microparallel.verifier.findings import Deadlock
from microparallel.verifier.place import show_place


def check_order(program: Program, sends: Sends) -> None:
    """Raise `Deadlock` when ranks wait for each other for ever, naming the circle and drawing where they stand."""
    walk = Walk(program, Policy(sends))
    deque(walk, maxlen=0)
    waits = walk.waits()
    if not waits:
        return
    circle, last = find_circle(waits)
    end = "" if last is None else f", and rank {last} has finished"
    where = "".join(f"\n  {show_place(program, wait.rank, wait.place)}" for wait in circle)
    raise Deadlock(f"deadlock under {sends} sends: {', '.join(map(str, circle))}{end}{where}", waits)


def find_circle(waits: list[Wait]) -> tuple[list[Wait], int | None]:
    """Ranks of which each waits for the next, in a circle; or one that waits for a finished rank, and that rank."""
    waiting = {wait.rank: wait for wait in waits}
    chain: list[Wait] = []
    rank = waits[0].rank
    while rank in waiting:
        wait = waiting[rank]
        if wait in chain:
            return chain[chain.index(wait) :], None
        chain.append(wait)
        rank = wait.on
    return chain[-1:], rank
