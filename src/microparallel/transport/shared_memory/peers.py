"""What a rank knows of the other ranks of its group: which are gone, and which have made another call.

Each rank keeps a connection to every other, which the kernel closes when a process ends, however it ends. And each rank
has a `RankStatus` at the beginning of its segment, which the others can still read when the rank is gone: how many
collectives it has called, and which (`call_log.py`); which ranks it had lost; whether its calls differ from theirs.
"""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from microparallel.errors import LinkLost, Mismatch, PeerGone
from microparallel.transport.shared_memory.call_log import LOG_BYTES, CallLog, difference_in_words, first_difference
from microparallel.transport.shared_memory.segment import Segment

_LOG = 2048  # where in a status the log of calls begins
STATUS_BYTES = _LOG + LOG_BYTES
_WELL, _CLOSED, _FAILED = 0, 1, 2
_TEXT = 64  # where in a status the text of a failure begins
_EXPLANATION = 2.0  # seconds for the others to make a call that can be compared


class RankStatus:
    """A rank's state, which the rank writes and all others read: well, closed, or failed with the reason."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self.log = CallLog(segment, _LOG)

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

    def call(self, signature: int, text: str) -> int:
        """Count one more collective that this rank has called; returns its number.

        It is written down before it counts: a rank that sees it counted can read which it is.
        """
        number = (self.called + 1) % 2**32
        self.log.write(number, signature, text)
        self._segment.words[2] = number
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
        text = json.dumps(failure).encode()[: _LOG - _TEXT]
        self._segment.map[_TEXT : _TEXT + len(text)] = text
        self._segment.words[1] = len(text)
        self._segment.words[0] = _FAILED

    def failure(self) -> dict[str, Any] | None:
        """What went wrong on the rank; None if it has written no failure."""
        if self._segment.words[0] != _FAILED:
            return None
        text = bytes(self._segment.map[_TEXT : _TEXT + self._segment.words[1]])
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
        self._own = self._statuses[rank]
        self._logs = {peer: status.log for peer, status in self._statuses.items()}

    def call(self, signature: int, text: str) -> int:
        """Let the other ranks know that this rank has called one more collective, and which; returns its number."""
        return self._own.call(signature, text)

    def have_called(self, number: int) -> bool:
        """Whether all ranks have called the collective of this number."""
        return all(status.has_called(number) for status in self._statuses.values())

    def missing(self, number: int) -> list[int]:
        """The ranks that have not called the collective of this number."""
        return sorted(rank for rank, status in self._statuses.items() if not status.has_called(number))

    def require_alive(self, peer: int) -> None:
        """Raise if a peer will never answer; the failures that ranks wrote down say which one was lost first."""
        for other in (peer, *self._connections):
            failure = self._statuses[other].failure()
            if failure is not None and "differs" in failure:
                self.disagree(int(failure["differs"]), str(failure.get("detail", "")))
            if failure is not None:
                lost = [self._world_ranks.index(rank) for rank in failure.get("lost", []) if rank in self._world_ranks]
                lost = [rank for rank in lost if rank != self._rank] or [other]
                self._give_up(LinkLost(lost, str(failure["link"])) if "link" in failure else PeerGone(lost))
        if self._is_disconnected(peer) or self._statuses[peer].closed:
            self._give_up(PeerGone([peer]))

    def require_any_alive(self) -> None:
        """Raise if all peers are gone, so that no message can come."""
        if all(self._is_disconnected(peer) or self._statuses[peer].closed for peer in self._connections):
            self._give_up(PeerGone(list(self._connections)))

    def disagree(self, number: int, detail: str = "") -> NoReturn:
        """Raise `Mismatch`, since not all ranks make the same calls; the others do the same when they next look.

        Args:
            number: of the call in which this was noticed; the calls may differ since an earlier one.
            detail: what differs, where all ranks make the same calls.
        """
        self._own.fail({"differs": number, "detail": detail})
        deadline = time.monotonic() + _EXPLANATION
        found = first_difference(self._logs)
        while time.monotonic() < deadline:
            at = number if found is None else found[0]
            all_have = all(self._will_not_call(rank, at) for rank in self._statuses)
            found = first_difference(self._logs)  # after the question: a rank may have called in between
            if all_have and at == (number if found is None else found[0]):
                break
            time.sleep(0.001)
        if found is not None:
            detail = difference_in_words(self._logs, *found)
        elif not detail:
            detail = "  all make the same calls, but a message of an earlier one, which had failed, has come only now"
        raise Mismatch(f"the calls of these ranks do not belong together\n{detail}")

    def _will_not_call(self, rank: int, number: int) -> bool:
        """Whether a rank has made the call of this number, or is gone."""
        status = self._statuses[rank]
        return status.has_called(number) or status.closed or (rank != self._rank and self._is_disconnected(rank))

    def has_closed(self, peer: int) -> bool:
        """Whether a peer has left, as one does that has come to its end."""
        return self._statuses[peer].closed

    def close(self) -> None:
        """Let the others know that this rank leaves, and close its connections."""
        self._statuses[self._rank].close()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def lose(self, loss: PeerGone) -> None:
        """Let the other ranks know which ones this rank has lost, and whether that was their link."""
        link = {"link": str(loss)} if isinstance(loss, LinkLost) else {}
        self._own.fail({"lost": [self._world_ranks[rank] for rank in loss.ranks], **link})

    def _give_up(self, loss: PeerGone) -> NoReturn:
        self.lose(loss)
        raise loss

    def _is_disconnected(self, peer: int) -> bool:
        connection = self._connections.get(peer)
        if connection is None or connection.fileno() < 0:
            return True
        ended = select.poll()  # unread notices (`regions.py`) do not hide that the connection is closed
        ended.register(connection, select.POLLRDHUP)
        return bool(ended.poll(0))
