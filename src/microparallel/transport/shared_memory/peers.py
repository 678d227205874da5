"""Who is still there, and who means what: the other ranks, as seen by one that waits for them.

Each rank keeps a connection to every other, which the kernel closes when a process ends, however it ends. And each can
leave its last words in its own segment (`status.py`), where the others still read them when it is gone: whom it had
lost, or which call it had made when it noticed that the others had made another.
"""

from __future__ import annotations

import select
import socket
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import NoReturn

from microparallel.errors import Mismatch, PeerGone
from microparallel.transport.shared_memory.segment import Segment, Status

_EXPLANATION = 2.0  # seconds for the others to say which call they made
_LONGEST = 300  # characters of a call that are kept to be named


class Peers:
    """The ranks of a group, as one of them sees them."""

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
        self._statuses = {peer: Status(segment) for peer, segment in segments.items()}
        self._doing = ""  # the call that this rank is in, in words
        self._recent: deque[tuple[int, str]] = deque(maxlen=8)

    def call(self) -> int:
        """Let the others know that this rank has called one more collective; returns its number."""
        return self._statuses[self._rank].call()

    def have_called(self, number: int) -> bool:
        """Whether everybody has called a collective."""
        return all(status.has_called(number) for status in self._statuses.values())

    def missing(self, number: int) -> list[int]:
        """The ranks that have not called a collective."""
        return sorted(rank for rank, status in self._statuses.items() if not status.has_called(number))

    def begin(self, call: str, signature: int) -> None:
        """Remember which collective this rank is in, and the last few before it."""
        self._doing = call[:_LONGEST]
        self._recent.append((signature, self._doing))

    def require_alive(self, peer: int) -> None:
        """Raise if a peer can never answer any more; who is to blame stands in the words of those who failed."""
        for other in (peer, *self._connections):
            account = self._statuses[other].account()
            if account is not None and "call" in account:
                self.disagree()
            if account is not None:
                lost = [self._world_ranks.index(rank) for rank in account.get("lost", []) if rank in self._world_ranks]
                self._give_up([rank for rank in lost if rank != self._rank] or [other])
        if self._hung_up(peer) or self._statuses[peer].closed:
            self._give_up([peer])

    def require_any_alive(self) -> None:
        """Raise if no peer can send anything any more."""
        if all(self._hung_up(peer) or self._statuses[peer].closed for peer in self._connections):
            self._give_up(list(self._connections))

    def disagree(self, signature: int | None = None, source: int | None = None) -> NoReturn:
        """Raise `Mismatch`: not all ranks make the same call. Each leaves word of its own, and reads the others'."""
        self._statuses[self._rank].fail({"call": self._doing, "recent": list(self._recent)})
        deadline = time.monotonic() + _EXPLANATION
        calls: dict[int, str] = {}
        while len(calls) < len(self._statuses) and time.monotonic() < deadline:
            calls = {rank: call for rank in self._statuses if (call := self._call_of(rank)) is not None}
            time.sleep(0.001)
        rows = _rows(calls)
        if source is not None and len(set(calls.values())) == 1:  # a message that an earlier call has left behind
            earlier = dict((self._statuses[source].account() or {}).get("recent", ())).get(signature, "an earlier call")
            rows = f"  rank {source} made {earlier}, and rank {self._rank} took no part in that"
        raise Mismatch(f"the calls of these ranks do not belong together\n{rows}")

    def close(self) -> None:
        """Leave."""
        self._statuses[self._rank].close()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _call_of(self, rank: int) -> str | None:
        call = (self._statuses[rank].account() or {}).get("call")
        return call if isinstance(call, str) else None

    def _give_up(self, lost: list[int]) -> NoReturn:
        self._statuses[self._rank].fail({"lost": [self._world_ranks[rank] for rank in lost]})
        raise PeerGone(lost)

    def _hung_up(self, peer: int) -> bool:
        connection = self._connections.get(peer)
        if connection is None or connection.fileno() < 0:
            return True
        ended = select.poll()  # news that nobody has read (`regions.py`) does not hide the end
        ended.register(connection, select.POLLRDHUP)
        return bool(ended.poll(0))


def _rows(calls: dict[int, str]) -> str:
    ranks_of: dict[str, list[str]] = defaultdict(list)
    for rank, call in sorted(calls.items()):
        ranks_of[call].append(str(rank))
    return "\n".join(f"  rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {call}" for call, ranks in ranks_of.items())
