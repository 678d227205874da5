"""Some schedules are drawn for a whole number of rounds: make one that is long enough, and cut off the rest.

Micro-batches depend on each other only through the order of a rank's operations, so what is left is still right.
"""

from __future__ import annotations

from collections.abc import Iterable

from microparallel.program import ForwardBackward, Op, halves


def first_microbatches(ops: Iterable[Op], microbatches: int) -> tuple[Op, ...]:
    """Only what concerns the first micro-batches; a pair that loses one half becomes its other half."""
    kept: list[Op] = []
    for op in ops:
        wanted = [half for half in halves(op) if half.microbatch < microbatches]
        if isinstance(op, ForwardBackward) and len(wanted) == 2:
            kept.append(op)
        else:
            kept.extend(wanted)
    return tuple(kept)
