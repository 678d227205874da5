"""What a rank knows of the other ranks of its group: which are gone, and which have made another call.

Each rank keeps a connection to every other, which the kernel closes when a process ends, however it ends. And each rank
has a `RankStatus` at the beginning of its segment, which the others can still read when the rank is gone: how many
collectives it has called, which ranks it had lost, or which call it made when the others made another.
"""

from __future__ import annotations

import json
import select
import socket
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from microparallel.errors import Mismatch, PeerGone
from microparallel.text import show_ranks
from microparallel.transport.shared_memory.segment import Segment

STATUS_BYTES = 4096
_WELL, _CLOSED, _FAILED = 0, 1, 2
_TEXT = 64  # where in a status the text of a failure begins
_EXPLANATION = 2.0  # seconds for the others to write down which call they made
_LONGEST = 300  # characters of a call that are kept for error messages


class RankStatus:
    """A rank's state, which the rank writes and all others read: well, closed, or failed with the reason."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    @property
    def closed(self) -> bool:
        """Whether the rank has closed its transport."""
        return self._segment.words[0] == _CLOSED

    @property
    def called(self) -> int:
        """How many collectives the rank has called, modulo 2³²; it may not have run them yet."""
        return self._segment.words[2]

    def has_called(self, number: int) -> bool:
        """Whether the rank has called the collective of this number."""
        return (self.called - number) % 2**32 < 2**31

    def call(self) -> int:
        """Count one more collective that this rank has called; returns its number."""
        self._segment.words[2] = number = (self.called + 1) % 2**32
        return number

    @property
    def notices(self) -> int:
        """How many notices about its moved memory the rank has sent to all others (`regions.py`), modulo 2³²."""
        return self._segment.words[3]

    def count_notice(self) -> None:
        """Count one more notice."""
        self._segment.words[3] = (self.notices + 1) % 2**32

    def close(self) -> None:
        """Let the others know that this rank has closed its transport."""
        if self._segment.words[0] == _WELL:
            self._segment.words[0] = _CLOSED

    def fail(self, failure: dict[str, Any]) -> None:
        """Write down what went wrong on this rank; only the first failure is kept."""
        if self._segment.words[0] != _WELL:
            return
        text = json.dumps(failure).encode()[: STATUS_BYTES - _TEXT]
        self._segment.map[_TEXT : _TEXT + len(text)] = text
        self._segment.words[1] = len(text)
        self._segment.words[0] = _FAILED

    def failure(self) -> dict[str, Any] | None:
        """What went wrong on the rank; None if it has written no failure."""
        if self._segment.words[0] != _FAILED:
            return None
        text = self._segment.map[_TEXT : _TEXT + self._segment.words[1]]
        try:
            failure = json.loads(text)
        except ValueError:  # cut off, or half-written by a rank that died meanwhile
            return {}
        return failure if isinstance(failure, dict) else {}


class Peers:
    """The ranks of a group, as one of them, this rank, sees them."""

    def __init__(
        self,
        rank: int,
        world_ranks: Sequence[int],
        segments: Mapping[int, Segment],
        connections: dict[int, socket.socket],
    ) -> None:
        self._rank = rank
        self._world_ranks = world_ranks
        self._connections = connections
        self._statuses = {peer: RankStatus(segment) for peer, segment in segments.items()}
        self._call = ""  # the collective that this rank is in, as text
        self._recent: deque[tuple[int, str]] = deque(maxlen=8)

    def call(self) -> int:
        """Let the other ranks know that this rank has called one more collective; returns its number."""
        return self._statuses[self._rank].call()

    def have_called(self, number: int) -> bool:
        """Whether all ranks have called the collective of this number."""
        return all(status.has_called(number) for status in self._statuses.values())

    def missing(self, number: int) -> list[int]:
        """The ranks that have not called the collective of this number."""
        return sorted(rank for rank, status in self._statuses.items() if not status.has_called(number))

    def begin(self, call: str, signature: int) -> None:
        """Remember which collective this rank is in, and the last few before it."""
        self._call = call[:_LONGEST]
        self._recent.append((signature, self._call))

    def require_alive(self, peer: int) -> None:
        """Raise if a peer will never answer; the failures that ranks wrote down say which one was lost first."""
        for other in (peer, *self._connections):
            failure = self._statuses[other].failure()
            if failure is not None and "call" in failure:
                self.disagree()
            if failure is not None:
                lost = [self._world_ranks.index(rank) for rank in failure.get("lost", []) if rank in self._world_ranks]
                self._give_up([rank for rank in lost if rank != self._rank] or [other])
        if self._is_disconnected(peer) or self._statuses[peer].closed:
            self._give_up([peer])

    def require_any_alive(self) -> None:
        """Raise if all peers are gone, so that no message can come."""
        if all(self._is_disconnected(peer) or self._statuses[peer].closed for peer in self._connections):
            self._give_up(list(self._connections))

    def disagree(self, signature: int | None = None, source: int | None = None) -> NoReturn:
        """Raise `Mismatch`, since not all ranks make the same call: each writes down its own, and reads the others'."""
        self._statuses[self._rank].fail({"call": self._call, "recent": list(self._recent)})
        deadline = time.monotonic() + _EXPLANATION
        calls: dict[int, str] = {}
        while len(calls) < len(self._statuses) and time.monotonic() < deadline:
            calls = {rank: call for rank in self._statuses if (call := self._call_of(rank)) is not None}
            time.sleep(0.001)
        rows = _rows(calls)
        if source is not None and len(set(calls.values())) == 1:  # a message of an earlier call
            earlier = dict((self._statuses[source].failure() or {}).get("recent", ())).get(signature, "an earlier call")
            rows = f"  rank {source} made {earlier}, and rank {self._rank} took no part in that"
        raise Mismatch(f"the calls of these ranks do not belong together\n{rows}")

    def close(self) -> None:
        """Let the others know that this rank leaves, and close its connections."""
        self._statuses[self._rank].close()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _call_of(self, rank: int) -> str | None:
        call = (self._statuses[rank].failure() or {}).get("call")
        return call if isinstance(call, str) else None

    def _give_up(self, lost: list[int]) -> NoReturn:
        self._statuses[self._rank].fail({"lost": [self._world_ranks[rank] for rank in lost]})
        raise PeerGone(lost)

    def _is_disconnected(self, peer: int) -> bool:
        connection = self._connections.get(peer)
        if connection is None or connection.fileno() < 0:
            return True
        ended = select.poll()  # unread notices (`regions.py`) do not hide that the connection is closed
        ended.register(connection, select.POLLRDHUP)
        return bool(ended.poll(0))


def _rows(calls: dict[int, str]) -> str:
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank, call in sorted(calls.items()):
        ranks_of[call].append(rank)
    return "\n".join(f"  {show_ranks(ranks)}: {call}" for call, ranks in ranks_of.items())
