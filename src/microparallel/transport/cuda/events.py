"""Events that ranks wait for across processes, and the order of streams that they make.

Each rank makes events of its own, and writes their handles into its segment, where the others find them by number. An
event is recorded before its number is posted: a wait for an event that was not recorded yet would not wait.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from microparallel.errors import CommsError
from microparallel.torch_private import stream_of_thread
from microparallel.transport.cuda.driver import HANDLE_BYTES
from microparallel.transport.shared_memory.segment import Segment

_LOOKS = 8  # events that are looked at before a new one is made


class OwnEvents:
    """The events that this rank records: one that is needed no longer is recorded again."""

    def __init__(self, segment: Segment, start: int, room: int, device: torch.device) -> None:
        self._map = segment.map
        self._start = start
        self._room = room
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._in_use: deque[tuple[int, Callable[[], bool]]] = deque()
        self._lock = threading.Lock()  # held by the thread that looks for an event

    def record(self) -> int:
        """Record an event at the end of this thread's stream; returns its number."""
        number = self._free() or self._make()
        self._events[number - 1].record(stream_of_thread(self._device))
        return number

    def free_when(self, number: int, free: Callable[[], bool]) -> None:
        """Record this event again as soon as `free()` says so."""
        self._in_use.append((number, free))

    def _free(self) -> int:
        """One that is free; 0 if none was found. The oldest is free first, unless a peer does not answer it."""
        with self._lock:
            looks = len(self._in_use) if len(self._events) == self._room else min(_LOOKS, len(self._in_use))
            for _ in range(looks):
                number, free = self._in_use.popleft()
                if free():
                    return number
                self._in_use.append((number, free))
        return 0

    def _make(self) -> int:
        with self._lock:
            if len(self._events) == self._room:
                raise CommsError(f"more than {self._room} messages are under way on the GPU; wait for some of them")
            event = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
            at = self._start + HANDLE_BYTES * len(self._events)
            event.record(stream_of_thread(self._device))  # before that it has no handle
            self._map[at : at + HANDLE_BYTES] = event.ipc_handle()  # type: ignore[no-untyped-call]
            self._events.append(event)
            return len(self._events)


class TheirEvents:
    """The events of a peer, each opened when this rank first needs it."""

    def __init__(self, segment: Segment, start: int, device: torch.device) -> None:
        self._map = segment.map
        self._start = start
        self._device = device
        self._events: dict[int, torch.cuda.Event] = {}

    def __getitem__(self, number: int) -> torch.cuda.Event:
        event = self._events.get(number)
        if event is None:
            at = self._start + HANDLE_BYTES * (number - 1)
            handle = bytes(self._map[at : at + HANDLE_BYTES])
            event = self._events[number] = torch.cuda.Event.from_ipc_handle(self._device, handle)  # type: ignore[no-untyped-call]
        return event


class StreamPoint(NamedTuple):
    """A place in the order of a stream's work."""

    stream: torch.cuda.Stream
    event: torch.cuda.Event

    @property
    def passed(self) -> bool:
        """Whether the GPU has come to it."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class EventOrder:
    """The order of ranks that compute on a GPU; what they do on the host needs no event, here either."""

    def __init__(self, own: OwnEvents, theirs: Mapping[int, TheirEvents], device: torch.device) -> None:
        self._own = own
        self._theirs = theirs
        self._device = device

    def offered(self, tensor: torch.Tensor) -> int:
        """Record an event for a tensor on the GPU."""
        return self._own.record() if tensor.is_cuda else 0

    def before_reading(self, source: int, event: int) -> None:
        """Let this thread's stream wait until the tensor is computed."""
        if event:
            stream_of_thread(self._device).wait_event(self._theirs[source][event])

    def has_been_read(self, event: int) -> int:
        """Record an event behind what reads the tensor."""
        return self._own.record() if event else 0

    def before_writing(self, reader: int, event: int) -> None:
        """Let this thread's stream wait until the tensor has been read."""
        if event:
            stream_of_thread(self._device).wait_event(self._theirs[reader][event])

    def has_read(self, reader: int, event: int) -> bool:
        """Whether the reader's GPU has read the tensor."""
        return bool(self._theirs[reader][event].query())  # type: ignore[no-untyped-call]

    def wait_until_read(self, reader: int, event: int) -> None:
        """Return when the reader's GPU has read the tensor."""
        self._theirs[reader][event].synchronize()

    def free_when(self, event: int, free: Callable[[], bool]) -> None:
        """Record this event again as soon as `free()` says so."""
        self._own.free_when(event, free)

    def now(self) -> StreamPoint:
        """The end of this thread's stream."""
        stream = stream_of_thread(self._device)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return StreamPoint(stream, event)

    def join(self, point: StreamPoint | None) -> None:
        """Let this thread's stream wait for what another stream had to do."""
        if point is not None:
            stream = stream_of_thread(self._device)
            if stream is not point.stream:
                stream.wait_event(point.event)
