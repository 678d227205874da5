"""Interleaved 1F1B: every rank holds several thin slices of the model, which divides the bubble by their number."""

from __future__ import annotations

from microparallel.errors import UsageError
from microparallel.program import Backward, Forward, Op, Program, TrainingStep
from microparallel.schedules.passes import first_microbatches


def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> Program:
    """Rank r holds stages r, r + p, r + 2p, …; micro-batches visit them in rounds of p.

    ```
    2 ranks, 4 micro-batches, 2 chunks; a cell is stage.micro-batch
    rank 0  F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 …
    rank 1       F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 …
    ```

    [Megatron-LM: Narayanan et al., 2021](https://arxiv.org/abs/2104.04473)
    """
    if chunks < 1:
        raise UsageError(f"chunks={chunks}: a rank holds at least 1 chunk of the model")
    orders = [first_microbatches(_order(rank, ranks, microbatches, chunks), microbatches) for rank in range(ranks)]
    return Program("interleaved", TrainingStep(ranks * chunks, microbatches), tuple(orders))


def _order(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Op]:
    rounds = -(-microbatches // ranks)
    visits = [
        (chunk, turn * ranks + place) for turn in range(rounds) for chunk in range(chunks) for place in range(ranks)
    ]
    forwards = [Forward(chunk * ranks + rank, m) for chunk, m in visits]
    backwards = [Backward((chunks - 1 - chunk) * ranks + rank, m) for chunk, m in visits]
    # The first backward comes back after one way through all chunks, and down to this rank and up again.
    warm_up = min(len(visits), (chunks - 1) * ranks + 2 * (ranks - 1 - rank))
    ops: list[Op] = [*forwards[:warm_up]]
    for index, backward in enumerate(backwards):
        ops += [*forwards[warm_up + index : warm_up + index + 1], backward]
    return ops
