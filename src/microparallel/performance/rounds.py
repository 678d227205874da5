"""Rounds: one call of every method after another, on tensors of one size, timed and checked.

A shared machine has good moments and bad ones. So the methods take turns, call by call, and each round begins with
another one: whatever disturbs a minute of the run disturbs all of them alike. Of small calls, each turn has several in
a row, and what counts is their mean.

    round 0   torch  ring   tree        warm-up: not counted
    round 1   ring   tree   torch
    round 2   tree   torch  ring
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from microparallel.comms import Comms
from microparallel.performance.case import Case
from microparallel.performance.methods import Method
from microparallel.topology import available_cores


class Rounds:
    """The calls at one size so far: for every method its seconds, each those of the slowest rank.

    A rank that waits for the others has waited for whoever shares its core too. Where ranks do something alone, the
    slowest one's time leaves that out, so then a call takes at least what keeps all cores busy together.
    """

    def __init__(self, comms: Comms, methods: Sequence[Method], case: Case) -> None:
        self.seconds: dict[str, list[float]] = {method.name: [] for method in methods}
        self.counted = 0
        self.spent = self.last_round = 0.0
        self.wrong: tuple[str, int] | None = None  # a method whose result was not the sum, and on which rank
        self._comms = comms
        self._case = case
        self._cores = min(available_cores(), comms.world_size)
        self._order = list(methods)

    def warm_up(self) -> None:
        """A first round, which is not counted: connections, caches and memory are made ready."""
        self._round()

    def one_more(self) -> dict[str, float]:
        """A round that counts; returns what each call took."""
        together = self._round()
        for name, seconds in together.items():
            self.seconds[name].append(seconds)
        self.counted += 1
        return together

    def end(self, name: str) -> None:
        """Leave a method out of the rounds to come."""
        self._order = [method for method in self._order if method.name != name]

    def _round(self) -> dict[str, float]:
        begun = time.perf_counter()
        calls = [time_call(method, self._case) for method in self._order]
        blamed = [0 if call.right else self._comms.rank + 1 for call in calls]
        slowest = largest(self._comms, [*(call.seconds for call in calls), *blamed])
        work = total(self._comms, [call.work for call in calls])
        together = {}
        for method, seconds, all_work, rank in zip(self._order, slowest, work, slowest[len(calls) :], strict=False):
            together[method.name] = max(seconds, all_work / self._cores) if method.alone else seconds
            self.wrong = (method.name, int(rank) - 1) if rank else self.wrong
        self._order = self._order[1:] + self._order[:1]
        [self.last_round] = largest(self._comms, [time.perf_counter() - begun])
        self.spent += self.last_round
        return together


@dataclass(frozen=True)
class Call:
    """A call on this rank: how long it took, how long it kept a core busy, and whether the sum was right."""

    seconds: float
    work: float
    right: bool


def time_call(method: Method, case: Case) -> Call:
    """Call a method, once or some times in a row. All ranks begin together: waiting for a late one is not its cost."""
    tensors = method.tensors_of(case)
    for tensor in tensors:
        case.refill(tensor)
    method.meet()
    begun, work_before = time.perf_counter(), time.process_time()
    for tensor in tensors:
        method.call(tensor, case)
    if tensors[0].is_cuda:  # a GPU works in the background: stop the clock when it is done
        torch.cuda.synchronize(tensors[0].device)
    seconds, work = time.perf_counter() - begun, time.process_time() - work_before
    right = not method.sums or all(case.is_right(tensor) for tensor in tensors)
    return Call(seconds / len(tensors), work / len(tensors), right)


def largest(comms: Comms, numbers: Sequence[float]) -> list[float]:
    """The largest of all ranks' numbers, position by position; so all ranks go on with the same ones."""
    together: list[float] = comms.all_reduce(torch.tensor(numbers, dtype=torch.float64), op="max").tolist()
    return together


def total(comms: Comms, numbers: Sequence[float]) -> list[float]:
    """The sum of all ranks' numbers, position by position."""
    together: list[float] = comms.all_reduce(torch.tensor(numbers, dtype=torch.float64)).tolist()
    return together
