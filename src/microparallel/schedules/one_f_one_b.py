"""1F1B: as soon as a backward can run, it does. The bubble of GPipe, with far fewer activations alive."""

from __future__ import annotations

from microparallel.program import Backward, Forward, Op, Program, TrainingStep


def one_f_one_b(ranks: int, microbatches: int) -> Program:
    """Warm up with as many forwards as there are stages behind; then one forward, one backward; then drain.

    ```
    rank 0  F0 F1 F2 F3       B0 F4 B1 F5 B2    B3    B4    B5
    rank 1     F0 F1 F2    B0 F3 B1 F4 B2 F5 B3    B4    B5
    rank 2        F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4    B5
    rank 3           F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
    ```

    [PipeDream: Narayanan et al., 2019](https://arxiv.org/abs/1806.03377), in its synchronous form
    """
    orders = [_order(stage, ranks, microbatches) for stage in range(ranks)]
    return Program("1f1b", TrainingStep(ranks, microbatches), tuple(orders))


def _order(stage: int, ranks: int, microbatches: int) -> tuple[Op, ...]:
    warm_up = min(ranks - 1 - stage, microbatches)
    ops: list[Op] = [Forward(stage, m) for m in range(warm_up)]
    for m in range(microbatches):
        if warm_up + m < microbatches:
            ops.append(Forward(stage, warm_up + m))
        ops.append(Backward(stage, m))
    return tuple(ops)
