"""A short calibration: what a rank's own work takes by itself, and what messages take by themselves.

Nothing here is the step that is to be predicted. Work is timed without a message, on all ranks at once, as they compute
in a step; messages are timed without work. All of it takes turns with the steps (`step_rounds`), so that a machine's
good and bad moments are shared.

    work       forward, the moment at which each gradient has arrived in backward, packing gradients, the optimizer
    messages   all-reduces of the sizes that matter, one at a time and in a queue, and a message there and back
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from microparallel.bench.data_parallel import LEARNING_RATE, Batch
from microparallel.bench.engine import largest, wait_for_gpu
from microparallel.bench.pipeline_costs import StageTimes
from microparallel.comms import Comms
from microparallel.comms.wire import gather_json
from microparallel.models.loss import mean_loss
from microparallel.program import (
    AllReduce,
    Backward,
    Bucket,
    Forward,
    ForwardStages,
    Join,
    Named,
    Observed,
    Op,
    OptimizerStep,
    Program,
    Send,
    halves,
    is_meeting,
)
from microparallel.schedules import data_parallel_step, ddp_naive
from microparallel.simulator.fitted import Fitted, RecordedCosts
from microparallel.trace import Difference, Trace

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
        begun = time.perf_counter()
        loss = mean_loss(self._model, *self._batch)
        wait_for_gpu(self._comms.device)
        forward = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        wait_for_gpu(self._comms.device)
        backward = time.perf_counter()
        for parameter, packed in zip(self._parameters, self._packed, strict=True):
            torch.mul(parameter.grad, 0.5, out=packed)  # type: ignore[arg-type]
        wait_for_gpu(self._comms.device)
        packing = time.perf_counter()
        self._optimizer.step()
        wait_for_gpu(self._comms.device)
        end = time.perf_counter()
        arrivals = tuple(self._arrived.get(index, backward) - forward for index in range(len(self._parameters)))
        self._last = RankTimes(forward - begun, arrivals, backward - forward, packing - backward, end - packing)

    def keep(self) -> None:
        """The last step counts."""
        if self._last is not None:
            self._kept.append(self._last)

    def steps(self) -> list[tuple[RankTimes, ...]]:
        """For each step that counts, what it took every rank; all ranks call this, and get the same."""
        rows = [[one.forward, one.backward, one.packing, one.optimizer, *one.arrivals] for one in self._kept]
        by_rank = gather_json(rows, self._comms)
        return [tuple(_rank_times(row) for row in step) for step in zip(*by_rank, strict=True)]


def medians_of(steps: Sequence[Sequence[RankTimes]]) -> tuple[RankTimes, ...]:
    """Each rank's medians over all steps."""
    found = []
    for mine in zip(*steps, strict=True):
        rows = [[one.forward, one.backward, one.packing, one.optimizer, *one.arrivals] for one in mine]
        found.append(_rank_times([statistics.median(column) for column in zip(*rows, strict=True)]))
    return tuple(found)


def _rank_times(row: Sequence[float]) -> RankTimes:
    forward, backward, packing, optimizer, *arrivals = row
    return RankTimes(forward, tuple(arrivals), backward, packing, optimizer)


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
        begun = time.perf_counter()
        work()
        wait_for_gpu(self._comms.device)
        return time.perf_counter() - begun


def _some(sizes: Sequence[int]) -> list[int]:
    """Not too many of these sizes: the smallest, the largest, and some between."""
    known = sorted(set(sizes))
    if len(known) <= _MOST_SIZES:
        return known
    return sorted({known[index * (len(known) - 1) // (_MOST_SIZES - 1)] for index in range(_MOST_SIZES)})


# How long would a step take? Simulated, with times from a short calibration (`calibration`).
#
# naive        the whole backward, then one all-reduce after another, a parameter each
# ddp          an all-reduce for each bucket as soon as its gradients are there: while backward goes on, or in between
# where communication would take a core from it (`Comms.can_overlap`)
# gpipe, 1f1b  the schedule's program, with the times of its stages and of a message


SMALL = 8  # bytes: a message that only says something


@dataclass(frozen=True)
class Prediction:
    """One method: what was predicted, and what was measured.

    Attributes:
        method: by its name.
        seconds: of a step, predicted.
        measured: of each step that was timed.
        fitted: what was simulated.
    """

    method: str
    seconds: float
    measured: tuple[float, ...]
    fitted: Fitted

    @property
    def median(self) -> float:
        """The median of the measured steps."""
        return statistics.median(self.measured)

    @property
    def trace(self) -> Trace:
        """The simulated step, to be drawn over a measured one."""
        return self.fitted.simulate()

    @property
    def error(self) -> float:
        """How much too long the prediction is, as a share of what was measured; negative if it is too short."""
        return Difference("step", self.seconds, self.median).error


def predict_naive(work: Sequence[RankTimes], sizes: Sequence[int], messages: MessageTimes) -> Fitted:
    """Backward, then an all-reduce for each parameter; before them a small one, in which ranks tell what they have."""
    plain = ddp_naive(len(sizes), len(work))
    told = (Join(), AllReduce(Named("present"), "dp"), Join())
    ranks = [[new for op in ops for new in (told if isinstance(op, Join) else (op,))] for ops in plain.ranks]
    seconds: dict[tuple[int, Op], float] = {}
    for rank, one in enumerate(work):
        seconds[rank, Forward(0, rank)] = one.forward
        seconds[rank, Backward(len(sizes) - 1, rank)] = one.backward
        seconds[rank, OptimizerStep()] = one.optimizer
    program = replace(plain, ranks=tuple(map(tuple, ranks)))
    return _with_sums(program, seconds, sizes, messages.queued, messages)


def predict_ddp(
    work: Sequence[RankTimes],
    buckets: Sequence[Sequence[int]],
    sizes: Sequence[int],
    messages: MessageTimes,
    overlap: bool,
) -> Fitted:
    """A bucket leaves when its last gradient has arrived, and been packed.

    Args:
        work: of each rank.
        buckets: the parameters in each bucket, by their numbers.
        sizes: of the parameters, in bytes.
        messages: what they take.
        overlap: whether backward goes on meanwhile.
    """
    totals = [sum(sizes[index] for index in bucket) for bucket in buckets]
    rest = Observed("the rest of backward", "backward")
    plain = data_parallel_step(len(buckets), len(work), overlap=overlap)
    program = replace(plain, ranks=tuple((*ops[:-1], rest, ops[-1]) for ops in plain.ranks))
    seconds: dict[tuple[int, Op], float] = {}
    for rank, one in enumerate(work):
        at = 0.0
        for number, (bucket, size) in enumerate(zip(buckets, totals, strict=True)):
            full = max(one.arrivals[index] for index in bucket)
            packed = one.packing * size / sum(totals)
            seconds[rank, Backward(len(buckets) - 1 - number, rank)] = max(0.0, full - at) + packed
            at = max(at, full)
        seconds[rank, ForwardStages(0, len(buckets), rank)] = one.forward
        seconds[rank, rest] = max(0.0, one.backward - at)
        seconds[rank, OptimizerStep()] = one.optimizer
    return _with_sums(program, seconds, totals, messages.in_place, messages)


def _with_sums(
    program: Program,
    seconds: dict[tuple[int, Op], float],
    sizes: Sequence[int],
    curve: Curve,
    messages: MessageTimes,
) -> Fitted:
    """What ranks compute, and what they sum: the buckets of these sizes; what is of no bucket is small."""
    sums: dict[Op, int] = {AllReduce(Bucket(index), "dp"): size for index, size in enumerate(sizes)}
    bytes_of: dict[tuple[int, Op], float] = {}
    for rank, ops in enumerate(program.ranks):
        for op in filter(is_meeting, ops):
            bytes_of[rank, op] = size = sums.get(op, SMALL)
            seconds[rank, op] = (curve if op in sums else messages.in_place).at(size)
    return Fitted(program, RecordedCosts(seconds=seconds, sizes=bytes_of))


def predict_pipeline(
    program: Program, stages: StageTimes | Mapping[Op, float], activation: int, messages: MessageTimes
) -> Fitted:
    """The schedule with the times of its computations, where all messages are as long as an activation.

    Args:
        program: the schedule.
        stages: how long its stages take for a micro-batch; or how long each computation took.
        activation: bytes.
        messages: how long messages take.
    """

    def seconds(op: Op) -> float:
        if isinstance(op, Send):
            return messages.message.at(activation)
        if is_meeting(op):  # the loss
            return messages.in_place.at(SMALL)
        if isinstance(stages, StageTimes):
            return stages.costs.of(op)
        return sum(stages[half] for half in halves(op))

    ops = [(rank, op) for rank, ops in enumerate(program.ranks) for op in ops]
    return Fitted(program, RecordedCosts(seconds={(rank, op): seconds(op) for rank, op in ops}))
