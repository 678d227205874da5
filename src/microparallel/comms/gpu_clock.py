"""What a GPU did when: events on its streams, read on the host's clock when a recording has ended.

A GPU runs behind the host. So the recorder asks no clock when an operation begins and ends: it puts an event into the
stream that does the operation, and nothing waits.

    host          begin  end            begin  end            …the recording ends, here the host waits
    stream         ├ event ░░░░ event ┤  ├ event ░░ event ┤   and reads all events
    anchors   ●                                               ●

An anchor is a moment that both clocks know: the host puts an event into an idle stream and waits for it. One is taken
before the recording and one after it; between them the GPU's clock is stretched to fit, so that drift is taken out.

Communication often runs on another stream than its caller's: on that of the work queue's thread, or on NCCL's. Events
belong there:

    work queue    the thread that runs the collective records them, on its stream
    NCCL          its stream is its own; one of ours waits for the same works in the same order (`follow`)
    gloo          no stream: the host itself carries the bytes, and its clock says when
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from microparallel.transport.base import Work

Moment = float | torch.cuda.Event  # on `time.perf_counter`, or on the GPU's own clock

_TRIES = 8  # of which the quickest is the anchor: it is known best


class GpuClock:
    """Moments on the streams of one GPU.

    Args:
        device: the GPU.
        cuda: `torch.cuda`, or what stands for it in tests.

    Attributes:
        doubt: by how many seconds moments may be wrong on the host's clock, once the recording has ended.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self.doubt = 0.0
        self._device = device
        self._cuda = cuda
        self._first: tuple[Any, float] | None = None  # an event, and when it was on the host's clock
        self._rate = 1.0  # seconds of the host's clock in one of the GPU's
        self._followers: dict[Hashable, Any] = {}  # streams that wait for what others do

    def begin(self) -> None:
        """Take the first anchor; the GPU has done all that this process gave it."""
        self._first = self._anchor()

    def end(self) -> None:
        """Take the second anchor: from now on, moments can be read."""
        assert self._first is not None
        first, begun = self._first
        last, ended = self._anchor()
        between = float(first.elapsed_time(last)) / 1e3
        self._rate = (ended - begun) / between if between > 0 else 1.0

    def _anchor(self) -> tuple[Any, float]:
        self._cuda.synchronize(self._device)
        tries = []
        for _ in range(_TRIES):
            event = self._cuda.Event(enable_timing=True)
            before = time.perf_counter()
            event.record()
            event.synchronize()
            after = time.perf_counter()
            tries.append((after - before, event, (before + after) / 2))
        width, event, moment = min(tries, key=lambda one: one[0])
        self.doubt = max(self.doubt, width / 2)
        return event, moment

    def now(self) -> Moment:
        """The end of this thread's stream, as it is now."""
        event: torch.cuda.Event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, moment: Moment) -> float:
        """A moment on the host's clock."""
        if isinstance(moment, float) or self._first is None:
            return float(moment)  # type: ignore[arg-type]
        event, begun = self._first
        return begun + self._rate * float(event.elapsed_time(moment)) / 1e3

    # ── streams that are not the caller's ───────────────────────────────────────────────────────────────────────

    def follow(self, works: Sequence[dist.Work], group: Hashable) -> tuple[Moment, Moment]:
        """When works of NCCL begin, which have just been started on this thread's stream, and when they end.

        They begin when this thread's stream comes to them, and those before them in their group have ended.
        """
        stream = self._follower(group)
        stream.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(stream):
            begun = self.now()
            for work in works:
                work.wait()
            return begun, self.now()

    def end_of(self, works: Sequence[Work], group: Hashable) -> Moment:
        """When works end that another thread has run: a stream that waits for them is there then."""
        with self._cuda.stream(self._follower(group)):
            for work in works:
                with contextlib.suppress(Exception):  # its error is told to who waits for it
                    work.wait()
            return self.now()

    def _follower(self, group: Hashable) -> Any:
        if group not in self._followers:
            self._followers[group] = self._cuda.Stream(self._device)
        return self._followers[group]


def works_of_torch(works: Sequence[Any]) -> list[dist.Work]:
    """torch's own works of these, if they compute on a GPU: to wait for one more than once does no harm there."""
    found = []
    for work in works:
        # A TorchWork lets go of torch's when it is waited for, so it is not waited for here.
        inner, tensors = getattr(work, "_work", None), getattr(work, "_tensors", ())
        if not isinstance(inner, dist.Work) or not any(tensor.is_cuda for tensor in tensors):
            return []
        found.append(inner)
    return found
