"""How a call is made: the steps that all primitives of a Comms share.

A `Caller` writes the call into the flight recorder, tells the observers, compares calls in checked mode and starts the
transfer. It returns a `Request`, whose `wait()` brings the result. If the transport fails on the way, `named_failures`
turns its error into one that names the rank and the call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

from microparallel.comms.calls import Call, Checker, describe_content
from microparallel.comms.group import Group
from microparallel.errors import (
    CommsError,
    CommsTimeout,
    LinkLost,
    PeerGone,
    PeerLost,
    TransportError,
    TransportTimeout,
    UsageError,
)
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
        group: Group,
        entry: Entry | NoEntry | ObservedCall,
    ) -> None:
        self._call = call
        self._entry = entry
        self._works = works
        self._finish: Callable[[], Result] | None = finish
        self._group = group
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
                self._failure = error  # what the buffers hold now is no result
                raise
            self._result = self._finish()
            self._finish = None
        return self._result

    def _wait_for(self, works: Sequence[Work], timeout: float | None) -> None:
        self._entry.waits()
        with named_failures(self._call, self._group, self._entry):
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


class Caller:
    """One rank's place in a group, and the steps by which it makes any call: check, start, wait."""

    def __init__(self, group: Group, check: bool) -> None:
        self.rank = group.rank
        self.world_size = group.world_size
        self._group = group
        self._closed = False
        self._checker = Checker(group) if check and group.world_size > 1 else None

    @property
    def observers(self) -> list[Observer]:
        """Who is told of the calls of this world: all its groups have the same, and so has the torch backend."""
        return self._group.flight.observers

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
            with named_failures(call, self._group, entry):
                self._checker.agree(call)
        return self._go_on(call, entry, start, finish)

    def _start(self, call: Call, start: Callable[[], Sequence[Work]], finish: Callable[[], Result]) -> Request[Result]:
        """Start transfers; a connection that is already gone fails here rather than in `wait()`."""
        return self._go_on(call, self._begin(call), start, finish)

    def _begin(
        self, call: Call, operation: Op | None = None, tensor: torch.Tensor | None = None
    ) -> Entry | NoEntry | ObservedCall:
        """Write the call into the flight recorder, and tell the observers that it begins."""
        if self._closed:
            raise UsageError(f"{call}: this Comms has been closed; connect again, or close it later")
        log = self._group.log
        entry: Entry | NoEntry
        if call.peer is None:
            entry = log.collective(call.text, call.agreement, call.size)
        else:
            write = log.send if call.sends else log.recv
            entry = write(call.text, call.agreement, call.peer, size=call.size)
        observers = self.observers
        if not observers:
            return entry
        return observe_call(entry, observers, activity_of(call, self._group, operation, tensor))

    def _go_on(
        self,
        call: Call,
        entry: Entry | NoEntry | ObservedCall,
        start: Callable[[], Sequence[Work]],
        finish: Callable[[], Result],
    ) -> Request[Result]:
        self._group.announce(call.agreement)
        with named_failures(call, self._group, entry):
            works = start()
        entry.started()
        if isinstance(entry, ObservedCall):
            entry.issued(works)
            if len(works) == 1 and (then := getattr(works[0], "then", None)) is not None:
                then(entry.completes)
        return Request(call, works, finish, self._group, entry)

    def _content(self, wire: torch.Tensor) -> str:
        # Where two backends work side by side, both ends must mean the same one.
        place = f" on {wire.device.type}" if len(self._group.carries) > 1 else ""
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


# ── failures, with the rank and the call ────────────────────────────────────────────────────────────────────────────


class named_failures:  # used as a block, as those of contextlib are
    """Within this block, whatever the transport raises becomes an error that names the call, and says why it failed.

    A class, because one made by `contextlib` takes two microseconds, twice in every call.
    """

    __slots__ = ("_call", "_entry", "_group")

    def __init__(self, call: Call, group: Group, entry: Entry | NoEntry | ObservedCall) -> None:
        self._call = call
        self._group = group
        self._entry = entry

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            return
        if not isinstance(error, RuntimeError):
            self._entry.fails(timed_out=False)
            return
        named = explain(error, self._call, self._group)
        self._entry.fails(timed_out=isinstance(named, CommsTimeout))
        if named is not error:
            raise named from error


def explain(error: RuntimeError, call: Call, group: Group) -> CommsError:
    """Say which rank a failed call was waiting for, and why; what the flight recorders say comes beneath.

    An error that names its call already is returned as it is.
    """
    here = f"rank {group.rank}"
    reason = str(error).partition("\n")[0]
    if isinstance(error, TransportTimeout):
        who = f"{_names(error.ranks, group)} did not make" if error.ranks else "not every rank it needs made"
        headline = f"{here} waited in vain in {call}: {who} the matching call in time ({reason})"
        return CommsTimeout(headline + _beneath(group.flight.why()), error.ranks)
    if isinstance(error, PeerGone):
        lost = [group.world_ranks[rank] for rank in error.ranks]
        why = group.flight.why(lost)
        if group.flight.gave_up(lost):
            names = _names(error.ranks, group)
            return CommsTimeout(f"{here} waited in vain in {call}: {names} gave up before{_beneath(why)}", error.ranks)
        headline = f"{_names(error.ranks, group)} went away during {call} on {here}"
        if isinstance(error, LinkLost):
            headline = f"{here} cannot reach {_names(error.ranks, group)} any more, in {call} ({error})"
        return PeerLost(error.ranks, str(call), headline + _beneath(why))
    if not isinstance(error, CommsError) or isinstance(error, TransportError):
        return CommsError(f"{call} failed on {here}: {reason}")
    explained = isinstance(error, CommsTimeout | PeerLost) or hasattr(error, "__notes__")
    if not explained and (why := group.flight.why()):
        error.add_note(why)
    return error


def _beneath(why: str) -> str:
    return "".join(f"\n  {line}" for line in why.splitlines())


def _names(ranks: Sequence[int], group: Group) -> str:
    def name(rank: int) -> str:
        world_rank = group.world_ranks[rank]
        return str(rank) if rank == world_rank else f"{rank} (rank {world_rank} of the world)"

    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(name, ranks))}"
