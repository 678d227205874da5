"""A Comms that counts: how many bytes does a rank send for its all-reduces?"""

from __future__ import annotations

from typing import Any

import torch

from microparallel.collectives import all_reduce_program
from microparallel.comms import Comms, Request
from microparallel.comms.interpreter import COMBINE, Memory, perform, rounds, slices_of
from microparallel.transport import CountingTransport, Work
from microparallel.transport.base import SeparateMessages


class CountedComms:
    """Stands before a Comms and passes everything on; all-reduces go round a ring of messages, which are counted.

    Transports have collectives of their own, and count differently or not at all. As messages of one and the same
    algorithm, what different ways of training send can be compared, on any transport.

    Attributes:
        all_reduces: how many there were.
    """

    def __init__(self, comms: Comms) -> None:
        self.all_reduces = 0
        self._comms = comms
        self._messages = CountingTransport(_Messages(comms))
        self._program = all_reduce_program("ring", comms.world_size)

    @property
    def bytes_sent(self) -> int:
        """What this rank has sent for all-reduces."""
        return self._messages.bytes_sent

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: str = "sum",
        algorithm: str = "ring",  # noqa: ARG002
        async_op: bool = False,
    ) -> torch.Tensor | _Done:
        """Combine everybody's tensor, in place, on every rank: as `Comms` does, but by a ring and at once."""
        self.all_reduces += 1
        flat = tensor.detach().flatten()  # the same memory where possible
        memory = Memory(flat, slices_of(self._program))
        for work in perform(rounds(self._program.ranks[self._comms.rank]), memory, self._messages, COMBINE[op]):
            work.wait()
        tensor.detach().copy_(flat.view_as(tensor))
        return _Done(tensor) if async_op else tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comms, name)


class _Done:
    """What an asynchronous all-reduce returns that is complete already."""

    def __init__(self, result: torch.Tensor) -> None:
        self._result = result

    def wait(self, timeout: float | None = None) -> torch.Tensor:  # noqa: ARG002
        return self._result


class _Messages:
    """A Comms as a transport: programs run over its `isend` and `irecv`."""

    def __init__(self, comms: Comms) -> None:
        self.rank = comms.rank
        self.world_size = comms.world_size
        self._comms = comms

    def isend(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:  # noqa: ARG002
        return self._comms.isend(tensor, to)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Work:  # noqa: ARG002
        return _Arrival(self._comms.irecv(tensor.shape, source, tensor.dtype), tensor)

    def exchange(self, tag: int = 0) -> SeparateMessages:
        return SeparateMessages(self, tag)


class _Arrival:
    """A receive under way, and where it belongs."""

    def __init__(self, request: Request[torch.Tensor], tensor: torch.Tensor) -> None:
        self._request = request
        self._tensor = tensor

    def wait(self, timeout: float | None = None) -> None:
        self._tensor.copy_(self._request.wait(timeout))
