"""One micro-batch after another through the whole pipeline: all but one rank wait, all the time."""

from __future__ import annotations

from microparallel.program import Backward, Forward, Op, Program, TrainingStep


def naive(ranks: int, microbatches: int) -> Program:
    """Forward and backward of a micro-batch on all stages before the next one begins.

    ```
    rank 0  F0          B0 F1          B1
    rank 1     F0    B0       F1    B1
    rank 2       F0B0           F1B1
    ```
    """
    orders = [_order(stage, microbatches) for stage in range(ranks)]
    return Program("naive", TrainingStep(ranks, microbatches), tuple(orders))


def _order(stage: int, microbatches: int) -> tuple[Op, ...]:
    return tuple(op for m in range(microbatches) for op in (Forward(stage, m), Backward(stage, m)))
