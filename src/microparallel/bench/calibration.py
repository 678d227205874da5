"""A short calibration: what a rank's own work takes by itself, and what messages take by themselves.

Nothing here is the step that is to be predicted. Work is timed without a message, on all ranks at once, as they compute
in a step; messages are timed without work. All of it takes turns with the steps, so that a machine's good and bad
moments are shared.

    work       forward, the moment at which each gradient has arrived in backward, packing gradients, the optimizer
    messages   all-reduces of the sizes that matter, one at a time and in a queue, and a message there and back
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from microparallel.bench.data_parallel import LEARNING_RATE
from microparallel.bench.engine import largest, seconds_of, wait_for_gpu
from microparallel.bench.subjects import Batch
from microparallel.comms import Comms
from microparallel.comms.wire import gather_json
from microparallel.models.loss import mean_loss

_QUEUE = 16  # all-reduces that follow each other, where a queue is timed
_MOST_SIZES = 8  # that are timed of each kind; what lies between them is interpolated


@dataclass(frozen=True)
class Curve:
    """How long something takes for some sizes; between them it is a line, and beyond them it goes on as the last."""

    points: tuple[tuple[int, float], ...]  # bytes and seconds, in the order of the sizes

    def at(self, size: float) -> float:
        """How long it takes for that size."""
        if size <= self.points[0][0] or len(self.points) == 1:
            return self.points[0][1]
        place = next((index for index, (known, _) in enumerate(self.points) if known >= size), len(self.points) - 1)
        (first, low), (second, high) = self.points[place - 1 : place + 1]
        return max(0.0, low + (high - low) * (size - first) / (second - first))


@dataclass(frozen=True)
class RankTimes:
    """What one rank's own work takes, in seconds.

    Attributes:
        forward: of the whole model.
        arrivals: when each parameter's gradient had arrived, since backward began; in the order of the parameters.
        backward: until it returned.
        packing: multiplying all gradients into other memory, as buckets do.
        optimizer: updating the weights.
    """

    forward: float
    arrivals: tuple[float, ...]
    backward: float
    packing: float
    optimizer: float

    @property
    def numbers(self) -> list[float]:
        """All of them in a row, which `from_numbers` reads."""
        return [self.forward, self.backward, self.packing, self.optimizer, *self.arrivals]

    @staticmethod
    def from_numbers(numbers: Sequence[float]) -> RankTimes:
        """The times from such a row."""
        forward, backward, packing, optimizer, *arrivals = numbers
        return RankTimes(forward, tuple(arrivals), backward, packing, optimizer)


@dataclass(frozen=True)
class MessageTimes:
    """What messages take between ranks, in seconds."""

    in_place: Curve  # an all-reduce of memory that the transport chose, as buckets are
    queued: Curve  # one of several ordinary all-reduces that follow each other
    message: Curve  # from one rank to the next


class WorkAlone:
    """A step of the model without any communication."""

    alone = True

    def __init__(self, comms: Comms, model: nn.Module, batch: Batch) -> None:
        self._comms = comms
        self._model = copy.deepcopy(model)
        self._batch = batch
        self._parameters = [one for one in self._model.parameters() if one.requires_grad]
        self._packed = [torch.empty_like(one) for one in self._parameters]
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=LEARNING_RATE)
        self._arrived: dict[int, float] = {}
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(self._arrival(index))  # type: ignore[no-untyped-call]
        self._last: RankTimes | None = None
        self._kept: list[RankTimes] = []

    def _arrival(self, index: int) -> Callable[[torch.Tensor], None]:
        def arrive(_: torch.Tensor) -> None:
            self._arrived[index] = time.perf_counter()

        return arrive

    def step(self) -> None:
        """Forward, backward, packing and optimizer, each with a clock."""
        self._optimizer.zero_grad()
        self._arrived = {}
        moments = [time.perf_counter()]

        def phase_ends() -> None:
            wait_for_gpu(self._comms.device)
            moments.append(time.perf_counter())

        loss = mean_loss(self._model, *self._batch)
        phase_ends()
        loss.backward()  # type: ignore[no-untyped-call]
        phase_ends()
        for parameter, packed in zip(self._parameters, self._packed, strict=True):
            torch.mul(parameter.grad, 0.5, out=packed)  # type: ignore[arg-type]
        phase_ends()
        self._optimizer.step()
        phase_ends()
        forward, backward, packing, optimizer = (end - begin for begin, end in pairwise(moments))
        began, ended = moments[1:3]  # of backward
        arrivals = tuple(self._arrived.get(index, ended) - began for index in range(len(self._parameters)))
        self._last = RankTimes(forward, arrivals, backward, packing, optimizer)

    def keep(self) -> None:
        """The last step counts."""
        if self._last is not None:
            self._kept.append(self._last)

    def steps(self) -> list[tuple[RankTimes, ...]]:
        """For each step that counts, what it took every rank; all ranks call this, and get the same."""
        by_rank = gather_json([one.numbers for one in self._kept], self._comms)
        return [tuple(map(RankTimes.from_numbers, step)) for step in zip(*by_rank, strict=True)]


def medians_of(steps: Sequence[Sequence[RankTimes]]) -> tuple[RankTimes, ...]:
    """Each rank's medians over all steps."""
    return tuple(
        RankTimes.from_numbers(
            [statistics.median(column) for column in zip(*(one.numbers for one in mine), strict=True)]
        )
        for mine in zip(*steps, strict=True)
    )


class MessagesAlone:
    """All-reduces and messages of some sizes, without any computation.

    Args:
        comms: the ranks.
        buckets: sizes of all-reduces in place, in bytes.
        gradients: sizes of all-reduces that follow each other.
        activations: sizes of messages.
    """

    alone = False

    def __init__(
        self, comms: Comms, buckets: Sequence[int], gradients: Sequence[int], activations: Sequence[int]
    ) -> None:
        self._comms = comms
        self._work: dict[tuple[str, int], Callable[[], float]] = {}
        for size in _some(buckets):
            self._work["in place", size] = self._in_place(size)
        for size in _some(gradients):
            self._work["queued", size] = self._in_a_queue(size)
        for size in _some(activations):
            self._work["message", size] = self._there_and_back(size)
        self._last: dict[tuple[str, int], float] = {}
        self._kept: list[dict[tuple[str, int], float]] = []

    def step(self) -> None:
        """Each of them once; all ranks begin together."""
        self._last = {}
        for key, work in self._work.items():
            self._comms.barrier()
            self._last[key] = work()

    def keep(self) -> None:
        """The last step counts."""
        self._kept.append(self._last)

    def times(self) -> MessageTimes:
        """The medians, of the slowest rank each time; all ranks call this, and get the same."""
        slowest = [largest(self._comms, list(step.values())) for step in self._kept]
        medians = dict(zip(self._work, (statistics.median(one) for one in zip(*slowest, strict=True)), strict=True))

        def curve(kind: str) -> Curve:
            return Curve(tuple(sorted((size, seconds) for (of, size), seconds in medians.items() if of == kind)))

        return MessageTimes(curve("in place"), curve("queued"), curve("message"))

    def _in_place(self, size: int) -> Callable[[], float]:
        tensor = self._comms.empty((max(1, size // 4),)).to(self._comms.device)
        tensor.zero_()
        return lambda: self._timed(lambda: self._comms.all_reduce(tensor))

    def _in_a_queue(self, size: int) -> Callable[[], float]:
        tensors = [torch.zeros(max(1, size // 4), device=self._comms.device) for _ in range(_QUEUE)]

        def all_of_them() -> None:
            for request in [self._comms.all_reduce(tensor, async_op=True) for tensor in tensors]:
                request.wait()

        return lambda: self._timed(all_of_them) / _QUEUE

    def _there_and_back(self, size: int) -> Callable[[], float]:
        ball = torch.zeros(max(1, size // 4), device=self._comms.device)
        comms = self._comms

        def play() -> None:
            if comms.rank == 0:
                comms.send_tensor(ball, dest=1)
                comms.recv_tensor(ball.shape, src=1)
            elif comms.rank == 1:
                comms.recv_tensor(ball.shape, src=0)
                comms.send_tensor(ball, dest=0)

        return lambda: self._timed(play) / 2

    def _timed(self, work: Callable[[], object]) -> float:
        return seconds_of(work, self._comms.device)


def _some(sizes: Sequence[int]) -> list[int]:
    """Not too many of these sizes: the smallest, the largest, and some between."""
    known = sorted(set(sizes))
    if len(known) <= _MOST_SIZES:
        return known
    return sorted({known[index * (len(known) - 1) // (_MOST_SIZES - 1)] for index in range(_MOST_SIZES)})
