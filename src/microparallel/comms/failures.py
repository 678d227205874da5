"""Turn a transport's failure into an error that names the rank and the call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from microparallel.comms.calls import Call
from microparallel.comms.group import Group
from microparallel.errors import CommsError, CommsTimeout, PeerLost
from microparallel.flight import Entry, NoEntry
from microparallel.observe import Watched


@contextlib.contextmanager
def named_failures(call: Call, transport: Group, entry: Entry | NoEntry | Watched) -> Iterator[None]:
    """Within this block, whatever the transport raises becomes an error that names the call, and says why it failed."""
    try:
        yield
    except CommsError as error:
        explained = isinstance(error, CommsTimeout | PeerLost) or hasattr(error, "__notes__")
        if not explained and (why := transport.flight.why()):
            error.add_note(why)
        entry.fails(timed_out=isinstance(error, CommsTimeout))
        raise
    except RuntimeError as error:
        named = explain(error, call, transport)
        entry.fails(timed_out=isinstance(named, CommsTimeout))
        raise named from error
    except BaseException:
        entry.fails(timed_out=False)
        raise


def explain(error: RuntimeError, call: Call, transport: Group) -> CommsError:
    """Say which rank a failed call was waiting for, and why; what the flight recorders say comes beneath."""
    here = f"rank {transport.rank}"
    reason = str(error).partition("\n")[0]
    if "timed out" in reason.lower() or "timeout" in reason.lower():
        headline = f"{here} waited in vain in {call}: not every rank it needs made the matching call in time ({reason})"
        return CommsTimeout(headline + _beneath(transport.flight.why()))
    lost = transport.lost_peers()
    if lost:
        why = transport.flight.why([transport.world_ranks[rank] for rank in lost])
        headline = f"{_names(lost, transport)} went away during {call} on {here}"
        return PeerLost(lost, str(call), headline + _beneath(why))
    return CommsError(f"{call} failed on {here}: {reason}")


def _beneath(why: str) -> str:
    return "".join(f"\n  {line}" for line in why.splitlines())


def _names(ranks: list[int], transport: Group) -> str:
    def name(rank: int) -> str:
        world_rank = transport.world_ranks[rank]
        return str(rank) if rank == world_rank else f"{rank} (rank {world_rank} of the world)"

    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(name, ranks))}"
