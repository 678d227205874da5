"""Shared memory inside of each host, gloo between hosts: each message takes the best way.

```
    host 0   rank 0 ══ memory ══ rank 1
                │      ╲      ╱     │
                │  gloo   ╲╱        │
                │        ╱  ╲       │
    host 1   rank 2 ══ memory ══ rank 3
```

Ranks of one host compare their calls (`shared_memory/peers.py`). Over the network a call's messages have a tag of their
own, so that calls which do not belong together never mix: they wait until their time is up.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from microparallel.errors import PeerGone, TransportError, UsageError
from microparallel.topology.hosts import hosts_of
from microparallel.torch_private import gloo_group
from microparallel.transport.base import Loan, Work
from microparallel.transport.shared_memory.transport import SharedMemoryTransport
from microparallel.transport.shared_memory.works import CallState, SharedMemoryExchange
from microparallel.transport.torch_distributed import TRANSLATED, TorchExchange, TorchTransport, TorchWork, Translated

_CALLS = 2**30  # tags of collectives have this bit; those of other messages are below


class HostsTransport(SharedMemoryTransport):
    """One rank's connection to the others: the memory of those on its host, and gloo to those on other hosts.

    Args:
        store: where the ranks meet.
        rank: this one.
        world_ranks: the numbers of the group's ranks in the world.
        timeout: seconds that a rank waits for another.
        name: of the transport, which says which ranks of the group share a host.
    """

    def __init__(self, store: dist.Store, rank: int, world_ranks: Sequence[int], timeout: float, *, name: str) -> None:
        hosts = hosts_of(name)
        assert hosts is not None
        super().__init__(store, rank, world_ranks, timeout, next(ranks for ranks in hosts.ranks if rank in ranks))
        self.name = name
        try:
            self._network = _Network(self, dist.PrefixStore("gloo", store))
        except BaseException:
            super().close()
            raise

    def isend(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Any:
        """Start sending a contiguous tensor."""
        return super().isend(tensor, to, tag) if to in self.here else self._network.isend(tensor, to, tag)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int = 0, *, allow_less: bool = False) -> Any:
        """Start receiving into a contiguous tensor."""
        if source in self.here:
            return super().irecv(tensor, source, tag, allow_less=allow_less)
        return self._network.irecv(tensor, source, tag)

    def irecv_from_any(self, tensor: torch.Tensor, tag: int = 0) -> NoReturn:  # noqa: ARG002
        """Refuse: a rank cannot wait for memory and for the network at once."""
        raise UsageError(
            "recv from any rank works among the ranks of one host alone, and these are on several; name the source, or "
            "use the backend 'gloo'"
        )

    def open_exchange(self, call: CallState) -> HostsExchange:
        """Open an exchange of a collective."""
        return HostsExchange(self, call, self._network)

    def close(self) -> None:
        """Leave the group."""
        self._network.leave()
        super().close()


class HostsExchange(SharedMemoryExchange):
    """The exchange of a collective, whose messages to other hosts go over the network."""

    def __init__(self, transport: HostsTransport, call: CallState, network: _Network) -> None:
        super().__init__(transport, call)
        self._here = transport.here
        self._across = TorchExchange(network, _CALLS + call.signature % _CALLS)

    def isend(self, tensor: torch.Tensor, to: int) -> Work:
        """Offer a tensor to a rank of this host, or send it to another host."""
        return super().isend(tensor, to) if to in self._here else self._across.isend(tensor, to)

    def lends(self, source: int) -> bool:
        """A rank of this host does."""
        return source in self._here

    def irecv(self, tensor: torch.Tensor, source: int) -> Work:
        """Receive what a rank of another host sends."""
        return self._across.irecv(tensor, source)

    def borrow(self, like: torch.Tensor, source: int) -> Loan:
        """Read the tensor of a rank of this host where it lies; receive a copy of another's."""
        return super().borrow(like, source) if source in self._here else self._across.borrow(like, source)

    def close(self) -> None:
        """All tensors are offered, and now the others are sent."""
        super().close()
        self._across.close()


class _Network(TorchTransport):
    """gloo between all ranks of a group; what breaks there, the ranks of this host are told, too."""

    def __init__(self, transport: HostsTransport, store: dist.Store) -> None:
        timeout = timedelta(seconds=transport.timeout)
        with TRANSLATED:
            group = gloo_group(torch.device("cpu"), store, transport.rank, transport.world_ranks, timeout)
        store.set(f"place/{transport.rank}", socket.gethostname())
        places = {
            world_rank: store.get(f"place/{rank}").decode() for rank, world_rank in enumerate(transport.world_ranks)
        }
        super().__init__(group, store, transport.carries, places, transport.world_ranks)
        self._transport = transport

    def _started(self, work: dist.Work | None, tensor: torch.Tensor) -> TorchWork:
        return _NetworkWork(work, self._translated, tensor, transport=self._transport)

    def _failure(self, error: RuntimeError) -> TransportError:
        failure = super()._failure(error)
        if isinstance(failure, PeerGone):
            self._transport.peers.lose(failure)
        return failure

    def leave(self) -> None:
        """End the connections."""
        if "group" in self.__dict__:
            self.group.shutdown()
            self.forget()


class _NetworkWork(TorchWork):
    """A message between hosts; torch's own timeout is the one that the group was made with."""

    def __init__(
        self, work: dist.Work | None, translated: Translated, *tensors: torch.Tensor, transport: HostsTransport
    ) -> None:
        super().__init__(work, translated, *tensors)
        self._transport = transport

    def wait(self, timeout: float | None = None) -> None:
        """Return when the message has arrived."""
        super().wait(self._transport.timeout if timeout is None else timeout)
