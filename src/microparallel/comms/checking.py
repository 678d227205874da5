"""Checked mode: ranks tell each other what they are about to do, and disagreement becomes an error instead of a hang.

Before a collective, every rank sends its call to every other rank and compares. Before a message, the sender sends its
call and the receiver compares. These headers have a tag of their own, so they never mix with data.
"""

from __future__ import annotations

from collections import deque

import torch

from microparallel.comms.calls import HEADER_BYTES, Call, content_bytes
from microparallel.comms.group import Group
from microparallel.errors import Mismatch
from microparallel.transport.base import Work

HEADER_TAG = 1


class Checker:
    """Compares the calls of the ranks of one group."""

    def __init__(self, transport: Group) -> None:
        self._transport = transport
        self._unread: dict[int, deque[CheckedReceive]] = {}

    def agree(self, call: Call) -> None:
        """Exchange calls with every rank, and raise `Mismatch` on all of them unless they are the same."""
        peers = [peer for peer in range(self._transport.world_size) if peer != self._transport.rank]
        headers = {peer: torch.empty(HEADER_BYTES, dtype=torch.uint8, device="cpu") for peer in peers}
        works: list[Work] = [self._transport.irecv(headers[peer], peer, HEADER_TAG) for peer in peers]
        works += [self.announce(call, peer) for peer in peers]
        for work in works:
            work.wait()
        calls = {peer: _read(header) for peer, header in headers.items()} | {self._transport.rank: call}
        if any(other.agreement != call.agreement for other in calls.values()):
            raise mismatch(calls)

    def announce(self, call: Call, to: int) -> Work:
        """Tell one rank what is about to be done."""
        return self._transport.isend(_header(call), to, HEADER_TAG)

    def receive(self, call: Call, buffer: torch.Tensor, source: int) -> CheckedReceive:
        """Receive a message once its sender's call is known to match."""
        queue = self._unread.setdefault(source, deque())
        return CheckedReceive(self._transport, call, buffer, source, queue)


class CheckedReceive:
    """A receive whose header comes first.

    Messages of one sender arrive in order, so waiting for a later one first completes the earlier ones.
    """

    def __init__(
        self, transport: Group, call: Call, buffer: torch.Tensor, source: int, queue: deque[CheckedReceive]
    ) -> None:
        self._transport = transport
        self._call = call
        self._buffer = buffer
        self._source = source
        self._queue = queue
        self._header = torch.empty(HEADER_BYTES, dtype=torch.uint8, device="cpu")
        self._header_work = transport.irecv(self._header, source, HEADER_TAG)
        self._complete = False
        self._error: Mismatch | None = None
        queue.append(self)

    def wait(self, timeout: float | None = None) -> None:
        """Return when the message is in the buffer; raise `Mismatch` when a different one was sent."""
        while not self._complete:
            self._queue.popleft()._finish(timeout)
        if self._error is not None:
            raise self._error

    def _finish(self, timeout: float | None) -> None:
        self._header_work.wait(timeout)
        sent = _read(self._header)
        buffer = self._buffer
        if sent.agreement != self._call.agreement:
            self._error = mismatch({self._source: sent, self._transport.rank: self._call})
            if sent.collective:
                # The other rank waits for our header in its collective: let it fail with the same error.
                self._transport.isend(_header(self._call), self._source, HEADER_TAG).wait(timeout)
                self._complete = True
                return
            # Take the unwanted message off the line, so that the next one is not mistaken for it.
            buffer = torch.empty(content_bytes(sent.agreement), dtype=torch.uint8, device=buffer.device)
        self._transport.irecv(buffer, self._source).wait(timeout)
        self._complete = True


def mismatch(calls: dict[int, Call]) -> Mismatch:
    """The error for ranks that made different calls, each call with the ranks that made it."""
    ranks_of: dict[str, list[int]] = {}
    for rank in sorted(calls):
        ranks_of.setdefault(str(calls[rank]), []).append(rank)
    rows = [
        f"  {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in ranks_of.items()
    ]
    return Mismatch("the calls of these ranks do not belong together\n" + "\n".join(rows))


def _header(call: Call) -> torch.Tensor:
    return torch.frombuffer(bytearray(call.to_bytes()), dtype=torch.uint8).cpu()


def _read(header: torch.Tensor) -> Call:
    return Call.from_bytes(bytes(header.tolist()))
