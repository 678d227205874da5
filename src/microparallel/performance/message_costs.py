"""What a message costs between these ranks: measured quickly, for estimates of what was not measured."""

from __future__ import annotations

import statistics
from functools import partial

import torch

from microparallel.collectives import all_reduce_program
from microparallel.comms import Comms
from microparallel.errors import UsageError
from microparallel.performance.case import Case
from microparallel.performance.fit import MessageCosts, fit_messages
from microparallel.performance.methods import ADD, Method
from microparallel.performance.rounds import Rounds

_ALGORITHMS = ("ring", "tree")  # one with many small messages, and one with few large ones
_SIZES = (4_000, 64_000, 1_000_000, 4_000_000)  # bytes
_REPEATS = 7


def measure_message_costs(comms: Comms) -> MessageCosts:
    """Measure what a message costs, its bytes, and adding them; all ranks call this, in about a second."""
    if comms.world_size == 1:
        raise UsageError("one rank sends no messages, so their cost cannot be measured; start at least 2")
    methods = [Method(name, _calling(comms, name), comms.barrier) for name in _ALGORITHMS]
    methods.append(Method(ADD, lambda tensor, case: tensor.add_(case.contribution), comms.barrier, sums=False))
    times = [(size, _medians(comms, methods, size)) for size in _SIZES]
    measured = [
        (all_reduce_program(name, comms.world_size), size, medians[name])
        for size, medians in times
        for name in _ALGORITHMS
    ]
    costs = fit_messages(measured, [(size, medians[ADD]) for size, medians in times])
    if costs is None:
        raise UsageError("latency and bandwidth of this world cannot be told apart")
    return costs


def time_all_reduce(comms: Comms, size: int, algorithm: str = "auto") -> float:
    """The median time of an all-reduce of so many bytes; all ranks call this."""
    method = Method(algorithm, _calling(comms, algorithm), comms.barrier)
    return _medians(comms, [method], size)[algorithm]


def _medians(comms: Comms, methods: list[Method], size: int) -> dict[str, float]:
    dtype = torch.float32 if size >= torch.float32.itemsize else torch.uint8
    rounds = Rounds(comms, methods, Case(comms, size, dtype))
    rounds.warm_up()
    for _ in range(_REPEATS):
        rounds.one_more()
    return {name: statistics.median(seconds) for name, seconds in rounds.seconds.items()}


def _calling(comms: Comms, algorithm: str) -> partial[object]:
    return partial(_all_reduce, comms, algorithm)


def _all_reduce(comms: Comms, algorithm: str, tensor: torch.Tensor, _: Case) -> object:
    return comms.all_reduce(tensor, algorithm=algorithm)
