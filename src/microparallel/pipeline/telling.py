"""Pass a pipeline's operations on to whoever records the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from microparallel.comms.record import Recorder as RunRecorder
from microparallel.pipeline.recording import Events
from microparallel.program import AllReduce, Forward, Op, Recv, Send, halves


class Telling:
    """A recorder for an interpreter that tells several others."""

    def __init__(self, events: Events | None, recorders: Sequence[RunRecorder], world_ranks: Sequence[int]) -> None:
        self._events = events
        self._recorders = recorders
        self._world_ranks = world_ranks

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Within this block, recorders hear of operations, and not of the modules that these call."""
        with ExitStack() as stack:
            for recorder in self._recorders:
                stack.enter_context(recorder.muted())
            yield

    def settle(self) -> None:
        """Wait until the device has done what it was told."""
        if self._events is not None:
            self._events.settle()

    def __call__(
        self, op: Op, start: float, end: float, sent: Sequence[torch.Tensor] = (), waited: float | None = None
    ) -> None:
        """Tell everybody of an operation."""
        if self._events is not None:
            self._events(op, start, end, sent)
        for recorder in self._recorders:
            self._tell(recorder, op, start if waited is None else waited, end, sent)

    def _tell(self, recorder: RunRecorder, op: Op, start: float, end: float, sent: Sequence[torch.Tensor]) -> None:
        if isinstance(op, Send):
            size = sum(tensor.nbytes for tensor in sent)
            recorder.add("send", str(op), start, end, size, self._world_ranks[op.to])
        elif isinstance(op, Recv):
            recorder.add("receive", str(op), start, end, 0, self._world_ranks[op.source])
        elif halves(op) and not isinstance(op, AllReduce):  # what is reduced, its Comms tells
            recorder.add("forward" if isinstance(op, Forward) else "backward", str(op), start, end)
