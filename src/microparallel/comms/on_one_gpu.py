"""A group whose ranks share a GPU: the same programs, in the order of the GPU's streams.

A call's place in that order is where its thread's stream was when it called. If that thread waits for the call at once,
it runs the call itself, on that stream: then everything is in order. If the queue's thread runs it, it does so on a
stream of its own, beside what the caller computes. That stream first waits for the caller's, and the stream of a thread
that has waited for the call waits for that one.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from microparallel.comms.in_place import Views, perform_in_place, plan_of
from microparallel.comms.interpreter import COMBINE, Algorithm, Memory, Sums
from microparallel.comms.shared_memory import SharedMemoryGroup
from microparallel.comms.work_queue import QueuedWork
from microparallel.observe.flight import Flight
from microparallel.program import AUTO
from microparallel.torch_private import uncompiled
from microparallel.transport.cuda import CudaTransport
from microparallel.transport.cuda.marks import StreamPoint


@uncompiled
class OneGpuGroup(SharedMemoryGroup):
    """One rank's place in a group whose ranks share a GPU."""

    transport: CudaTransport

    def __init__(self, transport: CudaTransport, flight: Flight | None = None) -> None:
        super().__init__(transport, flight)
        self._device = transport.device
        self._stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        self._views = Views()
        self._called: list[StreamPoint] = []  # where calls stand in their callers' streams, not marked yet
        self._last: StreamPoint | None = None  # the end of the last collective on the queue's stream
        # What has run on another stream than its caller's, and when that ends: until then the tensors must stay.
        self._under_way: deque[tuple[StreamPoint, Callable[[float | None], None]]] = deque()

    def _thread_begins(self) -> None:
        torch.cuda.set_device(self._device)
        torch.cuda.set_stream(self._stream)

    def all_reduce(self, tensor: torch.Tensor, op: str, algorithm: Algorithm = AUTO) -> QueuedWork:
        """Combine the ranks' tensors, in place, on every rank."""
        program = self._program("all-reduce", tensor.numel() * tensor.element_size(), algorithm)
        plan = plan_of(program) if tensor.is_cuda and tensor.numel() else None
        if plan is None:
            return super().all_reduce(tensor, op, program)
        state = self._next_call(program.name)

        def run(deadline: float | None) -> None:
            self.transport.exchange_notices()
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            memory = Memory(tensor, plan.slices)
            perform_in_place(plan, memory, Sums(memory, COMBINE[op]), self.transport, self._views, state, timeout)

        return self._queued(run, state)

    def _append(self, run: Callable[[float | None], None], timeout: float | None = None, **about: Any) -> QueuedWork:
        order = self.transport.order
        called = order.here()
        self._called.append(called)
        ended: list[StreamPoint] = []

        def in_order(deadline: float | None) -> None:
            with contextlib.suppress(ValueError):
                self._called.remove(called)
            order.join(called)
            order.join(self._last)
            run(deadline)
            end = order.here()
            ended.append(end)
            if end.stream is not called.stream:
                self._last = end.mark()
                self._keep(end, run)

        return super()._append(in_order, timeout, joined=lambda: order.join(ended[0]), **about)

    def _keep(self, end: StreamPoint, run: Callable[[float | None], None]) -> None:
        """Keep what a call holds until the GPU has done it: torch may give free memory away on the caller's stream."""
        while self._under_way and self._under_way[0][0].passed:
            self._under_way.popleft()
        self._under_way.append((end, run))

    def run_in_background(self) -> None:
        """Let the queue's thread run what was called, in the order of the GPU: after what was asked of it until now."""
        while self._called:
            self._called.pop().mark()
        super().run_in_background()

    @property
    def has_free_cores(self) -> bool:
        """True: the GPU works beside the cores."""
        return True

    def run_after_backward(self) -> None:
        """Let the queue's thread run what was called at once: it takes the GPU's time, not autograd's."""
        self.run_in_background()
