"""Rounds: one call of every method after another, on tensors of one size, timed and checked.

A shared machine has good moments and bad ones. So the methods take turns, call by call, and each round begins with
another one: whatever disturbs a minute of the run disturbs all of them alike.

    round 0   torch  ring   tree        warm-up: not counted
    round 1   ring   tree   torch
    round 2   tree   torch  ring
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from microparallel.comms import Comms

TORCH = "torch"  # torch.distributed.all_reduce, which the others are measured against
ADD = "add"  # no all-reduce: each rank adds one tensor to another, all at once
_PERIOD = 10_007  # a prime, so that no two slices of a tensor look alike
_EXACT = 256  # whole numbers up to here are exact in every dtype, bfloat16 too


class Case:
    """One rank's tensor of one size: whole numbers, so that their sum is exact in whatever order they are added."""

    def __init__(self, comms: Comms, size: int, dtype: torch.dtype) -> None:
        length = size // dtype.itemsize
        patterns = [_pattern(rank, comms.world_size) for rank in range(comms.world_size)]
        self.contribution = _repeat(patterns[comms.rank].to(comms.device, dtype), length)
        self.expected = _repeat(torch.stack(patterns).sum(0).to(comms.device, dtype), length)
        self.tensor = torch.empty_like(self.contribution)

    def refill(self) -> None:
        """Put this rank's contribution back."""
        self.tensor.copy_(self.contribution)

    def is_right(self) -> bool:
        """Whether the tensor holds exactly the sum."""
        return torch.equal(self.tensor, self.expected)


class Rounds:
    """The calls at one size so far: for every method its seconds, each those of the slowest rank."""

    def __init__(self, comms: Comms, methods: Sequence[str], case: Case) -> None:
        self.seconds: dict[str, list[float]] = {method: [] for method in (*methods, ADD)}
        self.counted = 0
        self.spent = self.last_round = 0.0
        self.wrong: tuple[str, int] | None = None  # a method whose result was not the sum, and on which rank
        self._comms = comms
        self._case = case
        self._order = list(self.seconds)

    def warm_up(self) -> None:
        """A first round, which is not counted: connections, caches and memory are made ready."""
        self._round()

    def one_more(self) -> dict[str, float]:
        """A round that counts; returns what each call took."""
        together = self._round()
        for method, seconds in together.items():
            self.seconds[method].append(seconds)
        self.counted += 1
        return together

    def end(self, method: str) -> None:
        """Leave a method out of the rounds to come."""
        self._order.remove(method)

    def _round(self) -> dict[str, float]:
        begun = time.perf_counter()
        mine, right = time_round(self._comms, self._order, self._case)
        blamed = [0 if right[method] else self._comms.rank + 1 for method in self._order]
        *numbers, self.last_round = largest(self._comms, [*mine.values(), *blamed, time.perf_counter() - begun])
        self.spent += self.last_round
        together = dict(zip(self._order, numbers, strict=False))
        for method, rank in zip(self._order, numbers[len(together) :], strict=True):
            self.wrong = (method, int(rank) - 1) if rank else self.wrong
        self._order = self._order[1:] + self._order[:1]
        return together


def time_round(comms: Comms, methods: Sequence[str], case: Case) -> tuple[dict[str, float], dict[str, bool]]:
    """Time one call of each method, in this order; returns the seconds on this rank, and whether the sum was right."""
    seconds, right = {}, {}
    for method in methods:
        call = _function(comms, method, case)
        case.refill()
        seconds[method] = time_call(comms, call, case.tensor)
        right[method] = method == ADD or case.is_right()
    return seconds, right


def time_call(comms: Comms, call: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> float:
    """The seconds that a call takes on this rank. All ranks begin together: waiting for a late one is not its cost."""
    comms.barrier()
    begun = time.perf_counter()
    call(tensor)
    if tensor.is_cuda:  # a GPU works in the background: stop the clock when it is done
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter() - begun


def largest(comms: Comms, numbers: Sequence[float]) -> list[float]:
    """The largest of all ranks' numbers, position by position; so all ranks go on with the same ones."""
    together: list[float] = comms.all_reduce(torch.tensor(numbers, dtype=torch.float64), op="max").tolist()
    return together


def _function(comms: Comms, method: str, case: Case) -> Callable[[torch.Tensor], object]:
    if method == TORCH:
        return lambda tensor: dist.all_reduce(tensor, group=comms.process_group)
    if method == ADD:
        return lambda tensor: tensor.add_(case.contribution)
    return lambda tensor: comms.all_reduce(tensor, algorithm=method)


def _pattern(rank: int, ranks: int) -> torch.Tensor:
    """Whole numbers of one rank, so small that the sum over all ranks is exact too."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, max(2, _EXACT // ranks), (_PERIOD,), generator=generator)


def _repeat(pattern: torch.Tensor, length: int) -> torch.Tensor:
    return pattern.repeat(-(-length // len(pattern)))[:length].clone()
