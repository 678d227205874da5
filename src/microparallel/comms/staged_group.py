"""gloo for the tensors of a GPU: they go through pinned host memory, and no call of the user's waits for the GPU.

```
the caller's stream   ▒▒ makes the tensor ▒▒│ goes on computing ▒▒▒▒▒▒▒▒▒▒▒▒▒▒│ after wait()
streams for copies                          └▓ to the host ▓            ▓ back ▓┘
another thread                               waits for that copy ▓ gloo ▓
```

torch's gloo does this itself in the collectives that it has for GPUs. This adds messages, programs and what runs as a
program. Pinned memory is torch's: it keeps what was freed for the next tensor of that size, when the GPU is done with
it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from microparallel.collectives import resolve
from microparallel.comms.interpreter import (
    COMBINE,
    Algorithm,
    Memory,
    Personal,
    Pieces,
    RankProgram,
    listed,
    perform,
    rank_program,
)
from microparallel.comms.messages import StagedReceive
from microparallel.comms.torch_group import TorchGroup
from microparallel.comms.wire import on_host
from microparallel.comms.work_queue import QueuedWork, WorkQueue
from microparallel.observe.flight import Flight
from microparallel.program import AUTO
from microparallel.transport.base import Work
from microparallel.transport.torch_distributed import TorchWork

Tensors = Sequence[torch.Tensor]
Waits = Callable[[], object]


class Copies(Protocol):
    """Copies tensors of a device to the host's memory, and back, beside what the caller computes."""

    def thread_begins(self) -> None:
        """What each thread does first that copies."""

    def room(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor like this one in the host's memory."""

    def out(self, tensors: Tensors, hosts: Tensors) -> Waits:
        """Start copying to the host what the caller's stream makes; returns how a thread waits until it is there."""

    def back(self, hosts: Tensors, tensors: Tensors) -> Waits:
        """Start copying back; returns what lets the calling thread's stream wait until it is there."""


class PinnedCopies:
    """Copies over pinned memory, on a stream for each direction.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outward = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._homeward = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def thread_begins(self) -> None:
        """Let the thread use this GPU."""
        torch.cuda.set_device(self._device)

    def room(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pinned memory for a tensor."""
        return on_host(tensor)

    def out(self, tensors: Tensors, hosts: Tensors) -> Waits:
        """Copy to the host, once the calling thread's stream has made the tensors."""
        self._outward.wait_stream(torch.cuda.current_stream(self._device))
        return self._copied(hosts, tensors, self._outward).synchronize

    def back(self, hosts: Tensors, tensors: Tensors) -> Waits:
        """Copy back. A thread has waited for `out`, so the caller's stream has done all that came before the call."""
        there = self._copied(tensors, hosts, self._homeward)
        return lambda: torch.cuda.current_stream(self._device).wait_event(there)

    def _copied(self, into: Tensors, tensors: Tensors, stream: torch.cuda.Stream) -> torch.cuda.Event:
        with torch.cuda.stream(stream):
            for place, tensor in zip(into, tensors, strict=True):
                place.copy_(tensor, non_blocking=True)
                on_the_gpu = tensor if place.device.type == "cpu" else place
                on_the_gpu.record_stream(stream)  # torch gives its memory away only after this copy
        # A thread that waits for this event leaves its core to others.
        there = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        there.record(stream)
        return there


class StagedGroup(TorchGroup):
    """A gloo group that takes the tensors of a GPU as well as those of the CPU.

    Two threads work for it, as far as there is something for them: one starts messages whose tensors are on the host by
    now, in the order in which they were sent; one runs programs, in the order of the calls. Tensors of the CPU take the
    way that they take without this.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        store: dist.Store | None,
        carries: frozenset[str] = frozenset({"cpu", "cuda"}),
        flight: Flight | None = None,
        places: Sequence[str] = (),
    ) -> None:
        super().__init__(group, store, carries, flight, places)
        self.transport_name = "gloo"
        self.batched = frozenset()  # gloo starts each message by itself
        self._copies: Copies | None = None
        self._sends = WorkQueue(self._thread_begins)
        self._last_send: QueuedWork | None = None
        self._calls = WorkQueue(self._thread_begins)

    @property
    def copies(self) -> Copies:
        """Made when the first tensor is copied, for the GPU that this rank uses then."""
        if self._copies is None:
            self._copies = PinnedCopies(torch.device("cuda", torch.cuda.current_device()))
        return self._copies

    def _thread_begins(self) -> None:
        self.copies.thread_begins()

    def _is_elsewhere(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type != "cpu"

    # ── messages ────────────────────────────────────────────────────────────────────────────────────────────────

    def isend(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:  # type: ignore[override]
        """Start sending a contiguous tensor."""
        waits = self._last_send is not None and not self._last_send.done
        if not self._is_elsewhere(tensor) and not waits:
            return super().isend(tensor, to, tag)
        host, there = tensor, None
        if self._is_elsewhere(tensor):
            host = self.copies.room(tensor)
            there = self.copies.out([tensor], [host])
        started: list[TorchWork] = []
        send = super().isend

        def start(_deadline: float | None) -> None:
            if there is not None:
                there()
            started.append(send(host, to, tag))

        self._last_send = self._sends.append(start)
        self._sends.run_in_background()
        return StagedSend(self._last_send, started)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Work:  # type: ignore[override]
        """Start receiving into a contiguous tensor; it is copied there on the stream of the thread that waits."""
        if not self._is_elsewhere(tensor):
            return super().irecv(tensor, source, tag)
        host = self.copies.room(tensor)
        return StagedReceive(super().irecv(host, source, tag), host, tensor)

    # ── what runs as a program ──────────────────────────────────────────────────────────────────────────────────

    def all_reduce(self, tensor: torch.Tensor, op: str, algorithm: Algorithm = AUTO) -> Work:
        """Start combining the ranks' tensors, in place: torch's own all-reduce, or a program on the host."""
        if algorithm == AUTO or not self._is_elsewhere(tensor):
            return super().all_reduce(tensor, op, algorithm)
        chosen = (
            algorithm
            if isinstance(algorithm, RankProgram)
            else rank_program("all-reduce", algorithm, self.world_size, self.rank)
        )
        host = self.copies.room(tensor)
        memory = Memory(host, chosen.slices)
        return self._perform(chosen, [memory], op, ([tensor], [host]), ([host], [tensor]))

    def reduce_scatter(  # type: ignore[override]
        self, output: torch.Tensor, inputs: list[torch.Tensor], op: str, *, together: bool = False
    ) -> Work:
        """Start combining the ranks' inputs position by position, by the program that other groups run over gloo."""
        if not self._is_elsewhere(output):
            return super().reduce_scatter(output, inputs, op, together=together)
        name = resolve("reduce-scatter", AUTO, self.world_size, inputs[0].nbytes, self.transport_name)
        program = rank_program("reduce-scatter", name, self.world_size, self.rank)
        hosts = [self.copies.room(tensor) for tensor in inputs]
        memories = list(listed(hosts, None)(program.slices, lambda: False))
        return self._perform(program, memories, op, (inputs, hosts), ([hosts[self.rank]], [output]))

    def all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Work:
        """Start handing input r to rank r, and getting one from each, by messages that are all under way at once."""
        if not self._is_elsewhere(outputs[self.rank]):
            return super().all_to_all(outputs, inputs)
        outputs[self.rank].copy_(inputs[self.rank])
        program = rank_program("all-to-all", "direct", self.world_size, self.rank)
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        sent, received = (list(map(self.copies.room, tensors)) for tensors in (inputs, outputs))
        memory = Personal(sent, received, self.rank)
        out = [inputs[rank] for rank in others], [sent[rank] for rank in others]
        back = [received[rank] for rank in others], [outputs[rank] for rank in others]
        return self._perform(program, [memory], "sum", out, back)

    def _perform(
        self,
        program: RankProgram,
        memories: Sequence[Pieces],
        op: str,
        out: tuple[Tensors, Tensors],
        back: tuple[Tensors, Tensors],
    ) -> QueuedWork:
        """Let the calls' thread run a program on the host, between copies out of the GPU and back."""
        there = self.copies.out(*out)
        tag = self._next_tag()
        joins: list[Waits] = []

        def run(deadline: float | None) -> None:
            there()
            for memory in memories:
                for work in perform(program.rounds, memory, self, COMBINE[op], tag):
                    work.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            joins.append(self.copies.back(*back))

        def joined() -> None:
            joins[0]()

        return self._calls.append(run, joined=joined)

    def run_in_background(self) -> None:
        """Let the calls' thread run the programs that have been started; torch's threads run what is torch's own."""
        self._calls.run_in_background()

    def forget(self) -> None:
        """Let the threads end, and go of the group."""
        self._sends.close()
        self._calls.close()
        super().forget()


class StagedSend:
    """A send that starts when its tensor is on the host.

    Args:
        queued: is done when it has started.
        started: holds it then.
    """

    def __init__(self, queued: QueuedWork, started: list[TorchWork]) -> None:
        self._queued = queued
        self._started = started

    def poll(self) -> bool:
        """Whether it is known to be complete."""
        return self._queued.done and all(work.poll() for work in self._started)

    def wait(self, timeout: float | None = None) -> None:
        """Return when it is complete."""
        self._queued.wait(timeout)
        self._started[0].wait(timeout)
