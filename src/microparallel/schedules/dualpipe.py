"""DualPipeV: forwards and backwards run in pairs, so that each hides the other's communication.

[DeepSeek-V3 technical report](https://arxiv.org/abs/2412.19437), folded into a V as in
[DualPipe](https://github.com/deepseek-ai/DualPipe)
"""

from __future__ import annotations

from collections import Counter

from microparallel.program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    ForwardBackward,
    Op,
    Program,
    TrainingStep,
)
from microparallel.schedules.passes import first_microbatches


def dualpipev(ranks: int, microbatches: int) -> Program:
    """Rank r holds stages r and 2p−1−r, as in ZBV; in the middle, one stage's forward runs with the other's backward.

    ```
    2 ranks, 4 micro-batches; stages 0 and 3 are on rank 0, 1 and 2 on rank 1
    rank 0  F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 F0.3&B3.1 F3.2&B0.0 B3.2 F3.3&B0.1 B3.3 I0.2 W0.2 I0.3 W0.3
    rank 1       F1.0 F2.0 F1.1 F2.1 F1.2 B2.0 F2.2&B1.0 F1.3&B2.1 F2.3&B1.1 B2.2 B1.2 I2.3 I1.3 W2.3 W1.3
    ```
    """
    orders = [first_microbatches(_Order(rank, ranks, microbatches).ops, microbatches) for rank in range(ranks)]
    return Program("dualpipev", TrainingStep(2 * ranks, microbatches), tuple(orders))


class _Order:
    """Write down one rank's operations phase by phase; micro-batches are counted off for each stage."""

    def __init__(self, rank: int, ranks: int, microbatches: int) -> None:
        self.ops: list[Op] = []
        self._down, self._up = rank, 2 * ranks - 1 - rank
        self._forwards: Counter[int] = Counter()
        self._backwards: Counter[int] = Counter()
        self._waiting: list[BackwardWeight] = []
        rounds, after = max(microbatches, 2 * ranks), ranks - 1 - rank
        self._fill(rank, after)
        self._pairs(rounds - 2 * ranks + rank + 1, last_rank=after == 0)
        self._drain(rank, after)

    def _fill(self, rank: int, after: int) -> None:
        for _ in range(2 * after):
            self.ops.append(self._forward(self._down))
        for _ in range(rank + 1):
            self.ops += [self._forward(self._down), self._forward(self._up)]
        for _ in range(after):
            self._input_half(self._up)
            self._weight_half()
            self.ops.append(self._forward(self._up))

    def _pairs(self, count: int, *, last_rank: bool) -> None:
        for index in range(count):
            forward, backward = self._forward(self._down), self._backward(self._up)
            # The last rank's own forward leads to its first backward: the two cannot run together.
            self.ops += [forward, backward] if last_rank and index == 0 else [ForwardBackward(forward, backward)]
            self.ops.append(ForwardBackward(self._forward(self._up), self._backward(self._down)))

    def _drain(self, rank: int, after: int) -> None:
        for _ in range(after):
            self.ops.append(self._backward(self._up))
            self.ops.append(ForwardBackward(self._forward(self._up), self._backward(self._down)))
        for index in range(2 * (rank + 1)):  # the second half of these is split
            stage = self._down if index % 2 else self._up
            if index <= rank:
                self.ops.append(self._backward(stage))
            else:
                self._input_half(stage)
        for _ in range(after):
            self._weight_half()
            self._input_half(self._down)
        for _ in range(rank + 1):
            self._weight_half()

    def _forward(self, stage: int) -> Forward:
        self._forwards[stage] += 1
        return Forward(stage, self._forwards[stage] - 1)

    def _backward(self, stage: int) -> Backward:
        self._backwards[stage] += 1
        return Backward(stage, self._backwards[stage] - 1)

    def _input_half(self, stage: int) -> None:
        whole = self._backward(stage)
        self.ops.append(BackwardInput(stage, whole.microbatch))
        self._waiting.append(BackwardWeight(stage, whole.microbatch))

    def _weight_half(self) -> None:
        self.ops.append(self._waiting.pop(0))
