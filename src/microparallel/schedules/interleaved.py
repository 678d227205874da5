"""Interleaved 1F1B: every rank holds several thin stages of the model, which divides the bubble by their number."""

from __future__ import annotations

from microparallel.errors import UsageError
from microparallel.program import Backward, Forward, Op, Program, TrainingStep
from microparallel.schedules.passes import first_microbatches


def interleaved(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Program:
    """Rank r holds stages r, r + p, r + 2p, …; micro-batches visit them in rounds of p.

    ```
    2 ranks, 4 micro-batches, 2 stages a rank; a cell is stage.micro-batch
    rank 0  F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 …
    rank 1       F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 …
    ```

    [Megatron-LM: Narayanan et al., 2021](https://arxiv.org/abs/2104.04473)
    """
    if stages_per_rank < 1:
        raise UsageError(f"stages_per_rank={stages_per_rank}: a rank holds at least 1 stage of the model")
    orders = [
        first_microbatches(_order(rank, ranks, microbatches, stages_per_rank), microbatches) for rank in range(ranks)
    ]
    return Program("interleaved", TrainingStep(ranks * stages_per_rank, microbatches), tuple(orders))


def _order(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> list[Op]:
    # A micro-batch goes round all ranks once for each of a rank's stages: on lap 1, rank r does stage p + r.
    visits = [
        (lap, m)
        for first in range(0, microbatches, ranks)
        for lap in range(stages_per_rank)
        for m in range(first, first + ranks)
    ]
    forwards = [Forward(lap * ranks + rank, m) for lap, m in visits]
    backwards = [Backward((stages_per_rank - 1 - lap) * ranks + rank, m) for lap, m in visits]
    # Before a rank's first backward: all laps but the last, then the way down to the last rank and up again.
    warm_up = min(len(visits), (stages_per_rank - 1) * ranks + 2 * (ranks - 1 - rank))
    ops: list[Op] = [*forwards[:warm_up]]
    for index, backward in enumerate(backwards):
        ops += [*forwards[warm_up + index : warm_up + index + 1], backward]
    return ops
