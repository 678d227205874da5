"""GPipe: all forwards, then all backwards. Micro-batches fill the pipeline, and every activation is kept."""

from __future__ import annotations

from microparallel.program import Backward, Forward, Op, Program, TrainingStep


def gpipe(ranks: int, microbatches: int) -> Program:
    """Every stage runs the forwards of all micro-batches, then their backwards.

    ```
    rank 0  F0 F1 F2 F3             B0 B1 B2 B3
    rank 1     F0 F1 F2 F3       B0 B1 B2 B3
    rank 2        F0 F1 F2 F3 B0 B1 B2 B3
    ```

    [GPipe: Huang et al., 2019](https://arxiv.org/abs/1811.06965)
    """
    orders = [_order(stage, microbatches) for stage in range(ranks)]
    return Program("gpipe", TrainingStep(ranks, microbatches), tuple(orders))


def _order(stage: int, microbatches: int) -> tuple[Op, ...]:
    forwards = [Forward(stage, m) for m in range(microbatches)]
    backwards = [Backward(stage, m) for m in range(microbatches)]
    return (*forwards, *backwards)
