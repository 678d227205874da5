"""Measure the link between two hosts: round trips, clocks, and how fast bytes flow each way.

Every host has a door, a socket that its thread watches. Another host knocks with the word that all have agreed on, and
says in one byte what it wants:

```
    PING     a byte goes there, the time on that host's clock comes back; again and again
    TAKE     bytes flow there for a second; what arrives in its later part is what the link carries
    GIVE     the same the other way
```

A thread answers each visitor, and all of them are daemons: they end with the process.
"""

from __future__ import annotations

import contextlib
import hmac
import select
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from microparallel.topology.clocks import RoundTrip, quickest

PING, TAKE, GIVE = b"p", b"t", b"g"
WORD_LENGTH = 32
_SILENCE = 5.0  # seconds without a byte after which a link counts as broken
_FLOW = 1.0  # seconds that bytes flow: its first half fills the buffers on the way, and is not counted
_MOST_PINGS, _LEAST_PINGS, _PINGING = 200, 5, 1.0  # how many, and for how many seconds
_BLOCK = bytes(1 << 18)
_MOMENT, _SPEED = struct.Struct("!q"), struct.Struct("!d")


@dataclass(frozen=True)
class Measured:
    """What was measured of a link, by the host that knocked.

    Attributes:
        round_trip: seconds, the median.
        spread: between these two are nine of ten round trips.
        there: bytes a second towards the other host.
        back: bytes a second from it.
        ahead: how many seconds the other host's clock is ahead of this one's.
        clock_error: how wrong that may be.
    """

    round_trip: float
    spread: tuple[float, float]
    there: float
    back: float
    ahead: float
    clock_error: float


class Door:
    """Where other hosts measure the link to this one.

    Args:
        address: the one at which this host is reached.
        word: what visitors must say, the same on all hosts.
        clock: nanoseconds, on the clock that people read.
    """

    def __init__(self, address: str, word: str, clock: Callable[[], int] = time.time_ns) -> None:
        self._word, self._clock = word.encode(), clock
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._watch, name="microparallel door", daemon=True).start()

    def close(self) -> None:
        """Let nobody in any more."""
        with contextlib.suppress(OSError):  # wakes the thread that watches
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _watch(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            while True:
                visitor, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(visitor,), name="microparallel visit", daemon=True).start()

    def _serve(self, visitor: socket.socket) -> None:
        with contextlib.suppress(OSError), visitor:  # whoever measures says what went wrong
            visitor.settimeout(_SILENCE)
            visitor.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not hmac.compare_digest(_read(visitor, WORD_LENGTH), self._word):
                return
            wish = _read(visitor, 1)
            if wish == PING:
                while visitor.recv(1):
                    visitor.sendall(_MOMENT.pack(self._clock()))
            elif wish == TAKE:
                visitor.sendall(_SPEED.pack(_take(visitor)))
                while visitor.recv(1 << 16):  # until the visitor has heard it
                    pass
            elif wish == GIVE:
                _give(visitor)


def measure(address: str, port: int, word: str, clock: Callable[[], int] = time.time_ns) -> Measured:
    """Measure the link to a host at its door; raises `OSError` if that cannot be reached, or falls silent."""
    with _visit(address, port, word, PING) as door:
        seconds, quick = _ping(door, clock)
    with _visit(address, port, word, TAKE) as door:
        there = _SPEED.unpack(_give(door))[0]
        _forget(door)
    with _visit(address, port, word, GIVE) as door:
        back = _take(door)
        _forget(door)
    tenths = statistics.quantiles(seconds, n=20)
    return Measured(statistics.median(seconds), (tenths[0], tenths[-1]), there, back, quick.offset, quick.error)


def _visit(address: str, port: int, word: str, wish: bytes) -> socket.socket:
    door = socket.create_connection((address, port), timeout=_SILENCE)
    door.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    door.sendall(word.encode() + wish)
    return door


def _ping(door: socket.socket, clock: Callable[[], int]) -> tuple[list[float], RoundTrip]:
    """How long round trips took; and the quickest, on the clocks that people read."""
    seconds: list[float] = []
    rounds: list[RoundTrip] = []
    end = time.perf_counter() + _PINGING
    while len(seconds) < _LEAST_PINGS or (len(seconds) < _MOST_PINGS and time.perf_counter() < end):
        asked, begun = clock(), time.perf_counter()
        door.sendall(b"?")
        theirs = _MOMENT.unpack(_read(door, _MOMENT.size))[0]
        seconds.append(time.perf_counter() - begun)
        # In seconds since the first question: so large a number as the date has no room for what is measured.
        rounds.append(RoundTrip(0.0, (theirs - asked) / 1e9, seconds[-1]))
    return seconds, quickest(rounds)


def _take(source: socket.socket) -> float:
    """Read what flows here for a while; returns how many bytes a second came in the later half of it."""
    room, total = bytearray(1 << 20), 0
    marks: list[tuple[float, int]] = []
    while not marks or marks[-1][0] - marks[0][0] < _FLOW:
        size = source.recv_into(room)
        if not size:
            raise ConnectionResetError("the other host has ended")
        total += size
        marks.append((time.perf_counter(), total))
    middle = next(mark for mark in marks if mark[0] - marks[0][0] >= _FLOW / 2)
    if middle == marks[-1]:  # nothing came in between: a link so slow is measured as a whole
        middle = marks[0]
    return (marks[-1][1] - middle[1]) / (marks[-1][0] - middle[0])


def _give(target: socket.socket) -> bytes:
    """Let bytes flow there until the other side answers, or ends; returns the answer."""
    deadline = time.perf_counter() + _FLOW + 4 * _SILENCE
    target.setblocking(False)
    while time.perf_counter() < deadline:
        readable, writable, _ = select.select([target], [target], [], _SILENCE)
        if readable:
            target.settimeout(_SILENCE)
            return _read(target, _SPEED.size)
        if not writable:
            break
        with contextlib.suppress(BlockingIOError):
            target.send(_BLOCK)
    raise TimeoutError("large messages do not arrive")


def _forget(door: socket.socket) -> None:
    """Close a connection, and throw away what is still on its way."""
    door.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _read(source: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = source.recv(size - len(parts))
        if not part:
            raise ConnectionResetError("the other host has ended")
        parts += part
    return parts
