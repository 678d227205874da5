"""Gradients that several ranks have a part of: those of replicas, and those of weights that two stages share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from microparallel.comms import Comms
from microparallel.data_parallel.flat_bucket import FlatBucket, split
from microparallel.pipeline.worker import Worker
from microparallel.program import AllReduce


class ColumnSum:
    """The sum of one stage's gradients over the replicas of that stage, in buckets, in the background."""

    def __init__(self, parameters: Sequence[nn.Parameter], column: Comms, bucket_bytes: float) -> None:
        self._parameters = parameters
        self._column = column
        self._bucket_bytes = bucket_bytes
        self._buckets: list[FlatBucket] = []

    def start(self, operation: AllReduce) -> None:
        """Put all gradients into buckets, and begin to add them up."""
        self._prepare()
        for bucket in self._buckets:
            bucket.fill_up(1.0)
            bucket.leave(self._column, operation, overlap=True)

    def _prepare(self) -> None:
        """Make buckets for the parameters that are trained now."""
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        if trained != [parameter for bucket in self._buckets for parameter in bucket.parameters]:
            self._buckets = [FlatBucket(group, self._column) for group in split(trained, self._bucket_bytes)]

    def finish(self) -> None:
        """Wait for the sums; a gradient that only other replicas had arrives here, too."""
        for bucket in self._buckets:
            bucket.come_back()
            for parameter, view, ranks in zip(bucket.parameters, bucket.views, bucket.having.tolist(), strict=True):
                if ranks > 0:
                    parameter.grad = view
            bucket.reset()


class TiedSum:
    """The sum of one parameter's gradients over the ranks whose stages share it."""

    def __init__(self, parameter: nn.Parameter, holders: Comms) -> None:
        self.parameter = parameter
        self.holders = holders
        holders.broadcast(parameter.data)

    def start(self, operation: AllReduce) -> None:
        """Add the gradients up; afterwards every holder has the same bits, and updates its copy in the same way."""
        if not self.parameter.requires_grad:
            return
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        self.holders.all_reduce(self.parameter.grad, operation=operation)

    def finish(self) -> None:
        """The sum is there already."""


class LossSum:
    """The loss of the whole batch: the sum of what each rank knows of it, in `loss` when it has been started."""

    def __init__(self, worker: Worker, comms: Comms) -> None:
        self.loss = worker.loss
        self._comms = comms

    def start(self, operation: AllReduce) -> None:
        """Add up what all ranks know."""
        self._comms.all_reduce(self.loss, operation=operation)

    def finish(self) -> None:
        """The sum is there already."""


@contextmanager
def beside_earlier_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Begin with no gradients, and add those of before in the end: they are the sum of all ranks' already."""
    earlier = [(parameter, parameter.grad.clone()) for parameter in parameters if parameter.grad is not None]
    for parameter, _ in earlier:
        parameter.grad = None
    try:
        yield
    finally:  # a step that failed must not lose them
        for parameter, gradient in earlier:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
