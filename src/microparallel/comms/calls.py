"""A call in words, which ranks can compare: `all_reduce(float32[4, 128], op='sum')`.

The words stand in error messages and in the flight recorder. In checked mode ranks send them to each other before they
communicate, and ranks that disagree raise `Mismatch` instead of waiting for each other for ever.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from microparallel.comms.group import Group
from microparallel.errors import Mismatch
from microparallel.text import show_ranks
from microparallel.transport.base import Work

_HEADER_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a Comms primitive, as the user wrote it.

    Ranks whose calls belong together have the same `agreement`: for a collective that is the whole call, for a message
    only what the sender and the receiver both state.
    """

    text: str
    agreement: str
    collective: bool = True
    size: int = 0  # bytes of this rank's tensor
    peer: int | None = None  # of a message: the other rank of the group
    sends: bool = False  # of a message: whether it leaves this rank

    def __str__(self) -> str:
        return self.text

    @property
    def name(self) -> str:
        """What is called, without its details."""
        return self.text.partition("(")[0]

    @staticmethod
    @functools.lru_cache(maxsize=4096)  # training makes the same few again and again
    def of_all(name: str, *details: str, size: int = 0) -> Call:
        """A collective: every rank must make it with the same details."""
        text = f"{name}({', '.join(details)})"
        return Call(text, text, size=size)

    @staticmethod
    def of_two(name: str, content: str, peer: int, *, sends: bool, size: int = 0) -> Call:
        """One end of a message: the content must agree, the name and the peer differ."""
        text = f"{name}({content}, {'dest' if sends else 'src'}={peer})"
        return Call(text, content, collective=False, size=size, peer=peer, sends=sends)

    def as_message(self, peer: int | None, *, sends: bool, size: int) -> Call:
        """The same words for one end of a message; its peer is None where it may come from any rank."""
        return replace(self, collective=False, peer=peer, sends=sends, size=size)

    def to_bytes(self) -> bytes:
        """The call as JSON of a fixed size, so that a receiver knows how many bytes to expect."""
        header = json.dumps([_shortened(self.text), _shortened(self.agreement), self.collective]).encode()
        return header.ljust(_HEADER_BYTES)

    @staticmethod
    def from_bytes(header: bytes) -> Call:
        """Read a call back from the bytes a peer sent."""
        text, agreement, collective = json.loads(header)
        return Call(text, agreement, collective)


def _shortened(text: str, limit: int = 400) -> str:
    # A list of many shapes may outgrow the header. The digest keeps different texts different.
    if len(text) <= limit:
        return text
    return f"{text[: limit - 20]}… #{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def describe(tensor: torch.Tensor) -> str:
    """A tensor's dtype and shape, as in `float32[4, 128]`."""
    return describe_content(tensor.dtype, tensor.shape)


@functools.lru_cache(maxsize=4096)
def describe_content(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """A dtype and a shape, as in `float32[4, 128]`."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def describe_list(tensors: Iterable[torch.Tensor]) -> str:
    """The dtypes and shapes of several tensors, counted where they are all alike."""
    texts = [describe(tensor) for tensor in tensors]
    if len(set(texts)) == 1:
        return f"{len(texts)} times {texts[0]}"
    return f"[{', '.join(texts)}]"


def content_bytes(content: str) -> int:
    """How many bytes a tensor described by `describe` takes."""
    name, _, shape = content.partition("[")
    dtype: torch.dtype = getattr(torch, name)
    sizes: list[int] = json.loads(f"[{shape.partition(']')[0]}]")
    return math.prod(sizes) * dtype.itemsize


# ── checked mode ────────────────────────────────────────────────────────────────────────────────────────────────────

HEADER_TAG = 1  # of the messages below, so that they never mix with data


class Checker:
    """Compares the calls of the ranks of one group before they communicate.

    Before a collective, every rank sends its call to every other rank and compares. Before a message, the sender sends
    its call and the receiver compares.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._unread: dict[int, deque[CheckedReceive]] = {}

    def agree(self, call: Call) -> None:
        """Exchange calls with every rank, and raise `Mismatch` on all of them unless they are the same."""
        peers = [peer for peer in range(self._group.world_size) if peer != self._group.rank]
        headers = {peer: torch.empty(_HEADER_BYTES, dtype=torch.uint8, device="cpu") for peer in peers}
        works: list[Work] = [self._group.irecv(headers[peer], peer, HEADER_TAG) for peer in peers]
        works += [self.announce(call, peer) for peer in peers]
        for work in works:
            work.wait()
        calls = {peer: _read(header) for peer, header in headers.items()} | {self._group.rank: call}
        if any(other.agreement != call.agreement for other in calls.values()):
            raise _mismatch(calls)

    def announce(self, call: Call, to: int) -> Work:
        """Send one rank the call that this rank is about to make."""
        return self._group.isend(_header(call), to, HEADER_TAG)

    def receive(self, call: Call, buffer: torch.Tensor, source: int) -> CheckedReceive:
        """Receive a message once its sender's call is known to match."""
        queue = self._unread.setdefault(source, deque())
        return CheckedReceive(self._group, call, buffer, source, queue)


class CheckedReceive:
    """A receive whose header comes first.

    Messages of one sender arrive in order, so waiting for a later one first completes the earlier ones.
    """

    def __init__(
        self, group: Group, call: Call, buffer: torch.Tensor, source: int, queue: deque[CheckedReceive]
    ) -> None:
        self._group = group
        self._call = call
        self._buffer = buffer
        self._source = source
        self._queue = queue
        self._header = torch.empty(_HEADER_BYTES, dtype=torch.uint8, device="cpu")
        self._header_work = group.irecv(self._header, source, HEADER_TAG)
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
            self._error = _mismatch({self._source: sent, self._group.rank: self._call})
            if sent.collective:
                # The other rank waits for our header in its collective: let it fail with the same error.
                self._group.isend(_header(self._call), self._source, HEADER_TAG).wait(timeout)
                self._complete = True
                return
            # Receive the unwanted message all the same, so that the next receive does not get it.
            buffer = torch.empty(content_bytes(sent.agreement), dtype=torch.uint8, device=buffer.device)
        self._group.irecv(buffer, self._source).wait(timeout)
        self._complete = True


def _mismatch(calls: dict[int, Call]) -> Mismatch:
    """The error for ranks that made different calls, each call with the ranks that made it."""
    ranks_of: dict[str, list[int]] = {}
    for rank in sorted(calls):
        ranks_of.setdefault(str(calls[rank]), []).append(rank)
    rows = [f"  {show_ranks(ranks)}: {text}" for text, ranks in ranks_of.items()]
    return Mismatch("the calls of these ranks do not belong together\n" + "\n".join(rows))


def _header(call: Call) -> torch.Tensor:
    return torch.frombuffer(bytearray(call.to_bytes()), dtype=torch.uint8).cpu()


def _read(header: torch.Tensor) -> Call:
    return Call.from_bytes(bytes(header.tolist()))
