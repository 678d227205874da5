"""`comms.messages`: tagged messages of any tensor, on any device, as a transport over which programs run.

A pipeline's interpreter sends and receives through this. The flight recorder writes each message down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from microparallel.comms.calls import describe
from microparallel.comms.group import Group
from microparallel.comms.wire import as_bytes, on_host, to_wire
from microparallel.observe.flight_recorder import Entry, NoEntry
from microparallel.transport.base import Exchange, Receiving, Work


class Messages:
    """A group's messages as a transport: a tensor on a device that the group does not carry goes through the host."""

    def __init__(self, group: Group) -> None:
        self.rank = group.rank
        self.world_size = group.world_size
        self._group = group

    def isend(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:
        """Start sending a tensor."""
        entry = _sending(self._group, tensor, to, tag)
        return RecordedWork(self._group.isend(as_bytes(to_wire(tensor, self._group.carries)), to, tag), entry)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Work:
        """Start receiving into a contiguous tensor."""
        entry = _receiving(self._group, tensor, source, tag)
        work = _received(tensor, self._group.carries, lambda wire: self._group.irecv(wire, source, tag))
        return RecordedWork(work, entry)

    def exchange(self, tag: int = 0) -> Exchange:
        """Open an exchange."""
        return MessageExchange(self._group.exchange(tag), self._group, tag)


class MessageExchange(Receiving):
    """An exchange of a group whose messages may need to start together."""

    def __init__(self, exchange: Exchange, group: Group, tag: int) -> None:
        self._exchange = exchange
        self._group = group
        self._tag = tag

    def isend(self, tensor: torch.Tensor, to: int) -> Work:
        """Add a send."""
        entry = _sending(self._group, tensor, to, self._tag)
        return RecordedWork(self._exchange.isend(as_bytes(to_wire(tensor, self._group.carries)), to), entry)

    def irecv(self, tensor: torch.Tensor, source: int) -> Work:
        """Add a receive."""
        entry = _receiving(self._group, tensor, source, self._tag)
        work = _received(tensor, self._group.carries, lambda wire: self._exchange.irecv(wire, source))
        return RecordedWork(work, entry)

    def close(self) -> None:
        """Start what has not started."""
        self._exchange.close()


def _sending(group: Group, tensor: torch.Tensor, to: int, tag: int) -> Entry | NoEntry:
    content = describe(tensor)
    return group.log.send(f"isend({content}, dest={to})", content, to, tag, tensor.nbytes)


def _receiving(group: Group, tensor: torch.Tensor, source: int, tag: int) -> Entry | NoEntry:
    content = describe(tensor)
    return group.log.recv(f"irecv({content}, src={source})", content, source, tag, tensor.nbytes)


def _received(tensor: torch.Tensor, carries: frozenset[str], start: Callable[[torch.Tensor], Work]) -> Work:
    if tensor.device.type in carries:
        return start(as_bytes(tensor))
    wire = on_host(tensor)
    return StagedReceive(start(as_bytes(wire)), wire, tensor)


class RecordedWork:
    """A message under way, with its entry in the flight recorder; for all but waiting, it is the transport's work."""

    def __init__(self, work: Work, entry: Entry | NoEntry) -> None:
        self._work = work
        self._entry = entry
        entry.started()

    def wait(self, timeout: float | None = None) -> None:
        """Return when the transfer is complete."""
        self._entry.waits()
        try:
            self._work.wait(timeout)
        except BaseException as error:
            self._entry.fails(timed_out=isinstance(error, TimeoutError))
            raise
        self._entry.ends()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class StagedReceive:
    """A receive that arrives in the host's memory, and is copied to its device when it is waited for."""

    def __init__(self, work: Work, wire: torch.Tensor, tensor: torch.Tensor) -> None:
        self._work = work
        self._wire = wire
        self._tensor = tensor

    def wait(self, timeout: float | None = None) -> None:
        """Return when the tensor is there."""
        self._work.wait(timeout)
        self._tensor.copy_(self._wire, non_blocking=self._tensor.is_cuda)
