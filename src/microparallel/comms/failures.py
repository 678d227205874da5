"""Turn a transport's failure into an error that names the rank and the call."""

from __future__ import annotations

from collections.abc import Sequence

from microparallel.comms.calls import Call
from microparallel.comms.group import Group
from microparallel.errors import CommsError, CommsTimeout, PeerGone, PeerLost, TransportError, TransportTimeout
from microparallel.flight import Entry, NoEntry
from microparallel.observe import Watched


class named_failures:  # used as a block, as those of contextlib are
    """Within this block, whatever the transport raises becomes an error that names the call, and says why it failed.

    A class, because one made by `contextlib` takes two microseconds, twice in every call.
    """

    __slots__ = ("_call", "_entry", "_transport")

    def __init__(self, call: Call, transport: Group, entry: Entry | NoEntry | Watched) -> None:
        self._call = call
        self._transport = transport
        self._entry = entry

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            return
        if not isinstance(error, RuntimeError):
            self._entry.fails(timed_out=False)
            return
        named = explain(error, self._call, self._transport)
        self._entry.fails(timed_out=isinstance(named, CommsTimeout))
        if named is not error:
            raise named from error


def explain(error: RuntimeError, call: Call, transport: Group) -> CommsError:
    """Say which rank a failed call was waiting for, and why; what the flight recorders say comes beneath.

    An error that names its call already is returned as it is.
    """
    here = f"rank {transport.rank}"
    reason = str(error).partition("\n")[0]
    if isinstance(error, TransportTimeout):
        who = f"{_names(error.ranks, transport)} did not make" if error.ranks else "not every rank it needs made"
        headline = f"{here} waited in vain in {call}: {who} the matching call in time ({reason})"
        return CommsTimeout(headline + _beneath(transport.flight.why()), error.ranks)
    if isinstance(error, PeerGone):
        why = transport.flight.why([transport.world_ranks[rank] for rank in error.ranks])
        headline = f"{_names(error.ranks, transport)} went away during {call} on {here}"
        return PeerLost(error.ranks, str(call), headline + _beneath(why))
    if not isinstance(error, CommsError) or isinstance(error, TransportError):
        return CommsError(f"{call} failed on {here}: {reason}")
    explained = isinstance(error, CommsTimeout | PeerLost) or hasattr(error, "__notes__")
    if not explained and (why := transport.flight.why()):
        error.add_note(why)
    return error


def _beneath(why: str) -> str:
    return "".join(f"\n  {line}" for line in why.splitlines())


def _names(ranks: Sequence[int], transport: Group) -> str:
    def name(rank: int) -> str:
        world_rank = transport.world_ranks[rank]
        return str(rank) if rank == world_rank else f"{rank} (rank {world_rank} of the world)"

    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(name, ranks))}"
