"""How streams of several processes keep one order: by words in shared memory that a GPU writes, and waits for.

CUDA calls it stream memory operations: a stream writes a number when it comes to that place, or stands still there
until a word is at least a number. It costs some microseconds to ask for that, however many are asked for at once. The
words lie in the ranks' segments, which each process registers with its driver.

Events, which processes can share as well, are of no use when a process is killed: who waits for one of its events waits
for ever. A word can be written by anybody, so a rank lets its own GPU go on (`Channel.release`).
"""

from __future__ import annotations

import ctypes
import struct
import threading
from typing import Any

import torch

from microparallel.torch_private import current_stream_address, stream_of_thread
from microparallel.transport.cuda import driver

_MOST = 64  # in one call
_WAIT, _WRITE = 1, 2  # CU_STREAM_MEM_OP_…_VALUE_32
# A CUstreamBatchMemOpParams: kind, filler, address, number, flags, filler, alias.
_OPERATION = struct.Struct("=IIQQIIQ8x")


class StreamMarks:
    """What one thread's stream has to wait for and to write next, until it is handed over."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = bytearray(_OPERATION.size * _MOST)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
        self._count = 0

    def after(self, address: int, number: int) -> None:
        """The stream waits until the word at this address is at least this number, modulo 2³²."""
        self._add(_WAIT, address, number)

    def write(self, address: int, number: int) -> None:
        """The stream writes the number when everything before is done, and seen by everybody."""
        self._add(_WRITE, address, number)

    def _add(self, kind: int, address: int, number: int) -> None:
        if self._count == _MOST:
            self.hand_over()
        at = _OPERATION.size * self._count
        _OPERATION.pack_into(self._buffer, at, kind, 0, address, number & 0xFFFFFFFF, 0, 0, 0)
        self._count += 1

    def hand_over(self) -> None:
        """Put all of it at the end of the stream that this thread uses now."""
        count, self._count = self._count, 0
        if count:
            driver.put_marks(current_stream_address(self._device), count, self._address)


class StreamPoint:
    """A place in the order of a stream's work: where the stream was when the point was marked.

    It is marked when it is first needed. That may be too late, behind what need not be waited for; so whoever knows
    that another stream will wait for it calls `mark` in time.
    """

    __slots__ = ("_event", "stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self._event: torch.cuda.Event | None = None

    def mark(self) -> StreamPoint:
        """Put the point at what is the end of the stream now, unless it was marked before."""
        self._marked()
        return self

    def _marked(self) -> torch.cuda.Event:
        if self._event is None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self.stream)  # perhaps in another thread than the stream's
            self._event = event
        return self._event

    @property
    def passed(self) -> bool:
        """Whether the GPU has come to it."""
        return bool(self._marked().query())  # type: ignore[no-untyped-call]

    def before(self, stream: torch.cuda.Stream) -> None:
        """Let another stream wait for it."""
        if stream is not self.stream:
            stream.wait_event(self._marked())


class StreamOrder:
    """The order of ranks that compute on one GPU; what they do on the host needs no marks, here either."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._threads = threading.local()

    def is_kept_for(self, tensor: torch.Tensor) -> bool:
        """For tensors on the GPU."""
        return tensor.is_cuda

    def marks(self) -> StreamMarks:
        """The marks of the calling thread."""
        try:
            marks: StreamMarks = self._threads.marks
        except AttributeError:
            driver.use(self._device)
            marks = self._threads.marks = StreamMarks(self._device)
        return marks

    def here(self) -> StreamPoint:
        """A point in this thread's stream, not marked yet."""
        return StreamPoint(stream_of_thread(self._device))

    def join(self, point: Any) -> None:
        """Let this thread's stream wait for what another stream had to do."""
        if point is not None:
            point.before(stream_of_thread(self._device))
