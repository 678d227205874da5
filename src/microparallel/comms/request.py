"""The handle of a communication that is under way."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

from microparallel.comms.calls import Call, describe_content, named_failures
from microparallel.comms.checking import Checker
from microparallel.comms.group import Group
from microparallel.errors import UsageError
from microparallel.observe import Activity, ObservedCall, Observer, observe_call
from microparallel.observe.flight_recorder import Entry, NoEntry
from microparallel.program import Op
from microparallel.program.ops import Kind, Observed
from microparallel.transport.base import Work

Result = TypeVar("Result")

# Buffers of requests that were dropped before they were waited for. The transport may still read or write them, so they
# live as long as the process: a leak that a warning names is better than memory that changes under a transfer.
_ORPHANS: list[Sequence[Work]] = []


class Request(Generic[Result]):
    """A communication under way. It owns its buffers until `wait()` has returned; keep it until then."""

    def __init__(
        self,
        call: Call,
        works: Sequence[Work],
        finish: Callable[[], Result],
        transport: Group,
        entry: Entry | NoEntry | ObservedCall,
    ) -> None:
        self._call = call
        self._entry = entry
        self._works = works
        self._finish: Callable[[], Result] | None = finish
        self._transport = transport
        self._failure: BaseException | None = None
        self._result: Result

    def wait(self, timeout: float | None = None) -> Result:
        """Return the result when it is there; waiting again returns it again, or raises what was raised.

        Raises:
            CommsTimeout: after `timeout` seconds (None: the timeout of the world).
            PeerLost: when a rank that is needed has gone away.
        """
        if self._failure is not None:
            raise self._failure
        if self._finish is not None:
            works, self._works = self._works, ()
            try:
                self._wait_for(works, timeout)
            except BaseException as error:
                self._failure = error  # what the buffers hold now is nobody's result
                raise
            self._result = self._finish()
            self._finish = None
        return self._result

    def _wait_for(self, works: Sequence[Work], timeout: float | None) -> None:
        self._entry.waits()
        with named_failures(self._call, self._transport, self._entry):
            for work in works:
                work.wait(timeout)
        self._entry.ends()

    def __del__(self) -> None:
        if getattr(self, "_works", ()):
            _ORPHANS.append(self._works)
            warnings.warn(
                f"{self._call} was dropped before it was waited for; keep the request and call wait()",
                ResourceWarning,
                stacklevel=2,
            )

    def __repr__(self) -> str:
        return f"<Request {self._call}, {'under way' if self._finish else 'complete'}>"


# The steps that all communication primitives share: check, start, wait, and name what failed.


class Conversation:
    """One rank's place in a group, and how its calls are made."""

    def __init__(self, transport: Group, check: bool) -> None:
        self.rank = transport.rank
        self.world_size = transport.world_size
        self._transport = transport
        self._closed = False
        self._checker = Checker(transport) if check and transport.world_size > 1 else None

    @property
    def observers(self) -> list[Observer]:
        """Who is told of the calls of this world: all its groups have the same, and so has the torch backend."""
        return self._transport.flight.observers

    def _collective(
        self,
        call: Call,
        start: Callable[[], Sequence[Work]],
        finish: Callable[[], Result],
        operation: Op | None = None,
        tensor: torch.Tensor | None = None,
    ) -> Request[Result]:
        """Start a call that every rank makes, after checking that they do."""
        entry = self._begin(call, operation, tensor)
        if self._checker is not None:
            with named_failures(call, self._transport, entry):
                self._checker.agree(call)
        return self._go_on(call, entry, start, finish)

    def _start(self, call: Call, start: Callable[[], Sequence[Work]], finish: Callable[[], Result]) -> Request[Result]:
        """Start transfers; a connection that is already gone fails here rather than in `wait()`."""
        return self._go_on(call, self._begin(call), start, finish)

    def _begin(
        self, call: Call, operation: Op | None = None, tensor: torch.Tensor | None = None
    ) -> Entry | NoEntry | ObservedCall:
        """Write down that this rank makes a call, and tell the observers."""
        if self._closed:
            raise UsageError(f"{call}: this Comms has been closed; connect again, or close it later")
        log = self._transport.log
        entry: Entry | NoEntry
        if call.peer is None:
            entry = log.collective(call.text, call.agreement, call.size)
        else:
            write = log.send if call.sends else log.recv
            entry = write(call.text, call.agreement, call.peer, size=call.size)
        observers = self.observers
        if not observers:
            return entry
        return observe_call(entry, observers, activity_of(call, self._transport, operation, tensor))

    def _go_on(
        self,
        call: Call,
        entry: Entry | NoEntry | ObservedCall,
        start: Callable[[], Sequence[Work]],
        finish: Callable[[], Result],
    ) -> Request[Result]:
        self._transport.announce(call.agreement)
        with named_failures(call, self._transport, entry):
            works = start()
        entry.started()
        if (
            isinstance(entry, ObservedCall)
            and len(works) == 1
            and (then := getattr(works[0], "then", None)) is not None
        ):
            then(entry.completes)
        return Request(call, works, finish, self._transport, entry)

    def _outputs(self, wire: torch.Tensor) -> list[torch.Tensor]:
        return [torch.empty_like(wire) for _ in range(self.world_size)]

    def _content(self, wire: torch.Tensor) -> str:
        # Where two backends work side by side, both ends must mean the same one.
        place = f" on {wire.device.type}" if len(self._transport.carries) > 1 else ""
        return describe_content(wire.dtype, wire.shape) + place

    def _require_rank(self, name: str, argument: str, rank: int) -> None:
        if not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise UsageError(
                f"{name}: {argument}={rank!r} is not a rank of this world; ranks are 0 to {self.world_size - 1}"
            )

    def _require_peer(self, name: str, argument: str, rank: int) -> None:
        self._require_rank(name, argument, rank)
        if rank == self.rank:
            raise UsageError(f"{name}: {argument}={rank} is this rank itself; a message needs another one")


def activity_of(call: Call, group: Group, operation: Op | None = None, tensor: torch.Tensor | None = None) -> Activity:
    """A call as observers know it: by the operation of a program that it does, or by its own words."""
    world_ranks = group.world_ranks
    kind: Kind = "collective" if call.collective else "send" if call.sends else "receive"
    return Activity(
        Observed(call.text, kind) if operation is None else operation,
        size=call.size,
        group=tuple(world_ranks) if call.collective else (),
        peer=None if call.peer is None else world_ranks[call.peer],
        tensor=tensor,
    )
