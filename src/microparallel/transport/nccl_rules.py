"""A transport in one process that keeps NCCL's rules for messages: what would hang on GPUs is an error here.

- **No tags.** The first send from rank a to rank b meets the first receive of rank b from rank a.
- **No buffers.** A send ends when it is received, and until then its tensor must not be written to.
- **One stream for each rank.** Its exchanges run one after another: the messages of an exchange run side by side, and
  the next exchange begins when all of them have ended. A message outside an exchange is an exchange of its own.

So two ranks that each send and then receive wait for ever:

```
rank 0: [send to 1] [receive from 1]        rank 0: [send to 1, receive from 1]
rank 1: [send to 0] [receive from 0]        rank 1: [send to 0, receive from 0]
        both wait in their first exchange           as one exchange, both end
```

NCCL calls an exchange a group (`ncclGroupStart`, `ncclGroupEnd`), and torch `batch_isend_irecv`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import combinations

import torch

from microparallel.errors import CommsError, Mismatch, TransportTimeout
from microparallel.transport.base import Receiving


@dataclass(eq=False, slots=True)
class Transfer:
    """One end of a message."""

    tensor: torch.Tensor
    peer: int
    sends: bool
    done: bool = False

    def __str__(self) -> str:
        content = f"{self.tensor.numel()} × {str(self.tensor.dtype).removeprefix('torch.')}"
        return f"{'send' if self.sends else 'receive'} of {content} {'to' if self.sends else 'from'} rank {self.peer}"


class Streams:
    """For every rank, the exchanges that have not ended; the first of them is the one that runs."""

    def __init__(self, ranks: int) -> None:
        self._queues: list[deque[list[Transfer]]] = [deque() for _ in range(ranks)]
        self._ended = [0] * ranks

    def append(self, rank: int, transfers: list[Transfer]) -> None:
        """Put an exchange at the end of a rank's stream."""
        for transfer in transfers:
            if transfer.peer == rank or not 0 <= transfer.peer < len(self._queues):
                raise CommsError(f"rank {rank}: {transfer}, which is not another rank of {len(self._queues)}")
        _require_apart(rank, transfers)
        self._queues[rank].append(transfers)
        self.advance()

    def advance(self) -> None:
        """Move every message whose send and receive both run, and begin exchanges, until nothing more can move."""
        moving = True
        while moving:
            moving = any(self._deliver(rank) for rank in range(len(self._queues)))
            for rank, queue in enumerate(self._queues):
                if queue and not self._running(rank):
                    queue.popleft()
                    self._ended[rank] += 1
                    moving = True

    def _running(self, rank: int) -> list[Transfer]:
        """The messages of a rank's first exchange that have not ended, in order."""
        queue = self._queues[rank]
        return [transfer for transfer in queue[0] if not transfer.done] if queue else []

    def _deliver(self, sender: int) -> bool:
        """Deliver what a rank is sending to the ranks that are receiving it; returns whether anything was delivered."""
        delivered = False
        for send in self._running(sender):
            if not send.sends:
                continue
            awaited = [end for end in self._running(send.peer) if not end.sends and end.peer == sender]
            if awaited:
                _copy(send, awaited[0], sender)
                delivered = True
        return delivered

    def position(self, rank: int) -> str:
        """Which exchange a rank is in, for an error message."""
        running = ", ".join(map(str, self._running(rank)))
        if not running:
            return f"rank {rank} has nothing under way after {self._ended[rank]} exchanges"
        return f"rank {rank} is in exchange {self._ended[rank] + 1} ({running})"

    def __str__(self) -> str:
        return "; ".join(self.position(rank) for rank in range(len(self._queues)))


class StreamWork:
    """An exchange in its rank's stream: the Work of each of its messages, since they end together."""

    def __init__(self, rank: int, streams: Streams) -> None:
        self.transfers: list[Transfer] = []
        self._rank = rank
        self._streams = streams

    def poll(self) -> bool:
        """Whether the exchange has ended."""
        return all(transfer.done for transfer in self.transfers)

    def wait(self, timeout: float | None = None) -> None:  # noqa: ARG002
        """Return if the exchange has ended. No other rank runs while this one waits, so otherwise it never will."""
        if not self.poll():
            raise TransportTimeout(f"deadlock under NCCL's rules: {self._streams}")

    def __str__(self) -> str:
        return self._streams.position(self._rank)


class StreamExchange(Receiving):
    """An exchange that joins its rank's stream when it is closed."""

    def __init__(self, rank: int, streams: Streams) -> None:
        self._rank = rank
        self._streams = streams
        self._work = StreamWork(rank, streams)

    def isend(self, tensor: torch.Tensor, to: int) -> StreamWork:
        """Add a send."""
        self._work.transfers.append(Transfer(tensor, to, sends=True))
        return self._work

    def irecv(self, tensor: torch.Tensor, source: int) -> StreamWork:
        """Add a receive."""
        self._work.transfers.append(Transfer(tensor, source, sends=False))
        return self._work

    def close(self) -> None:
        """Join the stream."""
        if self._work.transfers:
            self._streams.append(self._rank, self._work.transfers)


class NcclRulesTransport:
    """One rank's end of a world in one process that keeps NCCL's rules."""

    def __init__(self, rank: int, world_size: int, streams: Streams) -> None:
        self.rank = rank
        self.world_size = world_size
        self._streams = streams

    def isend(self, tensor: torch.Tensor, to: int, tag: int = 0) -> StreamWork:  # noqa: ARG002
        """Start sending, as an exchange of one message; there are no tags."""
        exchange = self.exchange()
        work = exchange.isend(tensor, to)
        exchange.close()
        return work

    def irecv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> StreamWork:  # noqa: ARG002
        """Start receiving, as an exchange of one message; there are no tags."""
        exchange = self.exchange()
        work = exchange.irecv(tensor, source)
        exchange.close()
        return work

    def exchange(self, tag: int = 0) -> StreamExchange:  # noqa: ARG002
        """Open an exchange; there are no tags."""
        return StreamExchange(self.rank, self._streams)


def nccl_rules_transports(ranks: int) -> list[NcclRulesTransport]:
    """One transport for each rank of this process."""
    streams = Streams(ranks)
    return [NcclRulesTransport(rank, ranks, streams) for rank in range(ranks)]


def _copy(send: Transfer, receive: Transfer, sender: int) -> None:
    if (send.tensor.numel(), send.tensor.dtype) != (receive.tensor.numel(), receive.tensor.dtype):
        raise Mismatch(
            f"rank {sender}'s {send} meets rank {send.peer}'s {receive}: NCCL matches messages by their order alone"
        )
    receive.tensor.view(-1).copy_(send.tensor.view(-1))
    send.done = receive.done = True


def _require_apart(rank: int, transfers: list[Transfer]) -> None:
    """Messages of an exchange run in any order, so none may be received into memory that another one uses."""
    for first, second in combinations(transfers, 2):
        if _overlap(first.tensor, second.tensor) and not (first.sends and second.sends):
            raise CommsError(f"rank {rank}: {first} and {second} use the same memory in one exchange")


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.device != second.device or not first.nbytes or not second.nbytes:
        return False
    low, high = sorted((first, second), key=torch.Tensor.data_ptr)
    return high.data_ptr() < low.data_ptr() + low.nbytes
