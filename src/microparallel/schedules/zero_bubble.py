"""Zero bubble: split the backward, pass the input half on at once, and fill the gaps with the weight halves.

[Zero Bubble Pipeline Parallelism: Qi et al., 2024](https://arxiv.org/abs/2401.10241)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from microparallel.program import BackwardInput, BackwardWeight, Forward, Op, Program, TrainingStep
from microparallel.schedules.passes import first_microbatches


def zb_h1(ranks: int, microbatches: int) -> Program:
    """1F1B with its backward split: rank r lets r weight halves wait, and no rank keeps more than p activations.

    ```
    rank 0  F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3
    rank 1     F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2        F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    ```
    """
    orders = [_order(r, microbatches, warm_up=ranks - 1 - r, waiting=r) for r in range(ranks)]
    return Program("zb-h1", TrainingStep(ranks, microbatches), tuple(orders))


def zb_h2(ranks: int, microbatches: int) -> Program:
    """Warm up twice as far, and let twice as many weight halves wait: no gaps, for about twice the activations.

    The ranks start and end at different times, so the gaps only vanish when no barrier stands between two steps.
    """
    orders = [_order(r, microbatches, warm_up=2 * (ranks - 1 - r), waiting=2 * r) for r in range(ranks)]
    return Program("zb-h2", TrainingStep(ranks, microbatches), tuple(orders))


def _order(stage: int, microbatches: int, *, warm_up: int, waiting: int) -> tuple[Op, ...]:
    """One forward, one input half, and one weight half as soon as more than `waiting` of them wait."""
    ops: list[Op] = [Forward(stage, m) for m in range(min(warm_up, microbatches))]
    for m in range(microbatches):
        if warm_up + m < microbatches:
            ops.append(Forward(stage, warm_up + m))
        ops.append(BackwardInput(stage, m))
        if m >= waiting:
            ops.append(BackwardWeight(stage, m - waiting))
    ops += [BackwardWeight(stage, m) for m in range(max(0, microbatches - waiting), microbatches)]
    return tuple(ops)


def zbv(ranks: int, microbatches: int) -> Program:
    """Fold the model into a V: rank r holds stages r and 2p−1−r, so the first rank also has the last stage.

    ```
    2 ranks; a cell is stage.micro-batch; stages 0 and 3 are on rank 0, 1 and 2 on rank 1
    rank 0  F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 F0.3 I0.0 W0.0 …
    rank 1       F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 F1.2 I1.0 W1.0 F2.2 I2.1 …
    ```

    The activations of 1F1B's first rank, on every rank, and no gap when the three kinds take equally long.
    """
    orders = [first_microbatches(_vee(rank, ranks, microbatches), microbatches) for rank in range(ranks)]
    return Program("zbv", TrainingStep(2 * ranks, microbatches), tuple(orders))


def _vee(rank: int, ranks: int, microbatches: int) -> list[Op]:
    """The order for at least 2p micro-batches; `down` is the rank's first stage, `up` its second."""
    rounds = max(microbatches, 2 * ranks)
    behind = ranks - rank  # this rank and those after it
    steady = rounds - (2 * behind - 1) - rank  # as long as there are forwards for the first stage
    # fmt: off
    words = (
        ["F down"] * (2 * behind - 1)
        + ["F up", "F down"] * rank
        + ["F up", "I up", "W up"] * behind
        + ["F down", "I down", "W down", "F up", "I up", "W up"] * steady
        + ["I down", "W down", "F up", "I up", "W up"] * (rounds - ranks - steady)
        + ["I down", "I up"] * rank
        + ["I down", "W down"] * behind
        + ["W up"] * rank
        + ["W down"] * rank
    )
    # fmt: on
    return _count_off(words, {"down": rank, "up": 2 * ranks - 1 - rank})


def _count_off(words: list[str], stages: dict[str, int]) -> list[Op]:
    """Give each kind of operation its micro-batches in turn: the third "F up" is that of micro-batch 2."""
    kinds: dict[str, Callable[[int, int], Op]] = {"F": Forward, "I": BackwardInput, "W": BackwardWeight}
    seen: Counter[str] = Counter()
    ops: list[Op] = []
    for word in words:
        kind, place = word.split()
        ops.append(kinds[kind](stages[place], seen[word]))
        seen[word] += 1
    return ops
