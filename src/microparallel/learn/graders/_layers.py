"""Layers that are watched: when they compute, and how many bytes a rank holds of what they have computed.

Whatever a learner makes of the layers, they tell: hooks on each write its forward and its backward into the rank's log.
A clock that runs on what the logs say (`makespan`) knows nothing of real time: it is the same on a busy machine.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from microparallel.learn.graders._memory import collect_garbage
from microparallel.learn.log import RECEIVES, SENDS, Called, Log, Row
from microparallel.observe import Activity
from microparallel.program import Backward, Forward

_TAKES = {Forward: 1.0, Backward: 2.0}


class LayerWatch:
    """Hooks on a model's layers, for one rank: they tell its log, and count bytes after each forward.

    What counts is what autograd saves for the backward, and what goes into a layer and comes out of it, as long as it
    is in memory, for whatever reason. Parameters do not count.

    Attributes:
        most: the most bytes that were held at once.
    """

    def __init__(self, layers: nn.ModuleList, log: Log | None = None, limit: float = math.inf) -> None:
        """Watch these layers. What only waits for the garbage collector counts as long as it is within the limit."""
        self.most = 0
        self._log, self._limit = log, limit
        self.leave_out(layers)
        self._made: list[weakref.ref[torch.UntypedStorage]] = []
        for number, layer in enumerate(layers):
            layer.register_forward_hook(self._hook(number))

    def leave_out(self, module: nn.Module) -> None:
        """The parameters of this module do not count."""
        self._parameters = {parameter.data_ptr() for parameter in module.parameters()}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count what the layers compute in this block, in this thread."""
        self._made.clear()
        with saved_tensors_hooks(self._saves, lambda tensor: tensor):
            yield

    def _hook(self, number: int) -> Any:
        def after_forward(_: nn.Module, inputs: tuple[torch.Tensor, ...], outputs: torch.Tensor) -> None:
            self._tell(Forward(number, 0))
            if outputs.requires_grad:
                outputs.register_hook(lambda _: self._tell(Backward(number, 0)))  # type: ignore[no-untyped-call]
            for tensor in (*inputs, outputs):
                self._note(tensor)
            self._count()

        return after_forward

    def _tell(self, op: Forward | Backward) -> None:
        if self._log is not None:
            self._log.begins(Activity(op))

    def _saves(self, tensor: torch.Tensor) -> torch.Tensor:
        self._note(tensor)
        return tensor.detach()

    def _note(self, tensor: torch.Tensor) -> None:
        if tensor.is_floating_point() and tensor.data_ptr() not in self._parameters:
            self._made.append(weakref.ref(tensor.untyped_storage()))

    def _count(self) -> None:
        held = self._held()
        if held > max(self.most, self._limit):
            collect_garbage()
            held = self._held()
        self.most = max(self.most, held)

    def _held(self) -> int:
        self._made = [one for one in self._made if one() is not None]
        alive = {storage.data_ptr(): storage.nbytes() for one in self._made if (storage := one()) is not None}
        return sum(bytes_ for address, bytes_ in alive.items() if address not in self._parameters)


def forwards(rows: Sequence[Row]) -> Counter[int]:
    """How often each layer has done a forward, on whatever rank."""
    return Counter(moment.op.stage for row in rows for moment in row if isinstance(moment.op, Forward))


def makespan(rows: Sequence[Row]) -> float:
    """How long the ranks take if a layer's forward takes 1, its backward 2, and messages nothing.

    A receive ends when its message was sent, and a send when it was asked for, at the earliest.
    """
    clocks = [0.0] * len(rows)
    began: dict[tuple[bool, int, int], deque[float]] = defaultdict(deque)  # sends and receives, by sender and receiver
    moments = ((moment.number, rank, moment) for rank, row in enumerate(rows) for moment in row)
    for _, rank, moment in sorted(moments, key=lambda one: one[0]):
        op = moment.op
        if not isinstance(op, Called):
            clocks[rank] += _TAKES.get(type(op), 0.0)
        elif op.call in SENDS + RECEIVES:
            is_send = op.call in SENDS
            channel = (rank, op.peer) if is_send else (op.peer, rank)
            if moment.phase == "begins":
                began[is_send, *channel].append(clocks[rank])
            elif moment.phase == "ends":
                clocks[rank] = max(clocks[rank], began[not is_send, *channel].popleft())
    return max(clocks)
